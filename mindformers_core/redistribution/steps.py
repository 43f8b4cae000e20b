"""The single steps of redistributions: the placements before and after, and the operations forward and backward.

`STEP_KINDS` is the table of the design (section 2) as data. That every forward has its own, different backward is the
idea of Megatron-LM's *f* and *g* functions and of JAX's `pvary`, spelled out for every pair of placements.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from mindformers_core.dtypes import ITEM_BYTES, wire_dtype
from mindformers_core.layout import Layout

EXTREMES = ("max", "min")
SUMS = ("sum", "avg")
ALL_OPS = (*SUMS, *EXTREMES)


@dataclass(frozen=True)
class StepKind:
    """One row of the table.

    Attributes:
        source: placement of the step's axes before: one of `shard`, `replicate`, `partial`, `varying`.
        target: their placement after.
        forward: the collective, or the local operation, that runs forward.
        backward: the same for the gradient.
        attributes: names of the attributes of a `Step` that say which part of a tensor, or which reduction, it is.
        by_op: for some partial ops, `(forward, backward)` in place of these.
        ops: the partial ops of which the step is possible.
        hint: what the tensor after it is called in generated code; "" where it goes by the steps around it.
        text: of the forward operation in reports. Default: that of the operation.
    """

    source: str
    target: str
    forward: str
    backward: str
    attributes: tuple = ()
    by_op: tuple = ()
    ops: tuple = ALL_OPS
    hint: str = ""
    text: str = ""

    def runs(self, op):
        """`(forward, backward)` for partial `op`, or None."""
        return dict(self.by_op).get(op, (self.forward, self.backward))


ALL_REDUCE_BY_OP = (("avg", ("all_reduce", "scale")), *((op, ("all_reduce", "all_reduce")) for op in EXTREMES))
TO_PARTIAL_BY_OP = (("avg", ("identity", "scale")), *((op, ("identity", "all_reduce")) for op in EXTREMES))

# Of local operations, "mask" keeps the group's first rank and puts zeros on the others, "pad" puts a slice into zeros,
# "scale" multiplies or divides by the group's size, as the gradient of an average asks for.
# A maximum sends its gradient to the ranks that hold it, in equal shares: these have to be counted, by an all-reduce.
# A copy that became partial max collects such shares, so its gradient is their sum.
STEP_KINDS = {
    "slice": StepKind("replicate", "shard", "slice", "all_gather", ("dim",), hint="slice"),
    "slice_varying": StepKind("varying", "shard", "slice", "pad", ("dim",), hint="slice"),
    "all_gather": StepKind("shard", "replicate", "all_gather", "slice", ("dim",), hint="whole"),
    "all_gather_varying": StepKind("shard", "varying", "all_gather", "reduce_scatter", ("dim",), hint="whole"),
    "all_to_all": StepKind("shard", "shard", "all_to_all", "all_to_all", ("dim", "to_dim"), hint="exchanged"),
    "permute": StepKind("shard", "shard", "permute", "permute", ("source", "target"), hint="exchanged"),
    "reduce_scatter": StepKind("partial", "shard", "reduce_scatter", "all_gather", ("dim", "op"), hint="scattered"),
    "all_reduce": StepKind("partial", "replicate", "all_reduce", "identity", ("op",), ALL_REDUCE_BY_OP, hint="sum"),
    "all_reduce_varying": StepKind("partial", "varying", "all_reduce", "all_reduce", ("op",), ops=SUMS, hint="sum"),
    "mark_varying": StepKind("replicate", "varying", "identity", "all_reduce", hint="marked", text="marked varying"),
    "unmark_varying": StepKind("varying", "replicate", "identity", "scale", hint="unmarked"),
    "to_partial": StepKind("replicate", "partial", "mask", "identity", ("op",), TO_PARTIAL_BY_OP, hint="term"),
    "to_partial_varying": StepKind("varying", "partial", "mask", "mask", ops=("sum",), hint="term"),
    "pad": StepKind("shard", "partial", "pad", "slice", ("dim",), ops=("sum",), hint="padded"),
    # without placements, so never found by the search for a plan: the same elements in other dims, around the steps of
    # strided ones; and what distributed algorithms ask for: a ring, and rows for each rank, as many as there are
    "view": StepKind("", "", "view", "view", ("local_shape", "output_shape")),
    "shift": StepKind("", "", "permute", "permute", ("distance",), hint="shifted"),
    "shift_some": StepKind("", "", "permute", "permute", ("distance", "givers"), hint="shifted"),
    "dispatch": StepKind("", "", "dispatch", "combine", ("rows", "to_rows"), hint="dispatched"),
    "combine": StepKind("", "", "combine", "dispatch", ("rows", "to_rows"), hint="combined"),
}

# Of each collective: how often a rank sends in turn, and how many n-ths of the *larger* of its input and output leave a
# rank of a group of n, by the ring algorithms (Thakur, Rabenseifner, Gropp 2005). Other operations are local, and free.
COLLECTIVES = {
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), (lambda n: n - 1, lambda n: n - 1)),
    **dict.fromkeys(("dispatch", "combine"), (lambda n: n - 1, lambda n: n - 1)),  # if as many rows go to each rank
    "all_reduce": (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1)),
    "permute": (lambda n: 1, lambda n: n),
}
# The same of backends that carry some of them in other ways. A graph of devices sends each rank room for all rows in
# turn, since shapes are static. A graph on CPU has sums of floats alone: an all-gather is the sum of buffers as large
# as its result, and what goes from rank to rank is first gathered by all.
CARRIED = {
    "native": COLLECTIVES,
    "native graph": COLLECTIVES | dict.fromkeys(("dispatch", "combine"), (lambda n: n - 1, lambda n: n * (n - 1))),
    "cpu": COLLECTIVES,
    "cpu graph": COLLECTIVES
    | dict.fromkeys(("all_gather", "reduce_scatter"), COLLECTIVES["all_reduce"])
    | dict.fromkeys(("all_to_all", "permute"), (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) * n))
    | dict.fromkeys(("dispatch", "combine"), (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) * n * n)),
}


# Operations that send nothing, in words.
LOCAL_OPERATIONS = {
    "slice": "sliced",
    "pad": "put into zeros",
    "mask": "zeros but on the first rank",
    "scale": "scaled",
    "identity": "nothing",
    "view": "viewed in other dims",
}
# Attributes of steps, in words: a reduction, and where.
ATTRIBUTES = {"op": "{}", "distance": "by {}", "dim": "dim {}", "to_dim": "to {}"}


def wire_bytes(name, group_size, whole):
    """Bytes that one rank sends in collective `name` over `group_size` ranks; 0 for a local operation.

    Args:
        name: a key of `COLLECTIVES`, or a local operation.
        group_size: number of ranks in the group.
        whole: bytes of the larger of a rank's input and output.
    """
    if name not in COLLECTIVES:
        return 0
    return int(-(-COLLECTIVES[name][1](group_size) * whole // group_size))


@dataclass(frozen=True)
class Step:
    """One step of a plan: a local tensor in, a local tensor out, on every rank of the mesh.

    Attributes:
        kind: a key of `STEP_KINDS`.
        axes: mesh axes of the joint group, major to minor.
        dim: tensor dim that is gathered, sliced, scattered to, padded, or split from; None for others.
        to_dim: the dim that an all_to_all shards; None for others.
        op: `sum`, `avg`, `max` or `min` of the partial placement involved; None for others.
        source: layout before.
        target: layout after.
        shape: shape of the global tensor before.
        itemsize: bytes of one element that is sent.
        to_shape: shape of the global tensor after a view, a dispatch, or a combine; None for others, which keep it.
        distance: by how many places of the group a shift moves tensors; None for others.
        givers: the places of the group whose tensors a `shift_some` moves; None for others.
    """

    kind: str
    axes: tuple
    dim: int | None
    to_dim: int | None
    op: str | None
    source: Layout
    target: Layout
    shape: tuple
    itemsize: int
    to_shape: tuple | None = None
    distance: int | None = None
    givers: tuple | None = None

    @cached_property
    def group_size(self):
        """Number of ranks that take part together."""
        return self.source.mesh.axis_size(*self.axes)

    @cached_property
    def local_shape(self):
        """Shape of the local tensor before."""
        return self.source.local_shape(self.shape)

    @cached_property
    def output_shape(self):
        """Shape of the local tensor after."""
        return self.target.local_shape(self.to_shape or self.shape)

    @property
    def rows(self):
        """Length of the local tensor before."""
        return self.local_shape[0]

    @property
    def to_rows(self):
        """Length of the local tensor after."""
        return self.output_shape[0]

    @property
    def whole(self):
        """Bytes of the larger of a rank's input and output; of a dispatch or combine those of its rows in turn."""
        given, found = prod(self.local_shape), prod(self.output_shape)
        return {"dispatch": given, "combine": found}.get(self.kind, max(given, found)) * self.itemsize

    @property
    def forward(self):
        """`(name, bytes)`: the forward collective and the bytes that a rank sends in it (0 for a local operation).

        Where some ranks send nothing, the mean of all.
        """
        return self._traffic(0)

    @property
    def backward(self):
        """`(name, bytes)`: the backward collective and the bytes that a rank sends in it (0 for a local operation)."""
        return self._traffic(1)

    @property
    def nbytes(self):
        """Bytes that a rank sends forward."""
        return self.forward[1]

    def _traffic(self, way):
        name = STEP_KINDS[self.kind].runs(self.op)[way]
        sent = wire_bytes(name, self.group_size, self.whole)
        return name, sent if self.givers is None else sent * len(self.givers) // self.group_size

    def words(self, attributes=tuple(ATTRIBUTES)):
        """Its attributes of some names in words, `["avg", "dim 0"]`; a sum goes without saying."""
        given = [(ATTRIBUTES[name], getattr(self, name)) for name in attributes if name in ATTRIBUTES]
        return [text.format(value) for text, value in given if value not in (None, "sum")]

    def __str__(self):
        dims = "" if self.dim is None else f" dim {self.dim}"
        dims += "" if self.to_dim is None else f" to dim {self.to_dim}"
        op = "" if self.op is None else f" {self.op}"
        op += "" if self.distance is None else f" by {self.distance}"
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        return f"{self.kind}{op}{dims}{over}: {self.source} -> {self.target}, {self.nbytes} bytes"


