"""The collectives of one mesh: from a step of a redistribution plan to the Cell that carries it out, each made once."""

from mindspore import dtype as mstype, nn, ops

from mindformers_core.communication.collectives import Routing, make_collective
from mindformers_core.communication.world import process_state
from mindformers_core.hints import nearest
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.mindspore_private import needs_gradient
from mindformers_core.redistribution.steps import STEP_KINDS

_ZEROS_LIKE = ops.ZerosLike()  # `ops.zeros_like` has branches, which a graph's backward can't always compile


class _Shared(nn.Cell):
    """A collective that is called in many places of a graph.

    Where PyNative differentiates a compiled function, MindSpore takes all results of a Cell with a `bprop` for the
    result of its last call. An operator after each call prevents that; a reshape copies nothing.

    Attributes:
        collective: the Cell with the `bprop`.
    """

    def __init__(self, collective):
        super().__init__(auto_prefix=False)
        self.collective = collective
        self.with_one_dim_more = _WithOneDimMore(collective)
        self.with_sizes = _WithSizes(collective) if isinstance(collective, Routing) else None

    def __call__(self, x, *others):
        y = self.collective(x, *others)
        places, watch = self.collective.forward_places, process_state().watch
        if watch is not None and places is not None and needs_gradient(y):
            places.append(watch.recorder.place())
        return y

    def construct(self, x, sizes=None):
        if x.dtype in mstype.int_type + mstype.uint_type:  # MindSpore can't compile their gradients
            x = ops.stop_gradient(x)
            return self.collective.forward(x) if sizes is None else self.collective.forward(x, sizes)
        y = self.with_one_dim_more(x) if sizes is None else self.with_sizes(x, ops.cast(sizes, mstype.float32))
        return ops.reshape(y, y.shape[1:])


class _WithOneDimMore(nn.Cell):
    """A collective whose result has one dim more, in front, of size 1."""

    def __init__(self, collective):
        super().__init__(auto_prefix=False)
        self.collective = collective

    def construct(self, x):
        return ops.expand_dims(self.collective.forward(x), 0)

    def bprop(self, x, out, dout):
        return self.collective.bprop(x, ops.reshape(out, out.shape[1:]), ops.reshape(dout, dout.shape[1:]))


class _WithSizes(_WithOneDimMore):
    """Likewise a `Routing`; as many rows go back with a gradient."""

    def construct(self, x, sizes):
        return ops.expand_dims(self.collective.forward(x, sizes), 0)

    def bprop(self, x, sizes, out, dout):
        back = ops.cat((sizes[1:], sizes[:1]), 0)
        return self.collective.backward(ops.reshape(dout, dout.shape[1:]), back), _ZEROS_LIKE(sizes)


class Communicator:
    """Makes and keeps the Cells of one mesh; get it from `communicator(mesh)`."""

    def __init__(self, mesh):
        self.mesh = mesh
        self._cells = {}

    def cell(self, step):
        """The differentiable Cell, local tensor in and out, that carries out a `Step`; as `make` gives it.

        Raises:
            ValueError: a step on another mesh, or a mesh that this process can't communicate on.
        """
        if step.source.mesh != self.mesh:
            raise ValueError(f"{step} is on {step.source.mesh!r}, not on this communicator's {self.mesh!r}")
        return self.make(step.kind, step.axes, **collective_attributes(step))

    def make(self, kind, axes, number=0, **attributes):
        """The differentiable Cell of a kind of step: `make("all_gather", axes=("tp",), dim=1)`.

        Equal calls share one. The first call for new axes creates a process group and must be made by all its ranks.

        Args:
            kind: a key of `STEP_KINDS`.
            axes: mesh axes of the joint group, major to minor.
            number: distinguishes Cells whose other arguments are equal.
            attributes: those of the kind: `dim`, `to_dim`, `op` (default: `"sum"`), (permute) the layouts `source` and
                `target`, (shift) `distance`, and (dispatch, combine) `rows` and `to_rows`; these two are called with
                `sizes`, too, see `ShardContext.dispatched`.

        Raises:
            TypeError: an attribute that is missing, or that the kind doesn't have.
            ValueError: an unknown kind or axis, layouts on another mesh, or a mesh that this process can't
                communicate on.
        """
        if kind not in STEP_KINDS:
            known = ", ".join(STEP_KINDS)
            raise ValueError(f"unknown collective {kind!r}: choose one of {known}{nearest(kind, STEP_KINDS)}")
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        attributes = {name: self._own(value, f"{kind} {name}") for name, value in attributes.items()}
        key = kind, axes, number, frozenset(attributes.items())
        if key not in self._cells:
            self._cells[key] = _Shared(make_collective(kind, self.mesh, axes, **attributes))
        return self._cells[key]

    def _own(self, value, what):
        """The value of an attribute; of a layout its sharding alone, without partial and varying axes."""
        if not isinstance(value, Layout):
            return value
        if value.mesh != self.mesh:
            raise ValueError(f"{what} is on {value.mesh!r}, not on this communicator's {self.mesh!r}")
        return value.replace(partial=(), varying=())


def collective_attributes(step):
    """The arguments of `Communicator.make` for a `Step`, besides its kind and axes."""
    return {name: getattr(step, name) for name in STEP_KINDS[step.kind].attributes}


def communicator(mesh):
    """The `Communicator` of `mesh`, one for each mesh and process.

    Raises:
        TypeError: `mesh` is no `DeviceMesh`.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"communicator({mesh!r}): give a DeviceMesh, as init_device_mesh() makes it")
    known = process_state().memo(__name__)
    if mesh not in known:
        known[mesh] = Communicator(mesh)
    return known[mesh]
