"""Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) of matrices that lie in slices.

The steps have the size of AdamW's, and decay, as in Liu et al., "Muon is Scalable for LLM Training", 2025, so that both
take one learning rate.
"""

from fnmatch import fnmatchcase

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.communication import communicator, world
from mindformers_core.optimizers.adamw import AdamW, moments
from mindformers_core.padding import stored_shape

_QUINTIC = 3.4445, -4.7750, 2.0315  # of Jordan et al.: singular values come near 1, to about 0.7 to 1.2, in five steps


class Muon(nn.Cell):
    """Momentum whose step is made orthogonal: `weight -= rate * (size * orthogonal(step) + weight_decay * weight)`.

    `step` is `moment`, of `moment = momentum * moment + gradient`, or with `nesterov` `gradient + momentum * moment`;
    `size = rms * sqrt(max(rows, columns))`. Every rank gathers the step of a whole matrix, computes on it what one card
    would, and takes its part: one all-gather for each cut dim, and the products of one card, on every rank that has a
    part. One float32 moment of the local shape.

    Parameters that aren't matrices, and those whose names match `adamw_parameters`, are updated by AdamW.

    Args:
        parameters: the trainable parameters; `layout` and `global_shape` where they are distributed.
        momentum, nesterov, rms: as above; the root mean square of an AdamW step is about 0.2 to 0.4.
        iterations: of Newton and Schulz, in float32.
        adamw_parameters: patterns of names: embeddings and heads.
        betas, eps: of AdamW.
        weight_decay: decoupled, of both.
    """

    def __init__(
        self, parameters, momentum=0.95, nesterov=True, iterations=5, rms=0.2, weight_decay=0.1,
        adamw_parameters=("*embed*", "*lm_head*"), betas=(0.9, 0.95), eps=1e-8,
    ):  # fmt: skip
        super().__init__(auto_prefix=False)
        self.momentum, self.nesterov, self.iterations, self.weight_decay = momentum, nesterov, iterations, weight_decay
        shapes = [tuple(getattr(each, "global_shape", each.shape)) for each in parameters]
        named = [any(fnmatchcase(each.name, pattern) for pattern in adamw_parameters) for each in parameters]
        own = [len(shape) == 2 and not other for shape, other in zip(shapes, named)]
        self.places, self.others = (tuple(n for n, each in enumerate(own) if each is told) for told in (True, False))
        matrices = [parameters[place] for place in self.places]
        self.matrices, self.moments = ms.ParameterTuple(matrices), moments(matrices, "muon.moment.")
        self.sizes = tuple(rms * max(shapes[place]) ** 0.5 for place in self.places)
        self.wholes = nn.CellList([WholeMatrix(each) for each in matrices])
        self.adamw = AdamW([parameters[place] for place in self.others], betas, eps, weight_decay)

    def scalars(self, step, learning_rate):
        """`(rate, …)` for the step of this number, from 1 on; the others are AdamW's."""
        return ms.Tensor(learning_rate, ms.float32), *self.adamw.scalars(step, learning_rate)

    def construct(self, gradients, rate, *of_adamw):
        """One step; scalars as of the method."""
        for index, place in enumerate(self.places):
            weight, gradient = ops.cast(self.matrices[index], ms.float32), ops.cast(gradients[place], ms.float32)
            moment = self.momentum * self.moments[index] + gradient
            ops.assign(self.moments[index], moment)
            step = gradient + self.momentum * moment if self.nesterov else moment
            whole = self.wholes[index]
            step = whole.part(orthogonal(whole(step), self.iterations))
            moved = weight - rate * (self.sizes[index] * step + self.weight_decay * weight)
            ops.assign(self.matrices[index], ops.cast(moved, self.matrices[index].dtype))
        rest = ()
        for place in self.others:
            rest = rest + (gradients[place],)
        self.adamw(rest, *of_adamw)


class WholeMatrix(nn.Cell):
    """The whole of a tensor that lies as a parameter does, gathered from all ranks that have parts of it."""

    def __init__(self, parameter):
        super().__init__()
        layout, gathers, self.own = getattr(parameter, "layout", None), [], ()
        if layout is not None and layout.cut_axes:
            pairs = [(dim, axes) for dim, axes in enumerate(layout.dims) if axes]
            gathers = [communicator(layout.mesh).make("all_gather", axes, dim=dim) for dim, axes in pairs]
            own = layout.local_slices(stored_shape(parameter), world().rank)
            self.own = tuple((each.start or 0, size) for each, size in zip(own, parameter.shape))
        self.gathers = nn.CellList(gathers)

    def construct(self, part):
        for gather in self.gathers:
            part = gather(part)
        return part

    def part(self, whole):
        """This rank's part."""
        for dim, (begin, size) in enumerate(self.own):
            whole = ops.narrow(whole, dim, begin, size)
        return whole


def orthogonal(matrix, iterations):
    """The nearest orthogonal matrix, about, by Newton and Schulz's iteration; zero for zero."""
    is_tall, (first, third, fifth) = matrix.shape[0] > matrix.shape[1], _QUINTIC
    x = ops.transpose(matrix, (1, 0)) if is_tall else matrix
    x = x / (ops.sqrt(ops.square(x).sum()) + 1e-7)
    for _ in range(iterations):
        gram = ops.matmul(x, ops.transpose(x, (1, 0)))
        x = first * x + ops.matmul(third * gram + fifth * ops.matmul(gram, gram), x)
    return ops.transpose(x, (1, 0)) if is_tall else x
