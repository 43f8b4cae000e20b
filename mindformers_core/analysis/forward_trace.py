"""The trace of a forward pass on one rank: tensors, their memory, and the live set of the backward pass. Pure Python.

Equal calls share a `ForwardTrace`, so its live set is computed once for all of them.
"""

from dataclasses import dataclass, field, replace

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.operators.saved import Operand


@dataclass(frozen=True)
class Memory:
    """A piece of memory on one rank.

    Attributes:
        key: key of the producing instruction; empty for the memory of a `placeholder`.
        number: identifies the piece.
        nbytes: size in bytes.
        on_host: whether the piece is a host copy of an instruction's result.
        view: for the copy of a view that an operator saves, the `source` of the view; otherwise None.
    """

    key: tuple
    number: int
    nbytes: int
    on_host: bool = False
    view: tuple | int | None = field(default=None, compare=False)

    @property
    def owner(self):
        """Key of the instruction to drop so that the memory is freed."""
        return self.view if isinstance(self.view, tuple) else self.key


@dataclass(frozen=True, eq=False)
class LocalTensor:
    """A tensor as one rank holds it.

    Attributes:
        shape: local shape.
        strides: in elements.
        requires_grad: whether a gradient flows back to it.
        memory: its `Memory`; None for parameters, constants and arguments of the root, which the caller owns.
        run: the producing `Run`, or None.
        base: the `LocalTensor` whose memory it shares, or None.
        is_view: whether MindSpore treats it as a view, even one of the whole tensor: most operators copy a view.
        has_handle: whether it is dropped or on the host, so that a copy of a view of it need not be saved either.
        on_host: `Memory` of the host copy that is saved in its place, or None.
        shared: the producing `SharedCall` and the corresponding `LocalTensor` of its trace, or None.
    """

    value: object
    shape: tuple
    strides: tuple
    requires_grad: bool
    memory: Memory | None = None
    run: "Run | None" = None
    base: "LocalTensor | None" = None
    is_view: bool = False
    has_handle: bool = False
    on_host: Memory | None = None
    shared: "tuple | None" = None

    @property
    def traits(self):
        """All of its properties on which the trace of a consumer depends."""
        how = self.is_view, self.has_handle, self.on_host is not None
        return self.value.dtype, self.shape, self.strides, self.requires_grad, *how

    @property
    def key(self):
        """Key of the producing instruction, or None."""
        if self.shared is not None:
            return self.shared[0].key + self.shared[1].key
        return None if self.run is None else self.run.key

    @property
    def source(self):
        """Key of the producing instruction, the number of a `placeholder`, or None."""
        if self.key is not None:
            return self.key
        return self.memory.number if self.memory is not None and self.memory.key == () else None

    def operand(self, place):
        """The tensor as the `Operand` at an argument's place."""
        return Operand(place, self.shape, self.value.dtype, ITEM_BYTES[self.value.dtype], self.requires_grad)


def placeholder(tensor, number):
    """A `LocalTensor` with the traits of another one: argument `number` of a trace that several calls share."""
    return replace(tensor, memory=Memory((), number, 0), run=None, base=None, on_host=None, shared=None)


