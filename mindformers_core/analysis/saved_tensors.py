"""Follows every tensor of a program through Cells, moves and views: in which memory it lies, who saves it. Pure Python.

As `analysis.memory`, which asks what is alive when; here it is asked what the gradients keep.
"""

from collections import Counter
from dataclasses import replace
from itertools import count
from math import prod

from mindformers_core.analysis.algorithms import algorithm_parts
from mindformers_core.analysis.forward_trace import ForwardTrace, Memory, Run, SharedCall, Tensor, placeholder
from mindformers_core.analysis.views import gives_its_input, is_cast_to_its_dtype, viewed
from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.operators.registry import NO_GRADIENT, facts_of
from mindformers_core.operators.views import contiguous_strides
from mindformers_core.program.graph import match_arguments
from mindformers_core.program.plan import CallPlan, Move
from mindformers_core.program.structure import tree_leaves
from mindformers_core.redistribution.steps import STEP_KINDS

__all__ = ["SavedTensorAnalysis"]

_EXTREMES = frozenset(("max", "min"))


class SavedTensorAnalysis:
    """Follows a program, for one set of dropped instructions after the other.

    Calls that a frame makes of one `CellPlan`, as those of equal layers, are followed once for each way in which
    instructions in them are dropped and their arguments look.

    Args:
        frame: the root's `CellPlan`.
        algorithm: as of `algorithm_parts`.
        arguments_need: whether gradients flow back to the root's arguments: see `saved_activations`.
    """

    def __init__(self, frame, algorithm=None, arguments_need=True):
        self.frame, self.algorithm, self.arguments_need = frame, algorithm, arguments_need
        self._known = {}

    def course(self, dropped=frozenset(), on_host=frozenset()):
        """The `ForwardTrace` of the program.

        Args:
            dropped: keys of instructions whose results are computed again.
            on_host: keys of instructions whose results wait on the host, each as a copy of its own.

        Raises:
            ValueError: a distributed algorithm, and no `algorithm` to ask.
        """
        given = {}
        for value in tree_leaves(self.frame.graph.arguments):
            layout = self.frame.layouts[value.id]
            given[value.id, layout] = _outside(value, layout.local_shape(value.shape), self.arguments_need)
        course = ForwardTrace(frozenset(dropped))
        _Follower(course, self.algorithm, self._known, frozenset(on_host)).frame(self.frame, given, ())
        return course


def _below(keys):
    """Key of a call -> set of those keys that lie in it, as they are there."""
    below = {}
    for key in keys:
        for end in range(1, len(key)):
            below.setdefault(key[:end], set()).add(key[end:])
    return below


def _outside(value, shape, needs):
    """A contiguous tensor that belongs to others."""
    return Tensor(value, tuple(shape), contiguous_strides(shape), needs)


