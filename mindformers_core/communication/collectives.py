"""Differentiable collectives: Cells with a `bprop`, the form that MindSpore honours in PyNative and under `@ms.jit`.

Each moves a local tensor from one placement to another on `axes` of `mesh` (one joint group, major to minor), and its
gradient back; the pairs are those of JAX's `shard_map` and of Megatron-LM's *f* and *g*. Over axes of size 1, or none,
each is an identity and sends nothing. Tensor dims are counted from 0. The ranks of a group must make and call the same
collectives in the same order. A failed collective raises a `RuntimeError` with its kind, axes and ranks in PyNative; in
a graph it raises MindSpore's error, with the operator and the line of code of its call.
"""

from collections import deque

from mindspore import nn, ops

from mindformers_core.communication.backend_cpu import CpuCollective
from mindformers_core.communication.backend_native import NativeCollective
from mindformers_core.communication.groups import make_group
from mindformers_core.communication.local import Alias, Identity, Keep, Pad, Reshape, Scale, Slice, SliceOfGradient
from mindformers_core.communication.raw import RawCollective
from mindformers_core.communication.simulated import SimulatedCollective
from mindformers_core.communication.world import world
from mindformers_core.hints import nearest
from mindformers_core.layout import PARTIAL_OPS
from mindformers_core.redistribution.steps import EXTREMES

__all__ = [
    "AllGather", "AllGatherVarying", "AllReduce", "AllReduceVarying", "AllToAll", "Broadcast", "Collective",
    "MarkVarying", "PadToPartial", "Permute", "ReduceScatter", "SliceToShard", "SliceVarying", "ToPartial",
    "ToPartialVarying", "UnmarkVarying", "View",
]  # fmt: skip

_MOST_FORWARD = 4096  # calls of one collective whose gradients are to come
_EVERYTHING, _ONLY_THE_GRADIENT = (0, 1, 2), (2,)  # of the inputs of a `bprop`: x, out, dout
_BACKENDS = {
    "native": NativeCollective, "cpu": CpuCollective, "fake": RawCollective, "simulated": SimulatedCollective
}  # fmt: skip


class Collective(nn.Cell):
    """A forward Cell, and a Cell for its gradient. Local tensor in, local tensor out, of any shape and dtype.

    Args:
        forward: a Cell without gradient.
        backward: a Cell from the output's gradient to the input's.
    """

    def __init__(self, forward, backward):
        super().__init__(auto_prefix=False)
        self.forward = forward
        self.backward = backward
        self.used_bprop_inputs = _ONLY_THE_GRADIENT  # else PyNative keeps x and out for the backward pass
        communicates = getattr(backward, "cell", backward)  # in a `Scale`
        self.forward_places = None  # of calls whose gradients are to come, for the report of a hang
        if isinstance(communicates, RawCollective):
            self.forward_places = communicates.forward_places = deque(maxlen=_MOST_FORWARD)

    def construct(self, x):
        return self.forward(x)

    def bprop(self, x, out, dout):
        return (self.backward(dout),)


class _Reduction(Collective):
    """A reduction with `op`. The gradient of an extreme goes to the elements that hold it, in equal shares.

    Args:
        mesh, axes, op: as in the collectives that are reductions.
        kind: `all_reduce` or `reduce_scatter`.
        dim: of a reduce_scatter.
    """

    def __init__(self, mesh, axes, op, kind, *dim):
        _check_op(op, PARTIAL_OPS)
        group = make_group(mesh, axes)
        reduce = _raw(kind, group, *dim, "sum" if op == "avg" else op)
        gather = _raw("all_gather", group, *dim) if dim else Identity()  # from the output to the input's shape
        super().__init__(_averaged(reduce, group, op), _averaged(gather, group, op))
        self.gather = gather
        self.is_extreme = op in EXTREMES and group.size > 1
        self.used_bprop_inputs = _EVERYTHING if self.is_extreme else _ONLY_THE_GRADIENT
        self.count = _raw(kind, group, *dim, "sum")

    def bprop(self, x, out, dout):
        if self.is_extreme:
            holds = ops.cast(ops.equal(x, self.gather(out)), dout.dtype)
            return (holds * self.gather(dout / self.count(holds)),)
        return (self.backward(dout),)


def AllReduce(mesh, axes, op="sum"):
    """Partial → Replicate: all_reduce / identity. `op`: `sum`, `avg` (÷ n both ways), `max`, `min`."""
    return _Reduction(mesh, axes, op, "all_reduce")


def AllReduceVarying(mesh, axes, op="sum"):
    """Partial → Varying: all_reduce / all_reduce. `op`: `sum` or `avg` (÷ n both ways)."""
    _check_op(op, ("sum", "avg"))
    group = make_group(mesh, axes)
    # one each: see `local.part_length`
    return Collective(*(_averaged(_raw("all_reduce", group, "sum"), group, op) for _ in range(2)))


def AllGather(mesh, axes, dim):
    """Shard(dim) → Replicate: all_gather / slice."""
    group = make_group(mesh, axes)
    return Collective(_raw("all_gather", group, dim), SliceOfGradient(group, dim))


