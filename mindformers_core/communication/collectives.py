"""Differentiable collectives: Cells with a `bprop`, the form that MindSpore honours in PyNative and under `@ms.jit`.

Each moves a local tensor from one placement to another on `axes` of `mesh` (one joint group, major to minor), and its
gradient back; the pairs are those of JAX's `shard_map` and of Megatron-LM's *f* and *g*. Over axes of size 1, or none,
each is an identity and sends nothing. Tensor dims are counted from 0. The ranks of a group must make and call the same
collectives in the same order. A failed collective raises a `RuntimeError` with its kind, axes and ranks in PyNative; in
a graph it raises MindSpore's error, with the operator and the line of code of its call.
"""

from collections import deque
from functools import partial

from mindspore import nn, ops

from mindformers_core.communication.backend_cpu import CpuCollective
from mindformers_core.communication.backend_native import NativeCollective
from mindformers_core.communication.groups import make_group
from mindformers_core.communication.local import Alias, Identity, Keep, Pad, Reshape, Scale, Slice, SliceOfGradient
from mindformers_core.communication.raw import RawCollective
from mindformers_core.communication.simulated import SimulatedCollective
from mindformers_core.communication.world import world
from mindformers_core.hints import nearest
from mindformers_core.redistribution.steps import EXTREMES, STEP_KINDS, ring