@dataclass(frozen=True, eq=False)
class Run:
    """One run of an operator, or of a step of a redistribution.

    Attributes:
        key: key of its instruction.
        inputs: its input `LocalTensor`s.
        made: pieces of `Memory` of its results.
        saved: inputs and results that are saved for its gradient.
        internal: pieces of `Memory` saved for its gradient that are neither input nor result: copies, statistics.
    """

    key: tuple
    inputs: tuple
    made: list = field(default_factory=list)
    saved: list = field(default_factory=list)
    internal: list = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class BackwardLiveSet:
    """Tensors that the backward pass reads.

    Attributes:
        kept: pieces of `Memory` that stay allocated, as keys of a dict.
        recomputed: keys of instructions that run again, as keys of a dict.
        given: placeholders that are read, as keys of a dict.
    """

    kept: dict = field(default_factory=dict)
    recomputed: dict = field(default_factory=dict)
    given: dict = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ForwardTrace:
    """The forward pass of a program, or of equal calls, for one set of dropped instructions.

    Attributes:
        dropped: keys of the dropped instructions.
        given: placeholders of its arguments; none for the trace of a whole program.
        runs: `Run`s and `SharedCall`s, in order.
        results: key of the root, `()`, and of each call that is traced inline -> its result `LocalTensor`s.
    """

    dropped: frozenset
    given: tuple = ()
    runs: list = field(default_factory=list)
    results: dict = field(default_factory=dict)
    _live_sets: dict = field(default_factory=dict)

    def results_of(self, key):
        """Result `LocalTensor`s of the call at `key`, also inside a `SharedCall`; None without such a call."""
        if key in self.results:
            return self.results[key]
        for run in self.runs:
            if isinstance(run, SharedCall) and key[: len(run.key)] == run.key:
                found = run.trace.results_of(key[len(run.key) :])
                return None if found is None else [*map(run.tensor, found)]
        return None

    def events(self, outer=lambda memory: memory):
        """Yield `(made, internal, used)`, the `Memory` of each run; `outer` maps the memory of a shared trace."""
        for run in self.runs:
            if isinstance(run, SharedCall):
                yield from run.trace.events(lambda memory, run=run: outer(run.memory(memory)))
                continue
            used = [outer(tensor.memory) for tensor in run.inputs if tensor.memory is not None]
            made, internal = (list(map(outer, some)) for some in (run.made, run.internal))
            yield made, internal, [memory for memory in used if memory is not None]

    def live_set(self, tensor=None):
        """The `BackwardLiveSet` of one of its tensors; None: of all tensors that are saved for gradients."""
        if tensor not in self._live_sets:
            found = self._live_sets[tensor] = BackwardLiveSet()
            for run in self.runs if tensor is None else ():
                if isinstance(run, SharedCall):
                    self._require(run.add_live_set(None, found), found)
                else:
                    found.kept.update(dict.fromkeys(run.internal))
                    self._require(run.saved, found)
            self._require([] if tensor is None else [tensor], found)
        return self._live_sets[tensor]

    def _require(self, tensors, found):
        """Add tensors that the backward pass reads. No recursion: chains of dropped instructions are long."""
        waiting, seen = [*tensors][::-1], set()
        while waiting:
            tensor = waiting.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            if tensor.shared is not None:
                call, inner = tensor.shared
                waiting.extend(call.add_live_set(inner, found))
            elif tensor in self.given:
                found.given[tensor] = None
            elif tensor.run is None or tensor.run.key not in self.dropped or not tensor.run.inputs:
                memory = tensor.on_host or tensor.memory
                if memory is not None:
                    found.kept[memory] = None
            else:
                found.recomputed[tensor.run.key] = None
                waiting.extend(tensor.run.inputs)


class SharedCall:
    """A call whose `ForwardTrace` other calls share.

    Args:
        key: key of the call.
        trace: the shared trace, with its root at `()`.
        given: the argument `LocalTensor`s, one for each placeholder of the trace.
    """

    def __init__(self, key, trace, given):
        self.key, self.trace = key, trace
        self._given = dict(zip(trace.given, given, strict=True))
        self._sources = [tensor.source for tensor in given]
        self._memories = {other.memory: tensor.memory for other, tensor in self._given.items()}

    def tensor(self, inner):
        """The `LocalTensor` of this call for one of the shared trace."""
        if inner in self._given:
            return self._given[inner]
        if inner.key is None:  # a parameter or a constant
            return inner
        base = None if inner.base is None else self.tensor(inner.base)
        memory = None if inner.memory is None else self.memory(inner.memory)
        on_host = None if inner.on_host is None else self.memory(inner.on_host)
        return replace(inner, memory=memory, run=None, base=base, on_host=on_host, shared=(self, inner))

    def add_live_set(self, inner, found):
        """Add the trace's live set to a `BackwardLiveSet`; returns the argument `LocalTensor`s that it reads."""
        live = self.trace.live_set(inner)
        kept = map(self.memory, live.kept)
        found.kept.update(dict.fromkeys(memory for memory in kept if memory is not None))
        found.recomputed.update(dict.fromkeys(self.key + key for key in live.recomputed))
        return [self._given[other] for other in live.given]

    def memory(self, inner):
        """The `Memory` of this call for one of the shared trace; None for memory that the caller owns."""
        if inner in self._memories:
            return self._memories[inner]
        view = inner.view
        if view is not None:
            view = self._sources[view] if isinstance(view, int) else self.key + view
        return Memory(self.key + inner.key, inner.number, inner.nbytes, inner.on_host, view)
