"""How many bytes of activations a rank holds at the peak, by a plan. Pure Python.

What counts are results: what operators make, and what a `Move` makes of a tensor (also of a parameter: a gathered
weight is held like an activation). A step that is the identity makes nothing, and neither does an operator that only
views its input (`is_view`). The arguments of the root and stored parameters belong to others. What an operator, a
distributed algorithm or a move of several steps needs while it runs is not in these figures.
"""

from math import prod

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.operators.views import is_view
from mindformers_core.program.aliases import match_arguments
from mindformers_core.program.plan import CallPlan, Move
from mindformers_core.program.structure import values_in
from mindformers_core.redistribution.steps import STEP_KINDS

__all__ = ["activation_peaks"]


def activation_peaks(frame, dropped=frozenset()):
    """`(training, evaluation)`: the largest number of bytes of results that a rank holds at once in the forward pass.

    Over all instructions in the order in which they run, those of called Cells in the place of the call: a result is
    held from the instruction that makes it to the last one that uses it or a view of it, or to the end where the root
    returns it. An instruction holds what it makes and what it uses together. In training all results through which a
    gradient flows to a trainable parameter are held to the end, since the backward pass may need them: this is the
    most that automatic differentiation keeps; operators whose gradient needs no input or output let go of more.

    Args:
        frame: the `FramePlan`.
        dropped: keys of instructions (see `ExplainedActivations`) whose results aren't held for the backward pass. What
            they take is, but where it is dropped, too; and so is a result of which a view is held.
    """
    flat = _Flat(dropped)
    held = flat.run(frame, {})
    returned = [held[value.id, layout] for value, layout in zip(values_in(frame.graph.result), frame.results)]
    events = [*flat.events, ((), returned)]
    last = {store: place for place, (made, used) in enumerate(events) for store in (*made, *used) if store is not None}
    end = len(events) - 1
    return _peak(flat, events, last | dict.fromkeys(flat.saved(), end)), _peak(flat, events, last)


def _peak(flat, events, last):
    """The most bytes at once, where every piece of memory is let go of after its `last` event."""
    freed = {}
    for store, place in last.items():
        freed[place] = freed.get(place, 0) + flat.sizes[store]
    peak = alive = 0
    for place, (made, _) in enumerate(events):
        alive += sum(flat.sizes[store] for store in made)
        peak = max(peak, alive)
        alive -= freed.get(place, 0)
    return peak


def _made(entry, gradients):
    """`(value, layout, bytes, whether a gradient flows through it)` of all that an instruction makes by itself."""
    if isinstance(entry, Move):
        if _copies(entry):
            yield entry.value, entry.target, _bytes(entry.value, entry.target), entry.gradient
    elif not _views(entry):
        for value, layout in zip(values_in(entry.node.outputs), entry.outputs):
            yield value, layout, _bytes(value, layout), value.id in gradients


def _views(entry):
    """Whether an `OperatorPlan`, or the `CallPlan` of a Cell with a `bprop`, makes nothing of its own."""
    return not isinstance(entry, CallPlan) and entry.algorithm is None and is_view(entry.node.operator)


def _copies(move):
    """Whether a redistribution makes a new tensor on a rank."""
    return any(STEP_KINDS[step.kind].runs(step.op)[0] != "identity" for step in move.steps)


def _bytes(value, layout):
    return prod(layout.local_shape(value.shape)) * ITEM_BYTES[value.dtype]


class _Flat:
    """All instructions in the order in which they run.

    Attributes:
        sizes: bytes of every piece of memory, by its number.
        events: `(numbers of what is made, numbers of what is used)` of every instruction; None for what isn't counted.
    """

    def __init__(self, dropped):
        self.sizes, self.events = [], []
        self._dropped = dropped
        self._saved, self._taken, self._gone = set(), set(), set()  # numbers: by gradients, by what is dropped, dropped

    def saved(self):
        """Numbers of those that the backward pass may need."""
        return (self._saved | (self._taken - self._gone)) - {None}

    def run(self, frame, given, before=()):
        """Append a frame's events; `(number of Value, layout) -> memory` of all that is at hand at its end.

        Args:
            given: the same for what the caller passes; what is missing isn't counted.
            before: the key of the frame's call.
        """
        graph = frame.graph
        outside = [*values_in(graph.arguments), *(use.value for use in (*graph.parameters, *graph.constants))]
        outside += [use.value for use in graph.outer]
        held = {(value.id, frame.layouts[value.id]): None for value in outside if value.id in frame.layouts} | given
        for index, entry in enumerate(frame.instructions):
            key = (*before, index)
            if isinstance(entry, CallPlan) and entry.frame is not None:
                self._call(entry, held, key)
            else:
                self._step(entry, held, frame.gradients, key in self._dropped)
        return held

    def _step(self, entry, held, gradients, is_dropped):
        if isinstance(entry, Move):
            used = [held[entry.value.id, entry.source]]
            views = [] if _copies(entry) else [(entry.value, entry.target)]
        else:
            values = values_in((entry.node.args, entry.node.kwargs))
            used = [held[value.id, layout] for value, layout in zip(values, entry.inputs)]
            views = zip(values_in(entry.node.outputs), entry.outputs) if _views(entry) else []
        self._taken.update(used if is_dropped else ())
        for value, layout in views:
            held[value.id, layout] = used[0]
            if used[0] in self._gone and not is_dropped and value.id in gradients:
                self._saved.add(used[0])
        made = []
        for value, layout, size, flows in _made(entry, gradients):
            made.append(len(self.sizes))
            held[value.id, layout] = len(self.sizes)
            if is_dropped:
                self._gone.add(len(self.sizes))
            elif flows:
                self._saved.add(len(self.sizes))
            self.sizes.append(size)
        self.events.append((made, used))

    def _call(self, entry, held, key):
        called = entry.frame
        passed = {(inner.id, layout): held[outer.id, layout] for inner, outer, layout in _passed(entry)}
        for (inner, inner_layout), (outer, layout) in zip(called.lifted, entry.lifted):
            passed[inner.id, inner_layout] = held[outer.id, layout]
        inside = self.run(called, passed, key)
        results = zip(values_in(called.graph.result), called.results)
        for value, layout, (inner, inner_layout) in zip(values_in(entry.node.outputs), entry.outputs, results):
            held[value.id, layout] = inside[inner.id, inner_layout]


def _passed(call):
    """`(Value of the called Cell, the caller's, layout)` for every tensor among the arguments of a `CallPlan`."""
    layouts = dict(zip(values_in((call.node.args, call.node.kwargs)), call.inputs))
    return [(inner, outer, layouts[outer]) for inner, outer in match_arguments(call.node).items()]
