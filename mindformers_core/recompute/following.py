"""Follows every tensor of a program through Cells, moves and views: in which memory it lies, who saves it. Pure Python.

As `tensor_parallel.explaining.memory`, which asks what is alive when; here it is asked what the gradients keep.
"""

from dataclasses import dataclass, field, replace
from math import prod

from mindformers_core.recompute.saved_by_operator import Operand, saved_by
from mindformers_core.recompute.views import contiguous_strides, gives_its_input, viewed
from mindformers_core.redistribution.planner import ITEM_SIZES
from mindformers_core.redistribution.steps import STEP_KINDS
from mindformers_core.tensor_parallel.capturing.structure import values_in
from mindformers_core.tensor_parallel.propagation.aliases import match_arguments
from mindformers_core.tensor_parallel.propagation.plan import CallPlan, Move

__all__ = ["Course", "Memory", "Run", "Tensor", "follow"]

_CUTS = frozenset(("StopGradient", "FullLike", "EmptyLike"))  # their results need no gradient; those of `Sign` do
_VIEWING_STEPS = frozenset(("identity", "slice"))


@dataclass(frozen=True, eq=False)
class Memory:
    """A piece of memory on one rank, made by the instruction at `key`, which `value` is the first tensor in."""

    key: tuple
    value: object
    nbytes: int


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
    """

    value: object
    shape: tuple
    strides: tuple
    needs: bool
    memory: Memory | None = None
    run: "Run | None" = None
    base: "Tensor | None" = None
    is_view: bool = False

    @property
    def nbytes(self):
        """Bytes of its elements."""
        return prod(self.shape) * ITEM_SIZES[self.value.dtype]

    def operand(self, place):
        """The same as an `Operand`."""
        return Operand(place, self.shape, self.value.dtype, ITEM_SIZES[self.value.dtype], self.needs)


@dataclass(frozen=True, eq=False)
class Run:
    """One operator, or one step of a move, as it runs.

    Attributes:
        key: of the instruction that it belongs to.
        inputs: the `Tensor`s that it takes.
        saved: `Tensor`s that its gradient keeps.
        own: pieces of `Memory` that its gradient keeps and that are neither input nor result: copies, statistics.
    """

    key: tuple
    inputs: tuple
    saved: list = field(default_factory=list)
    own: list = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Course:
    """What a program does, in order.

    Attributes:
        runs: the `Run`s.
        results: key of the root, `()`, and of every call that is gone into -> the `Tensor`s that it gives.
    """

    runs: list = field(default_factory=list)
    results: dict = field(default_factory=dict)


def follow(frame, dropped=frozenset(), algorithm=None, arguments_need=True):
    """The `Course` of a program.

    Args:
        frame: the root's `FramePlan`.
        dropped: keys of instructions whose results are computed again; they are no views.
        algorithm: `OperatorPlan` with an `algorithm` -> pair of the `CellGraph` of what runs in its place and, for each
            of its nodes, the `Step`s of a redistribution or None. See `mindformers_core.recompute.algorithms`.
        arguments_need: whether gradients flow back to the root's arguments: see `saved_activations`.

    Raises:
        ValueError: a distributed algorithm, and no `algorithm` to ask.
    """
    course = Course()
    follower = _Follower(course, dropped, algorithm)
    given = {}
    for value in values_in(frame.graph.arguments):
        layout = frame.layouts[value.id]
        given[value.id, layout] = _outside(value, layout.local_shape(value.shape), arguments_need)
    follower.frame(frame, given, ())
    return course


def _outside(value, shape, needs):
    """A contiguous tensor that belongs to others."""
    return Tensor(value, tuple(shape), contiguous_strides(shape), needs)


class _Follower:
    """Goes through a program and notes down what runs."""

    def __init__(self, course, dropped, algorithm):
        self.course, self.dropped, self.algorithm = course, dropped, algorithm

    def frame(self, frame, given, key):
        """Go through a frame; `(number of Value, layout) -> Tensor` of all that is at hand at its end."""
        held = {}
        for use in (*frame.graph.parameters, *frame.graph.constants):
            value, layout = use.value, frame.layouts[use.value.id]
            needs = getattr(use, "trainable", False) and "float" in value.dtype
            held[value.id, layout] = _outside(value, layout.local_shape(value.shape), needs)
        held |= given
        for index, entry in enumerate(frame.instructions):
            if isinstance(entry, Move):
                tensor = held[entry.value.id, entry.source]
                held[entry.value.id, entry.target] = self.steps((*key, index), tensor, entry.steps)
            elif isinstance(entry, CallPlan) and entry.frame is not None:
                self.call(entry, held, (*key, index))
            else:
                self.entry(entry, held, (*key, index))
        results = zip(values_in(frame.graph.result), frame.results)
        self.course.results[key] = [held[value.id, layout] for value, layout in results]
        return held

    def call(self, entry, held, key):
        """Go through a called Cell."""
        called, node = entry.frame, entry.node
        layouts = dict(zip(values_in((node.args, node.kwargs)), entry.inputs))
        given = {
            (inner.id, layouts[outer]): held[outer.id, layouts[outer]] for inner, outer in match_arguments(node).items()
        }
        for (inner, inner_layout), (outer, layout) in zip(called.lifted, entry.lifted):
            given[inner.id, inner_layout] = held[outer.id, layout]
        self.frame(called, given, key)
        for value, layout, tensor in zip(values_in(node.outputs), entry.outputs, self.course.results[key]):
            held[value.id, layout] = tensor

    def entry(self, entry, held, key):
        """One operator, or the call of a Cell with a `bprop`."""
        node = entry.node
        values = values_in((node.args, node.kwargs))
        tensors = [held[value.id, layout] for value, layout in zip(values, entry.inputs)]
        shapes = [layout.local_shape(value.shape) for value, layout in zip(values_in(node.outputs), entry.outputs)]
        if isinstance(entry, CallPlan):
            trained = any(use.trainable for call in node.graph.calls() for use in call.parameters)
            made = self.own_gradient(key, tensors, values_in(node.outputs), shapes, trained)
        elif entry.algorithm is not None:
            made = self.distributed(key, entry, tensors)
        else:
            made = self.operator(key, node, tensors, shapes)
        for value, layout, tensor in zip(values_in(node.outputs), entry.outputs, made):
            held[value.id, layout] = tensor

    def operator(self, key, node, tensors, shapes):
        """The results of one operator."""
        places = [place for place, one in enumerate((*node.args, *node.kwargs.values())) for _ in values_in(one)]
        operands = {tensor.operand(place): tensor for place, tensor in zip(places, tensors)}
        needs = any(tensor.needs for tensor in tensors)
        run = Run(key, tuple(tensors))
        self.course.runs.append(run)
        made = self.results(run, node, tensors, shapes)
        if not needs:
            return made
        row = saved_by(node.operator)
        results = {tensor.operand(place): tensor for place, tensor in enumerate(made)}
        for operand in row.kept_inputs([*operands]):
            tensor = operands[operand]
            if row.as_they_are or not tensor.is_view:
                run.saved.append(tensor)
            else:
                run.own.append(Memory(key, tensor.value, tensor.nbytes))
        run.saved.extend(results[result] for result in row.kept_outputs([*operands], [*results]))
        sizes = row.internal_sizes([*operands], [*results])
        run.own.extend(Memory(key, made[0].value, nbytes) for nbytes in sizes)
        return made

    def results(self, run, node, tensors, shapes):
        """The results of an operator as tensors."""
        needs = node.operator not in _CUTS and any(tensor.needs for tensor in tensors)
        outputs = [(value, shape, needs) for value, shape in zip(values_in(node.outputs), shapes)]
        if not tensors or not outputs:
            return [self.made(run, *output) for output in outputs]
        base = tensors[0]
        if gives_its_input(node, base.shape, base.strides):
            return [self.made(run, *output, base.strides, base, base.is_view) for output in outputs]
        views = viewed(node, base.shape, base.strides, shapes)
        if views is None:
            return [self.made(run, *output) for output in outputs]
        pairs = zip(outputs, views, strict=True)
        return [self.made(run, *output, strides, None if strides is None else base, True) for output, strides in pairs]

    def made(self, run, value, shape, needs, strides=None, base=None, is_view=False):
        """A result: contiguous and in memory of its own, unless told otherwise."""
        if run.key in self.dropped:
            strides, base, is_view = None, None, False
        memory = Memory(run.key, value, prod(shape) * ITEM_SIZES[value.dtype]) if base is None else base.memory
        strides = contiguous_strides(shape) if strides is None else strides
        return Tensor(value, tuple(shape), tuple(strides), needs, memory, run, base, is_view)

    def steps(self, key, tensor, steps):
        """The result of a move. Each step is a Cell with a `bprop`, for which what it takes and gives is kept.

        Truth values move as integers.
        """
        if tensor.value.dtype == "bool" and steps:
            moved = self.steps(key, self.cast(key, tensor, "int32"), steps)
            return self.cast(key, moved, "bool")
        for step in steps:
            run = Run(key, (tensor,))
            self.course.runs.append(run)
            is_view = STEP_KINDS[step.kind].runs(step.op)[0] in _VIEWING_STEPS
            how = (tensor.strides, tensor, True) if is_view else ()
            moved = self.made(run, tensor.value, step.output_shape, tensor.needs, *how)
            run.saved.extend([tensor, moved] if tensor.needs else [])
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
        if self.algorithm is None:
            raise ValueError(
                f"{plan.node.operator} ({plan.node.source}) runs the distributed algorithm '{plan.algorithm}': to "
                "foretell what it keeps, pass algorithm=mindformers_core.recompute.algorithms.algorithm_of"
            )
        graph, moves = self.algorithm(plan)
        held = {value.id: tensor for value, tensor in zip(values_in(graph.arguments), tensors)}
        for use in graph.constants:
            held[use.value.id] = _outside(use.value, use.value.shape, False)
        for node, steps in zip(graph.nodes, moves, strict=True):
            taken = [held[value.id] for value in values_in((node.args, node.kwargs))]
            outputs = values_in(node.outputs)
            if steps is not None:
                made = [self.steps(key, *taken, steps)]
            else:
                made = self.operator(key, node, taken, [value.shape for value in outputs])
            held.update(zip((value.id for value in outputs), made))
        return [held[value.id] for value in values_in(graph.result)]