__all__ = [
    "AllGather", "AllGatherVarying", "AllReduce", "AllReduceVarying", "AllToAll", "Collective", "Combine", "Dispatch",
    "MarkVarying", "PadToPartial", "Permute", "ReduceScatter", "Shift", "SliceToShard", "SliceVarying", "ToPartial",
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


class Routing(Collective):
    """`dispatch` or `combine`, which are also given `sizes`, unless they are of meta: see `ShardContext.dispatched`."""

    def __init__(self, forward, backward):
        super().__init__(forward, backward)
        self.of_sizes = _OfSizes(forward, backward)

    def __call__(self, x, *sizes):
        return self.of_sizes(x, *sizes) if sizes and not sizes[0].is_meta else super().__call__(x)


class _OfSizes(nn.Cell):
    """A `Routing` in PyNative; as many rows go back with a gradient."""

    def __init__(self, forward, backward):
        super().__init__(auto_prefix=False)
        self.forward, self.backward = forward, backward
        self.used_bprop_inputs = (1, 3)

    def construct(self, x, sizes):
        return self.forward(x, sizes.asnumpy().tolist())

    def bprop(self, x, sizes, out, dout):
        return self.backward(dout, sizes.asnumpy().tolist()[::-1]), ops.zeros_like(sizes)


class _Extreme(Collective):
    """A maximum or minimum: the gradient goes to the elements that hold it, in equal shares.

    Args:
        forward: the reduction.
        gather: a Cell from the shape of the output to that of the input.
        count: the same reduction, by sums.
    """

    def __init__(self, forward, gather, count):
        super().__init__(forward, gather)
        self.count = count
        self.used_bprop_inputs = _EVERYTHING

    def bprop(self, x, out, dout):
        holds = ops.cast(ops.equal(x, self.backward(out)), dout.dtype)
        return (holds * self.backward(dout / self.count(holds)),)


_LOCAL = {  # operation of a step that is no collective -> its Cell forward, and for a gradient
    "identity": (lambda *_: Alias(), lambda *_: Identity()),
    "scale": (None, lambda *_: Identity()),
    "mask": (Keep, Keep),
    "slice": (Slice, SliceOfGradient),
    "pad": (Pad, Pad),
    "view": (lambda _, shape, to_shape: Reshape(to_shape), lambda _, shape, to_shape: Reshape(shape)),
}


def make_collective(kind, mesh, axes, *given, **named):
    """The `Collective` that carries out a kind of step: what `STEP_KINDS` says of it, forward and backward.

    An average is divided by the number of ranks both ways; the gradient of a copy that becomes partial, multiplied.

    Args:
        kind: a key of `STEP_KINDS`.
        mesh, axes: the mesh, and the axes of the joint group, major to minor.
        given, named: values of the kind's attributes, in their order and by name. Default of `op`: `"sum"`.

    Raises:
        TypeError: an attribute that is missing, or that the kind doesn't have.
        ValueError: an unknown axis or reduction, or layouts between which nothing can be permuted.
    """
    row, group = STEP_KINDS[kind], make_group(mesh, axes)
    usual = {"op": "sum"} if "op" in row.attributes else {}
    values = usual | dict(zip((*row.attributes, *given), given)) | named  # one too many is a name that no kind has
    if values.keys() != set(row.attributes):
        takes, got = (", ".join(map(str, each)) for each in (row.attributes, values))
        raise TypeError(f"collective '{kind}' over {axes} takes {takes or 'nothing else'}, not {got or 'nothing'}")
    op, dims = values.get("op", "sum"), tuple(values[name] for name in row.attributes if name != "op")
    if op not in row.ops:
        raise ValueError(f"unknown reduction {op!r}: choose one of {', '.join(row.ops)}{nearest(op, row.ops)}")
    if kind in ARGUMENTS:
        dims = ARGUMENTS[kind](mesh, group, *dims)
    is_extreme = op in EXTREMES and row.source == "partial" and group.size > 1
    forward, backward = (row.forward, row.backward) if is_extreme else row.runs(op)
    cell = _operation(forward, group, 0, dims, op if op in EXTREMES else "sum")
    gradient = _operation(backward, group, 1, dims, "sum")
    if is_extreme:
        return _Extreme(cell, gradient, _operation(forward, group, 0, dims, "sum"))
    share = float(group.size) if row.target == "partial" else 1.0 / group.size
    if op == "avg" and row.source == "partial":
        cell = _scaled(cell, group, share)
    if op == "avg" or backward == "scale":
        gradient = _scaled(gradient, group, share)
    return (Routing if getattr(cell, "routes", False) else Collective)(cell, gradient)


def _operation(name, group, way, dims, op):
    """The Cell of one operation of a step: forward (way 0), or for the gradient (1), which goes back.

    A collective over one rank is an identity.
    """
    if name in _LOCAL:
        return _LOCAL[name][way](group, *dims)
    if group.size == 1:
        return Identity()
    dims = dims[::-1] if way else dims
    return _BACKENDS[world().backend](group, name, *dims, *[op] * ("reduce" in name))


# Public names of the kinds: functions of mesh, axes, and attributes of the kind.
AllReduce = partial(make_collective, "all_reduce")  # Partial -> Replicate; `op`: `sum`, `avg`, `max`, `min`
AllReduceVarying = partial(make_collective, "all_reduce_varying")  # Partial -> Varying; `op`: `sum` or `avg`
AllGather = partial(make_collective, "all_gather")  # Shard(dim) -> Replicate
AllGatherVarying = partial(make_collective, "all_gather_varying")  # Shard(dim) -> Varying
ReduceScatter = partial(make_collective, "reduce_scatter")  # Partial -> Shard(dim); `op` as of `AllReduce`
AllToAll = partial(make_collective, "all_to_all")  # Shard(dim) -> Shard(to_dim)
Permute = partial(make_collective, "permute")  # equal parts to other ranks, from layout `source` to layout `target`
Shift = partial(make_collective, "shift")  # each local tensor to the rank `distance` further along the axes, in a ring
# Rows of a tensor of `rows` go to other ranks into one of `to_rows`: `cell(x, sizes)`, with int32 sizes (2, ranks), how
# many go to each rank, and come from each. For several ranks; graphs take the Cell of a `Communicator`.
Dispatch = partial(make_collective, "dispatch")  # `rows` in turn, into as much room for each rank: see `RawCollective`
Combine = partial(make_collective, "combine")  # the way back
SliceToShard = partial(make_collective, "slice")  # Replicate -> Shard(dim)
SliceVarying = partial(make_collective, "slice_varying")  # Varying -> Shard(dim)
MarkVarying = partial(make_collective, "mark_varying")  # Replicate -> Varying
UnmarkVarying = partial(make_collective, "unmark_varying")  # Varying -> Replicate
ToPartial = partial(make_collective, "to_partial")  # Replicate -> Partial(op)
ToPartialVarying = partial(make_collective, "to_partial_varying")  # Varying -> Partial("sum")
PadToPartial = partial(make_collective, "pad")  # Shard(dim) -> Partial("sum")
View = partial(make_collective, "view")  # the same elements of a rank in other dims, `shape` to `to_shape`


def _scaled(cell, group, factor):
    """`cell`, and the multiplication by a factor after it, where there are several ranks."""
    return Scale(cell, factor) if group.size > 1 else cell


def _routes(mesh, group, source, target):
    """For all places in `group`: where their parts in `source` go, and where their parts in `target` come from."""
    held = [
        {tuple(mesh.group_index(rank, axes) for axes in layout.axes): place for place, rank in enumerate(group.ranks)}
        for layout in (source, target)
    ]
    if held[0].keys() != held[1].keys() or len(held[0]) < group.size:
        raise ValueError(f"Permute over {group} can't go from {source} to {target}: not each part has one rank")
    return tuple(tuple(to[part] for part in parts) for parts, to in (held, held[::-1]))


# Kind of step -> function of mesh, group and attributes that gives its operation's arguments, where these are others.
ARGUMENTS = {"permute": _routes, "shift": lambda mesh, group, distance: ring(group.size, distance)}
ARGUMENTS["shift_some"] = lambda mesh, group, distance, givers: ring(group.size, distance, givers)
