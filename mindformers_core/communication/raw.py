"""What a backend's collectives have in common: plain, without gradient, one tensor in and one out.

A backend derives its own from those here. Each is written twice, because CPU can do more in PyNative than in a graph:
`@ms.jit` compiles `construct`, while PyNative calls the Cell and so runs `eager`. Where both are the same, `eager` is
`construct`.

Every rank must compile the same graph: MindSpore runs a graph's collectives one after another in an order that follows
from its structure. So what differs between ranks stands in constants only, never in which operators there are.
"""

from mindspore import nn, ops
from mindspore.ops import constexpr

from mindformers_core.communication.counter import record
from mindformers_core.communication.world import process_state, world

_PAD = ops.PadV3()  # unlike `ops.pad` without branches, which a graph's backward can't always compile

__all__ = [
    "Alias",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Identity",
    "Permute",
    "RawCollective",
    "ReduceScatter",
    "chunk",
    "part_length",
    "placed",
    "reordered",
]


class RawCollective(nn.Cell):
    """A collective of one group without gradient.

    Attributes:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute` or `broadcast`.
        takes: names of what it takes after the group, which become attributes.
        group: the `Group`.
    """

    kind = ""
    takes = ()

    def __init__(self, group, *arguments):
        super().__init__(auto_prefix=False)
        self.group = group
        self.size = group.size
        self.index = group.index
        for name, argument in zip(self.takes, arguments, strict=True):
            setattr(self, name, argument)

    def __call__(self, x):
        if process_state().counters:
            record(self.kind, self.group, x)
        return self.uncounted(x)

    def uncounted(self, x):
        """A call that `count_collectives` doesn't see: of what ranks tell each other besides the program."""
        try:
            return self.eager(x)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.kind} over {self.group} failed on rank {world().rank}: another rank has died, is more than the "
                "timeout late, or calls other collectives; every rank's log is in the launcher's log folder"
            ) from error

    def eager(self, x):
        """What PyNative runs."""
        return self.construct(x)


class AllReduce(RawCollective):
    """Every rank gets the reduction of all ranks' tensors. `op`: `sum`, `max` or `min`."""

    kind, takes = "all_reduce", ("op",)


class AllGather(RawCollective):
    """Every rank gets all ranks' tensors, joined along `dim` in the group's order."""

    kind, takes = "all_gather", ("dim",)


class ReduceScatter(RawCollective):
    """Rank i of the group gets part i, along `dim`, of the reduction of all tensors. `op`: `sum`, `max` or `min`."""

    kind, takes = "reduce_scatter", ("dim", "op")


class AllToAll(RawCollective):
    """Rank i gets part i along `to_dim` of every rank's tensor, joined along `dim` in the group's order."""

    kind, takes = "all_to_all", ("dim", "to_dim")


class Permute(RawCollective):
    """Every rank's whole tensor goes to place `destination` of the group, and that of place `origin` comes."""

    kind, takes = "permute", ("destination", "origin")


class Broadcast(RawCollective):
    """Every rank gets the tensor of place `root` of the group."""

    kind, takes = "broadcast", ("root",)


class Identity(nn.Cell):
    """What every collective over one rank is."""

    def __call__(self, x):
        return x

    def construct(self, x):
        # an operator, which the compiler removes: a Cell with a bprop that hands a Parameter through as it is
        # gives that of its first call at every later one
        return ops.cast(x, x.dtype)


class Alias(Identity):
    """An identity for a forward pass: its result is a tensor of its own, in the same memory.

    PyNative takes what a Cell with a `bprop` hands through for a view, and all operators that keep a view keep a copy.
    """

    def __call__(self, x):
        return ops.stop_gradient(x)


@constexpr
def part_length(shape, count, dim):
    """The size of each of `count` equal parts along `dim`; worked out while a graph is compiled.

    MindSpore can't compile a function with a branch that a forward pass and a `bprop` share, if PyNative differentiates
    the graph, as pipeline stages do. Here the graph has none.
    """
    if shape[dim] % count != 0:
        raise ValueError(f"a tensor of shape {shape} can't be cut along dim {dim} into {count} equal parts")
    return shape[dim] // count


def chunk(x, index, count, dim):
    """Part `index` of `count` equal parts of `x` along `dim`."""
    length = part_length(x.shape, count, dim)
    before = (0,) * dim
    after = x.shape[dim + 1 :]
    return ops.slice(x, before + (index * length,) + (0,) * len(after), x.shape[:dim] + (length,) + after)


def placed(x, index, count, dim, fill):
    """`x` as part `index` of `count` equal parts along `dim`; the others hold the scalar tensor `fill`."""
    length = x.shape[dim]
    paddings = (0, 0) * (len(x.shape) - 1 - dim) + (index * length, (count - 1 - index) * length)
    return _PAD(x, paddings, ops.cast(fill, x.dtype))


def reordered(x, order, dim):
    """`x`, cut along `dim` into as many parts as `order` has entries, joined again in that order of parts."""
    if order == tuple(range(len(order))):
        return x
    return ops.cat(tuple([chunk(x, part, len(order), dim) for part in order]), dim)
