"""What a program does as a rank runs it: tensors, where they lie, and what backward passes ask for. Pure Python.

Calls that do the same share a `ForwardTrace`: what the backward pass asks for within is found once for all of them.
"""

from dataclasses import dataclass, field, replace
from math import prod

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.operators.saved import Operand

__all__ = ["ForwardTrace", "BackwardLiveSet", "Memory", "SharedCall", "Run", "Tensor", "placeholder"]


@dataclass(frozen=True)
class Memory:
    """A piece of memory on one rank.

    Attributes:
        key: of the instruction that makes it; empty for that of a `placeholder`.
        number: tells pieces apart.
        nbytes: its size.
        on_host: whether it is a copy on the host, of a result of an instruction.
        view: the `source` of the view of which an operator keeps this copy, or None.
    """

    key: tuple
    number: int
    nbytes: int
    on_host: bool = False
    view: tuple | int | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor as one rank holds it.

    Attributes:
        value: its `Value`.
        shape: local shape.
        strides: in elements.
        needs: whether a gradient flows back to it.
        memory: where it lies; None for what belongs to others: parameters, constants, arguments of the root.
        run: the `Run` that makes it, or None.
        base: the `Tensor` whose memory it shares, or None.
        is_view: whether MindSpore counts it as a view, also of all there is: most operators copy what is.
        has_handle: whether copies of it, where it is a view, can be had again, as it can.
        on_host: the `Memory` of its copy on the host, which is kept in its place, or None.
        repeated: the `SharedCall` that makes it, and the `Tensor` of its course that it is, or None.
    """

    value: object
    shape: tuple
    strides: tuple
    needs: bool
    memory: Memory | None = None
    run: "Run | None" = None
    base: "Tensor | None" = None
    is_view: bool = False
    has_handle: bool = False
    on_host: Memory | None = None
    repeated: "tuple | None" = None

    @property
    def nbytes(self):
        """Bytes of its elements."""
        return prod(self.shape) * ITEM_BYTES[self.value.dtype]

    @property
    def look(self):
        """All of it that what is made of it depends on."""
        how = self.is_view, self.has_handle, self.on_host is not None
        return self.value.dtype, self.shape, self.strides, self.needs, *how

    @property
    def key(self):
        """Of the instruction that makes it, or None."""
        if self.repeated is not None:
            return self.repeated[0].key + self.repeated[1].key
        return None if self.run is None else self.run.key

    @property
    def source(self):
        """Key of the instruction that makes it, or the number of a `placeholder`, or None."""
        if self.key is not None:
            return self.key
        return self.memory.number if self.memory is not None and self.memory.key == () else None

    def operand(self, place):
        """The same as an `Operand`."""
        return Operand(place, self.shape, self.value.dtype, ITEM_BYTES[self.value.dtype], self.needs)


def placeholder(tensor, number):
    """A `Tensor` that looks like another one, which is given to a call that others repeat; with its place there."""
    return replace(tensor, memory=Memory((), number, 0), run=None, base=None, on_host=None, repeated=None)


@dataclass(frozen=True, eq=False)
class Run:
    """One operator, or one step of a move, as it runs.

    Attributes:
        key: of the instruction that it belongs to.
        inputs: the `Tensor`s that it takes.
        made: pieces of `Memory` of its results.
        saved: `Tensor`s that its gradient keeps.
        own: pieces of `Memory` that its gradient keeps and that are neither input nor result: copies, statistics.
    """

    key: tuple
    inputs: tuple
    made: list = field(default_factory=list)
    saved: list = field(default_factory=list)
    own: list = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class BackwardLiveSet:
    """What has to be available in the backward pass.

    Attributes:
        kept: pieces of `Memory` that are kept, as the keys of a dict.
        again: keys of instructions that run again, in the same way.
        given: placeholders that have to be available.
    """

    kept: dict = field(default_factory=dict)
    again: dict = field(default_factory=dict)
    given: dict = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ForwardTrace:
    """What a program does, in order, for one set of dropped instructions.

    Attributes:
        dropped: their keys.
        given: the placeholders that it is given; none for that of a whole program.
        runs: `Run`s and `SharedCall`s.
        results: key of the root, `()`, and of every call that is gone into -> the `Tensor`s that it gives.
    """

    dropped: frozenset
    given: tuple = ()
    runs: list = field(default_factory=list)
    results: dict = field(default_factory=dict)
    _demands: dict = field(default_factory=dict)

    def results_of(self, key):
        """The `Tensor`s that the call at `key` gives, also within a repetition, or None where there is no such call."""
        if key in self.results:
            return self.results[key]
        for run in self.runs:
            if isinstance(run, SharedCall) and key[: len(run.key)] == run.key:
                found = run.course.results_of(key[len(run.key) :])
                return None if found is None else [*map(run.tensor, found)]
        return None

    def events(self, outer=lambda memory: memory):
        """`(made, own, used)`: the `Memory` of every run, those of repetitions as `outer` gives them."""
        for run in self.runs:
            if isinstance(run, SharedCall):
                yield from run.course.events(lambda memory, run=run: outer(run.memory(memory)))
                continue
            used = [outer(tensor.memory) for tensor in run.inputs if tensor.memory is not None]
            made, own = (list(map(outer, some)) for some in (run.made, run.own))
            yield made, own, [memory for memory in used if memory is not None]

    def demand(self, tensor=None):
        """The `BackwardLiveSet` of one of its tensors; None: of all that its gradients keep."""
        if tensor not in self._demands:
            found = self._demands[tensor] = BackwardLiveSet()
            for run in self.runs if tensor is None else ():
                if isinstance(run, SharedCall):
                    self._hold(run.add_demand(None, found), found)
                else:
                    found.kept.update(dict.fromkeys(run.own))
                    self._hold(run.saved, found)
            self._hold([] if tensor is None else [tensor], found)
        return self._demands[tensor]

    def _hold(self, tensors, found):
        """Tensors have to be available. Long chains are dropped, so there is no recursion."""
        waiting, seen = [*tensors][::-1], set()
        while waiting:
            tensor = waiting.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            if tensor.repeated is not None:
                repetition, inner = tensor.repeated
                waiting.extend(repetition.add_demand(inner, found))
            elif tensor in self.given:
                found.given[tensor] = None
            elif tensor.run is None or tensor.run.key not in self.dropped or not tensor.run.inputs:
                memory = tensor.on_host or tensor.memory
                if memory is not None:
                    found.kept[memory] = None
            else:
                found.again[tensor.run.key] = None
                waiting.extend(tensor.run.inputs)


class SharedCall:
    """A call that does what a `ForwardTrace` says.

    Args:
        key: of the call.
        course: its root at `()`.
        given: the `Tensor`s in the place of the course's placeholders.
    """

    def __init__(self, key, course, given):
        self.key, self.course = key, course
        self._given = dict(zip(course.given, given, strict=True))
        self._sources = [tensor.source for tensor in given]
        self._memories = {other.memory: tensor.memory for other, tensor in self._given.items()}

    def tensor(self, inner):
        """The `Tensor` that one of the course's is here."""
        if inner in self._given:
            return self._given[inner]
        if inner.key is None:  # a parameter or a constant
            return inner
        base = None if inner.base is None else self.tensor(inner.base)
        memory = None if inner.memory is None else self.memory(inner.memory)
        on_host = None if inner.on_host is None else self.memory(inner.on_host)
        return replace(inner, memory=memory, run=None, base=base, on_host=on_host, repeated=(self, inner))

    def add_demand(self, inner, found):
        """Add `ForwardTrace.demand` to a `BackwardLiveSet`; returns the `Tensor`s that have to be available for it."""
        demand = self.course.demand(inner)
        kept = map(self.memory, demand.kept)
        found.kept.update(dict.fromkeys(memory for memory in kept if memory is not None))
        found.again.update(dict.fromkeys(self.key + key for key in demand.again))
        return [self._given[other] for other in demand.given]

    def memory(self, inner):
        """The `Memory` that one of the course's is here; None for what belongs to others."""
        if inner in self._memories:
            return self._memories[inner]
        view = inner.view
        if view is not None:
            view = self._sources[view] if isinstance(view, int) else self.key + view
        return replace(inner, key=self.key + inner.key, view=view)
