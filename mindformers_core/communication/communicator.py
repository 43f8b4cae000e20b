"""The collectives of one mesh: from a step of a redistribution plan to the Cell that carries it out, each made once."""

from mindformers_core.communication import collectives
from mindformers_core.communication.world import process_state
from mindformers_core.mesh import DeviceMesh

__all__ = ["Communicator", "communicator"]

_CELLS = {  # step kind -> (Cell, which of the step's attributes it takes after mesh and axes)
    "slice": (collectives.SliceToShard, ("dim",)),
    "slice_varying": (collectives.SliceVarying, ("dim",)),
    "all_gather": (collectives.AllGather, ("dim",)),
    "all_gather_varying": (collectives.AllGatherVarying, ("dim",)),
    "all_to_all": (collectives.AllToAll, ("dim", "to_dim")),
    "permute": (collectives.Permute, ("source", "target")),
    "all_reduce": (collectives.AllReduce, ("op",)),
    "all_reduce_varying": (collectives.AllReduceVarying, ("op",)),
    "reduce_scatter": (collectives.ReduceScatter, ("dim", "op")),
    "mark_varying": (collectives.MarkVarying, ()),
    "unmark_varying": (collectives.UnmarkVarying, ()),
    "to_partial": (collectives.ToPartial, ("op",)),
    "to_partial_varying": (collectives.ToPartialVarying, ()),
    "pad": (collectives.PadToPartial, ("dim",)),
}


class Communicator:
    """Makes and keeps the Cells of one mesh; get it from `communicator(mesh)`."""

    def __init__(self, mesh):
        self.mesh = mesh
        self._cells = {}

    def cell(self, step):
        """The differentiable Cell, local tensor in and out, that carries out a `Step`.

        Steps that differ only in shape and dtype share one. The first call for new axes creates a process group and
        must be made by all its ranks.

        Raises:
            ValueError: a step on another mesh, or a mesh that this process can't communicate on.
        """
        cell_class, names = _CELLS[step.kind]
        arguments = tuple(getattr(step, name) for name in names)
        key = (step.kind, step.axes, *arguments)
        if key not in self._cells:
            if step.source.mesh != self.mesh:
                raise ValueError(f"{step} is on {step.source.mesh!r}, not on this communicator's {self.mesh!r}")
            self._cells[key] = cell_class(self.mesh, step.axes, *arguments)
        return self._cells[key]


def communicator(mesh):
    """The `Communicator` of `mesh`, one for each mesh and process.

    Raises:
        TypeError: `mesh` is no `DeviceMesh`.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"communicator({mesh!r}): give a DeviceMesh, as init_device_mesh() makes it")
    known = process_state().communicators
    if mesh not in known:
        known[mesh] = Communicator(mesh)
    return known[mesh]