def ring(size, distance, givers=None):
    """Of a shift by so many places in a group: for each place the one that it gives to, and that it gets from.

    Of some `givers` alone there is None for a place that gives nothing, or gets nothing.
    """
    giving = range(size) if givers is None else givers
    to = tuple((place + distance) % size if place in giving else None for place in range(size))
    origins = ((place - distance) % size for place in range(size))
    return to, tuple(origin if origin in giving else None for origin in origins)


def receives_first(origins, place):
    """Whether a place of a shift receives before it sends, where a send waits for its receive.

    Of each cycle or chain of places every second one does; `origins`: for each place the one that it gets from.
    """
    chain = [place]
    while origins[chain[-1]] not in (None, place):
        chain.append(origins[chain[-1]])
    number = len(chain) - 1 if origins[chain[-1]] is None else chain.index(min(chain))
    return bool(number % 2) and origins[place] is not None


def shift_step(mesh, axes, distance, local_shape, dtype, givers=None):
    """The `Step` in which each rank of a group gives a local tensor to the one `distance` places further, in a ring.

    Args:
        mesh, axes: the mesh, and the axes of the joint group, major to minor.
        distance: number of places in the group; below 0 it goes back.
        local_shape, dtype: of a rank's tensor.
        givers: places of the group whose tensors go; other ranks get zeros. Default: all.
    """
    layout = Layout.on(mesh, [()] * len(local_shape), varying=axes)
    itemsize = ITEM_BYTES[wire_dtype(dtype)]
    kind = "shift" if givers is None else "shift_some"
    known = None, None, None, layout, layout, tuple(local_shape), itemsize, None, distance, givers
    return Step(kind, tuple(axes), *known)


def routing_step(kind, mesh, axes, local_shape, dtype, to_rows):
    """The `Step` in which each rank of a group gets as many rows (rows, …) of every rank as data say.

    Args:
        kind: `dispatch`, or `combine`, which takes its rows back.
        mesh, axes, local_shape, dtype: as of `shift_step`.
        to_rows: length of a rank's tensor after it.
    """
    return replace(shift_step(mesh, axes, None, local_shape, dtype), kind=kind, to_shape=(to_rows, *local_shape[1:]))