def AllGatherVarying(mesh, axes, dim):
    """Shard(dim) → Varying: all_gather / reduce_scatter."""
    group = make_group(mesh, axes)
    return Collective(_raw("all_gather", group, dim), _raw("reduce_scatter", group, dim, "sum"))


def ReduceScatter(mesh, axes, dim, op="sum"):
    """Partial → Shard(dim): reduce_scatter / all_gather. `op` as in `AllReduce`."""
    return _Reduction(mesh, axes, op, "reduce_scatter", dim)


def AllToAll(mesh, axes, dim, to_dim):
    """Shard(dim) → Shard(to_dim): all_to_all both ways."""
    group = make_group(mesh, axes)
    return Collective(_raw("all_to_all", group, dim, to_dim), _raw("all_to_all", group, to_dim, dim))


def Permute(mesh, axes, source, target):
    """Layout `source` → layout `target`, which shard the tensor into equal parts but assign the parts to other ranks.

    Every rank sends its local tensor to one rank and receives one; gradients are sent the opposite way.
    """
    group = make_group(mesh, axes)
    destination, origin = _route(mesh, group, source, target), _route(mesh, group, target, source)
    return Collective(_raw("permute", group, destination, origin), _raw("permute", group, origin, destination))


def Broadcast(mesh, axes, root=0):
    """Every rank gets the tensor of place `root` of the group; the gradient is zero except on the root's rank."""
    group = make_group(mesh, axes)
    if root not in range(mesh.axis_size(*group.axes)):
        raise ValueError(f"Broadcast root {root}: the group over {group} has places 0 to {group.size - 1}")
    return Collective(_raw("broadcast", group, root), Keep(group, root))


def SliceToShard(mesh, axes, dim):
    """Replicate → Shard(dim): slice / all_gather."""
    group = make_group(mesh, axes)
    return Collective(Slice(group, dim), _raw("all_gather", group, dim))


def SliceVarying(mesh, axes, dim):
    """Varying → Shard(dim): slice / pad. Sends nothing."""
    group = make_group(mesh, axes)
    return Collective(Slice(group, dim), Pad(group, dim))


def MarkVarying(mesh, axes):
    """Replicate → Varying: identity / all_reduce."""
    return Collective(Alias(), _raw("all_reduce", make_group(mesh, axes), "sum"))


def UnmarkVarying(mesh, axes):
    """Varying → Replicate: identity / ÷ n. Sends nothing."""
    return Collective(Alias(), _averaged(Identity(), make_group(mesh, axes), "avg"))


def ToPartial(mesh, axes, op="sum"):
    """Replicate → Partial: zero except on the group's first rank / identity for `sum`.

    For the other ops all ranks keep the tensor, and gradients are shares of the whole gradient: × n for `avg`, whose
    shares are equal; summed by an all_reduce for `max` and `min`.
    """
    _check_op(op, PARTIAL_OPS)
    group = make_group(mesh, axes)
    if op == "sum":
        return Collective(Keep(group, 0), Identity())
    if op == "avg":
        return Collective(Alias(), Scale(Identity(), float(group.size)) if group.size > 1 else Identity())
    return Collective(Alias(), _raw("all_reduce", group, "sum"))


def ToPartialVarying(mesh, axes):
    """Varying → Partial("sum"): zero except on the group's first rank, both ways. Sends nothing."""
    group = make_group(mesh, axes)
    return Collective(Keep(group, 0), Keep(group, 0))


def PadToPartial(mesh, axes, dim):
    """Shard(dim) → Partial("sum"): the part put into zeros / slice. Sends nothing."""
    group = make_group(mesh, axes)
    return Collective(Pad(group, dim), SliceOfGradient(group, dim))


def View(mesh, axes, shape, to_shape):
    """The same elements of a rank in other dims: a reshape both ways. Sends nothing."""
    return Collective(Reshape(to_shape), Reshape(shape))


def _raw(kind, group, *arguments):
    """The collective of a kind over `group` by the world's backend; an identity over one rank."""
    if group.size == 1:
        return Identity()
    return _BACKENDS[world().backend](group, kind, *arguments)


def _averaged(cell, group, op):
    """`cell`, and for `avg` the division by the number of ranks after it."""
    return Scale(cell, 1.0 / group.size) if op == "avg" and group.size > 1 else cell


def _check_op(op, allowed):
    if op not in allowed:
        raise ValueError(f"unknown reduction {op!r}: choose one of {', '.join(allowed)}{nearest(op, allowed)}")


def _route(mesh, group, source, target):
    """Place in `group` of the rank whose part in `target` is this rank's part in `source`."""

    def held(rank, layout):
        return [mesh.group_index(rank, axes) for axes in layout.axes]

    mine = held(group.ranks[group.index], source)
    places = [place for place, rank in enumerate(group.ranks) if held(rank, target) == mine]
    if len(places) != 1:
        raise ValueError(
            f"Permute over {group} can't go from {source} to {target}: {len(places)} ranks would hold this rank's part"
        )
    return places[0]