class _Follower:
    """Goes through a program and notes down what runs.

    Args:
        course: the `ForwardTrace`, to be filled.
        algorithm: see `SavedTensorAnalysis`.
        known: what a call does that others repeat: its `CellPlan`, what is dropped and what it is given ->
            `ForwardTrace`, and the plan again, which has to live as long as its id is used.
        on_host: keys of instructions whose results wait on the host.
    """

    def __init__(self, course, algorithm, known, on_host):
        self.course, self.algorithm, self.known, self.on_host = course, algorithm, known, on_host
        self.numbers = count(len(course.given))
        self.dropped_below, self.on_host_below = _below(course.dropped), _below(on_host)

    def frame(self, frame, given, key):
        """Go through a frame; `(number of Value, layout) -> Tensor` of all that is available at its end."""
        held = {}
        for use in (*frame.graph.parameters, *frame.graph.constants):
            value, layout = use.value, frame.layouts[use.value.id]
            needs = getattr(use, "trainable", False) and "float" in value.dtype
            held[value.id, layout] = _outside(value, layout.local_shape(value.shape), needs)
        held |= given
        often = Counter(id(call.frame) for call in frame.calls)
        for index, entry in enumerate(frame.instructions):
            if isinstance(entry, Move):
                tensor = held[entry.value.id, entry.source]
                held[entry.value.id, entry.target] = self.steps((*key, index), tensor, entry.steps)
            elif isinstance(entry, CallPlan) and entry.frame is not None:
                self.call(entry, held, (*key, index), often[id(entry.frame)] > 1)
            else:
                self.entry(entry, held, (*key, index))
        results = zip(tree_leaves(frame.graph.result), frame.results)
        self.course.results[key] = [held[value.id, layout] for value, layout in results]
        return held

    def call(self, entry, held, key, is_repeated):
        """Go through a called Cell."""
        called, node = entry.frame, entry.node
        layouts = dict(zip(tree_leaves((node.args, node.kwargs)), entry.inputs))
        given = {
            (inner.id, layouts[outer]): held[outer.id, layouts[outer]] for inner, outer in match_arguments(node).items()
        }
        for (inner, inner_layout), (outer, layout) in zip(called.lifted, entry.lifted):
            given[inner.id, inner_layout] = held[outer.id, layout]
        if is_repeated:
            self.repeated(called, given, key)
        else:
            self.frame(called, given, key)
        for value, layout, tensor in zip(tree_leaves(node.outputs), entry.outputs, self.course.results[key]):
            held[value.id, layout] = tensor

    def repeated(self, frame, given, key):
        """Go through a frame that is called often, as it was gone through before where all is alike."""
        dropped, on_host = (frozenset(below.get(key, ())) for below in (self.dropped_below, self.on_host_below))
        call = id(frame), dropped, on_host, tuple((place, tensor.look) for place, tensor in given.items())
        if call not in self.known:
            inner = {place: placeholder(tensor, number) for number, (place, tensor) in enumerate(given.items())}
            course = ForwardTrace(dropped, tuple(inner.values()))
            _Follower(course, self.algorithm, self.known, on_host).frame(frame, inner, ())
            self.known[call] = course, frame
        repetition = SharedCall(key, self.known[call][0], given.values())
        self.course.runs.append(repetition)
        self.course.results[key] = self.course.results_of(key)

    def entry(self, entry, held, key):
        """One operator, or the call of a Cell with a `bprop`."""
        node = entry.node
        values = tree_leaves((node.args, node.kwargs))
        tensors = [held[value.id, layout] for value, layout in zip(values, entry.inputs)]
        shapes = [layout.local_shape(value.shape) for value, layout in zip(tree_leaves(node.outputs), entry.outputs)]
        if isinstance(entry, CallPlan):
            trained = any(use.trainable for call in node.graph.calls() for use in call.parameters)
            made = self.own_gradient(key, tensors, tree_leaves(node.outputs), shapes, trained)
        elif entry.algorithm is not None:
            made = self.distributed(key, entry, tensors)
        else:
            made = self.operator(key, node, tensors, shapes)
        for value, layout, tensor in zip(tree_leaves(node.outputs), entry.outputs, made):
            held[value.id, layout] = tensor

    def operator(self, key, node, tensors, shapes):
        """The results of one operator."""
        places = [place for place, one in enumerate((*node.args, *node.kwargs.values())) for _ in tree_leaves(one)]
        operands = {tensor.operand(place): tensor for place, tensor in zip(places, tensors)}
        needs = any(tensor.needs for tensor in tensors)
        run = Run(key, tuple(tensors))
        self.course.runs.append(run)
        made = self.results(run, node, tensors, shapes)
        if not needs:
            return made
        row = facts_of(node.operator).saved
        results = {tensor.operand(place): tensor for place, tensor in enumerate(made)}
        for operand in row.kept_inputs([*operands]):
            tensor = operands[operand]
            if row.as_they_are or not tensor.is_view or tensor.has_handle:
                run.saved.append(tensor)
            else:
                run.own.append(self.memory(key, tensor.nbytes, view=tensor.source))
        run.saved.extend(results[result] for result in row.kept_outputs([*operands], [*results]))
        sizes = row.internal_sizes([*operands], [*results])
        run.own.extend(self.memory(key, nbytes) for nbytes in sizes)
        return made

    def results(self, run, node, tensors, shapes):
        """The results of an operator as tensors."""
        needs = facts_of(node.operator).gradient != NO_GRADIENT and any(tensor.needs for tensor in tensors)
        outputs = [(value, shape, needs) for value, shape in zip(tree_leaves(node.outputs), shapes)]
        if not tensors or not outputs:
            return [self.made(run, *output) for output in outputs]
        base = tensors[0]
        if is_cast_to_its_dtype(node):  # the same object, with all that is known of it
            return [base]
        if gives_its_input(node, base.shape, base.strides):
            return [self.made(run, *output, base.strides, base, base.is_view) for output in outputs]
        views = viewed(node, base.shape, base.strides, shapes)
        if views is None:
            return [self.made(run, *output) for output in outputs]
        pairs = zip(outputs, views, strict=True)
        return [self.made(run, *output, strides, None if strides is None else base, True) for output, strides in pairs]

    def made(self, run, value, shape, needs, strides=None, base=None, is_view=False):
        """A result: contiguous and in memory of its own, unless the arguments say otherwise."""
        nbytes = prod(shape) * ITEM_BYTES[value.dtype]
        on_host = self.memory(run.key, nbytes, True) if run.key in self.on_host else None
        # of copies that gradients flow through it is known of what they are
        has_handle = needs and (on_host is not None or run.key in self.course.dropped)
        memory = self.memory(run.key, nbytes) if base is None else base.memory
        run.made.extend([memory] if base is None else [])
        strides = contiguous_strides(shape) if strides is None else strides
        return Tensor(value, tuple(shape), tuple(strides), needs, memory, run, base, is_view, has_handle, on_host)

    def memory(self, key, nbytes, on_host=False, view=None):
        """A new piece of `Memory`."""
        return Memory(key, next(self.numbers), nbytes, on_host, view)

    def steps(self, key, tensor, steps):
        """The result of a move. A step keeps what it takes and gives where the gradient goes to who holds an extreme.

        Truth values move as integers.
        """
        if tensor.value.dtype == "bool" and steps:
            moved = self.steps(key, self.cast(key, tensor, "int32"), steps)
            return self.cast(key, moved, "bool")
        for step in steps:
            run = Run(key, (tensor,))
            self.course.runs.append(run)
            kind = STEP_KINDS[step.kind].runs(step.op)[0]
            views = {"identity": tensor.is_view, "slice": True}
            how = (tensor.strides, tensor, views[kind]) if kind in views else ()
            moved = self.made(run, tensor.value, step.output_shape, tensor.needs, *how)
            counts_holders = step.op in _EXTREMES and kind not in views
            run.saved.extend([tensor, moved] if tensor.needs and counts_holders else [])
            tensor = moved
        return tensor

    def cast(self, key, tensor, dtype):
        """A tensor of another dtype."""
        run = Run(key, (tensor,))
        self.course.runs.append(run)
        return self.made(run, replace(tensor.value, dtype=dtype), tensor.shape, tensor.needs)

    def own_gradient(self, key, tensors, values, shapes, trained):
        """The results of a Cell with a `bprop`, for which all that it takes and gives is kept."""
        needs = trained or any(tensor.needs for tensor in tensors)
        run = Run(key, tuple(tensors))
        self.course.runs.append(run)
        made = [self.made(run, *pair, needs) for pair in zip(values, shapes)]
        run.saved.extend([*tensors, *made] if needs else [])
        return made

    def distributed(self, key, plan, tensors):
        """The results of a distributed algorithm: those of its operators and moves."""
        parts, graph = algorithm_parts(plan, self.algorithm)
        held = {value.id: tensor for value, tensor in zip(tree_leaves(graph.arguments), tensors)}
        for use in graph.constants:
            held[use.value.id] = _outside(use.value, use.value.shape, False)
        for node, steps in parts:
            taken = [held[value.id] for value in tree_leaves((node.args, node.kwargs))]
            outputs = tree_leaves(node.outputs)
            if steps is not None:
                made = [self.steps(key, *taken, steps)]
            else:
                made = self.operator(key, node, taken, [value.shape for value in outputs])
            held.update(zip((value.id for value in outputs), made))
        return [held[value.id] for value in tree_leaves(graph.result)]
