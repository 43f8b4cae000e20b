"""Clipping by the global norm (Pascanu et al. 2013) of gradients that lie in slices on a mesh."""

from fnmatch import fnmatchcase

from mindspore import float32, float64, nn, ops

from mindformers_core.communication import communicator
from mindformers_core.grouping import grouped


class ClipByGlobalNorm(nn.Cell):
    """Scales all gradients by one factor so that their joint L2 norm over the whole mesh is at most `max_norm`.

    The norm counts every element of the global gradients once, in float32; gradients in float64 stay in it. Parameters
    that the same axes shard are summed together, and each such set of axes costs one all-reduce of a scalar. The same
    in PyNative and inside a function that is compiled.

    Args:
        parameters: this rank's parameters; `parameter.layout` (a `Layout`) where it is distributed.
        max_norm: 0 leaves the gradients as they are.
        mesh, over: a mesh and its axes along which ranks hold other parameters, as the stages of a pipeline do: the
            norm is that of all of them. All ranks of such a group have to take part. Default: none.
        counted: for every parameter whether the norm counts it here; tied parameters are counted on one rank, once
            (see `PipelineStage.counted`). Default: all.
        dtype: of the norm of a rank that counts nothing, as other ranks have it. Default: float32.

    Inputs:
        A tuple of plain local tensors in the parameters' order, final: replicated over the axes that don't shard their
        parameter.

    Outputs:
        `(gradients, norm)`: a tuple, and the norm before clipping, a float32 scalar that is the same on all ranks.
    """

    def __init__(self, parameters, max_norm, mesh=None, over=(), counted=None, dtype=float32):
        super().__init__()
        self.max_norm, self.dtype = max_norm, dtype
        counted = (True,) * len(parameters) if counted is None else tuple(counted)
        self._given = tuple(parameters), mesh, over, counted
        pairs = enumerate(zip(parameters, counted, strict=True))
        # MindSpore leaves a sum of no elements unwritten
        places = [place for place, (each, counts) in pairs if counts and each.size]
        self.places, self.sums = sums_over_parts(parameters, places)
        self.sum_of_all = sum_cell(mesh, tuple(over))

    def of_names(self, patterns):
        """The same for all gradients, but of which the norm counts those whose parameters' names match a pattern."""
        parameters, mesh, over, counted = self._given
        matched = [any(fnmatchcase(each.name, pattern) for pattern in patterns) for each in parameters]
        counted = [one and other for one, other in zip(matched, counted)]
        return ClipByGlobalNorm(parameters, 0, mesh, over, counted, self.dtype)

    def construct(self, gradients):
        norm = self.norm(gradients)
        return self.clipped(gradients, norm), norm

    def norm(self, gradients):
        """The joint norm; NaN or infinite on all ranks if an element on any of them is."""
        total = ops.zeros((), self.dtype)  # a tensor where this rank counts nothing, too
        for index, places in enumerate(self.places):
            squares = 0.0
            for place in places:
                gradient = gradients[place]
                gradient = gradient if gradient.dtype == float64 else ops.cast(gradient, float32)
                squares = squares + ops.square(gradient).sum()
            total = total + self.sums[index](squares)
        return ops.sqrt(self.sum_of_all(total))

    def clipped(self, gradients, norm):
        """The gradients, scaled for their joint `norm`."""
        if self.max_norm == 0:
            return gradients
        # the small term keeps a norm of zero from making NaN
        factor = ops.minimum(self.max_norm / (norm + 1e-6), ops.ones_like(norm))
        clipped, scale = (), factor
        for gradient in gradients:
            if scale.dtype != gradient.dtype:
                scale = ops.cast(factor, gradient.dtype)
            clipped = clipped + (gradient * scale,)
        return clipped


def clip_by_global_norm(gradients, parameters, max_norm, **across_stages):
    """`ClipByGlobalNorm(parameters, max_norm, …)(gradients)`, in PyNative: a compiled function needs the Cell."""
    return ClipByGlobalNorm(parameters, max_norm, **across_stages)(tuple(gradients))


def sums_over_parts(parameters, places):
    """Places of parameters, together where the same axes shard them: tuples, and of each the Cell that sums over these.

    The Cells are a `CellList`.
    """
    groups = grouped((sharding_of(parameters[place]), place) for place in places)
    return tuple(map(tuple, groups.values())), nn.CellList([sum_cell(mesh, axes) for mesh, axes in groups])


def sum_cell(mesh, axes):
    """The Cell that sums a tensor over axes of a mesh; the identity without axes."""
    return communicator(mesh).make("all_reduce", axes, op="sum") if axes else nn.Identity()


def sharding_of(parameter):
    """`(mesh, axes)` that shard a parameter; `(None, ())` for one that isn't distributed."""
    layout = getattr(parameter, "layout", None)
    if layout is None:
        return None, ()
    return layout.mesh, tuple(axis for axis in layout.mesh.axis_names if any(axis in axes for axes in layout.dims))
