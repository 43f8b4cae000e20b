"""Saved-tensor analysis: the memory of each tensor of a program, and the operators that save it. Pure Python.

The trace follows tensors through Cells, redistributions and views; `memory` and `prediction` are folds over it.
"""

from collections import Counter
from dataclasses import replace
from itertools import count
from math import prod

from mindformers_core.analysis.forward_trace import ForwardTrace, LocalTensor, Memory, Run, SharedCall, placeholder
from mindformers_core.analysis.views import gives_its_input, is_cast_to_its_dtype, viewed
from mindformers_core.dtypes import ITEM_BYTES, wire_dtype
from mindformers_core.grouping import grouped
from mindformers_core.operators.registry import NO_GRADIENT, algorithm_named, facts_of
from mindformers_core.operators.signature import is_float
from mindformers_core.operators.views import contiguous_strides, reshaped
from mindformers_core.program.environment import follow
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.algorithms import through_algorithm
from mindformers_core.redistribution.steps import EXTREMES


def traced(plan, known, dropped=frozenset(), on_host=frozenset(), algorithm=None, arguments_need=True):
    """The `ForwardTrace` of a program.

    Args:
        plan: the root's `CellPlan`.
        known: a dict for the traces that equal calls share, those of equal layers, also in later calls for this plan.
        dropped: keys of instructions whose results are recomputed.
        on_host: keys of instructions whose results are saved as copies on the host.
        algorithm: as of `through_algorithm`.
        arguments_need: as of `Prediction`.

    Raises:
        ValueError: an operator has a distributed algorithm, and `algorithm` is None.
    """
    tensors = [(value, plan.layouts[value.id]) for value in tree_leaves(plan.graph.arguments)]
    given = {(value.id, at): _outside(value, at.local_shape(value.shape), arguments_need) for value, at in tensors}
    trace = ForwardTrace(frozenset(dropped))
    _TraceBuilder(trace, algorithm, known, frozenset(on_host)).plan(plan, given, ())
    return trace


def _below(keys):
    """Key of a call -> the keys inside it, relative to the call."""
    return grouped((key[:end], key[end:]) for key in keys for end in range(1, len(key)))


def _outside(value, shape, needs):
    """A contiguous tensor that the caller owns."""
    return LocalTensor(value, tuple(shape), contiguous_strides(shape), needs)


class _TraceBuilder:
    """Fills a `ForwardTrace`.

    Args:
        trace: the `ForwardTrace`.
        algorithm: see `traced`.
        known: id of a shared `CellPlan`, its dropped keys, keys on the host and argument traits -> its `ForwardTrace`,
            and the plan itself, since its id is valid only as long as it lives.
        on_host: keys of instructions whose results are saved on the host.
    """

    def __init__(self, trace, algorithm, known, on_host):
        self.trace, self.algorithm, self.known, self.on_host = trace, algorithm, known, on_host
        self.numbers = count(len(trace.given))
        self.dropped_below, self.on_host_below = _below(trace.dropped), _below(on_host)

    def plan(self, plan, given, key):
        """Trace a `CellPlan`: record its runs and results."""
        held = {}
        for use in (*plan.graph.parameters, *plan.graph.constants):
            value, layout = use.value, plan.layouts[use.value.id]
            needs = getattr(use, "trainable", False) and "float" in value.dtype
            held[value.id, layout] = _outside(value, layout.local_shape(value.shape), needs)
        often = Counter(id(call.plan) for call in plan.calls)

        def instruction(index, entry, taken):
            at, inner = (*key, index), entry.plan
            if isinstance(entry, Redistribution):
                return [self.steps(at, *taken, entry.steps)]
            if inner is None:
                return self.entry(entry, taken, at)
            (self.plan if often[id(inner)] == 1 else self.shared_call)(inner, taken, at)
            return self.trace.results[at]

        self.trace.results[key] = follow(plan, held | given, instruction)

    def shared_call(self, plan, given, key):
        """Trace a `CellPlan` that several calls share, or take its known trace."""
        dropped, on_host = (frozenset(below.get(key, ())) for below in (self.dropped_below, self.on_host_below))
        call = id(plan), dropped, on_host, tuple((place, tensor.traits) for place, tensor in given.items())
        if call not in self.known:
            inner = {place: placeholder(tensor, number) for number, (place, tensor) in enumerate(given.items())}
            trace = ForwardTrace(dropped, tuple(inner.values()))
            _TraceBuilder(trace, self.algorithm, self.known, on_host).plan(plan, inner, ())
            self.known[call] = trace, plan
        shared = SharedCall(key, self.known[call][0], given.values())
        self.trace.runs.append(shared)
        self.trace.results[key] = self.trace.results_of(key)

    def entry(self, entry, tensors, key):
        """Results of an operator, or of the call of a Cell with a `bprop`."""
        node = entry.node
        shapes = entry.local_shapes
        if isinstance(entry, CallPlan):
            trained = any(use.trainable for call in node.graph.calls() for use in call.parameters)
            return self.own_gradient(key, tensors, node.made, shapes, trained)
        if entry.algorithm is not None:
            return self.distributed(key, entry, tensors)
        return self.operator(key, node, tensors, shapes)

    def operator(self, key, node, tensors, shapes):
        """Results of an operator; its saved tensors are recorded."""
        needs = any(tensor.requires_grad for tensor in tensors)
        run = Run(key, tuple(tensors))
        self.trace.runs.append(run)
        made = self.results(run, node, tensors, shapes)
        if not needs:
            return made
        operands = {tensor.operand(place): tensor for place, tensor in zip(node.places, tensors)}
        row = facts_of(node.operator).saves
        results = {tensor.operand(place): tensor for place, tensor in enumerate(made)}
        for operand in row.kept_inputs([*operands]):
            tensor = operands[operand]
            if row.as_they_are or not tensor.is_view or tensor.has_handle:
                run.saved.append(tensor)
            else:
                run.internal.append(self.memory(key, operand.nbytes, view=tensor.source))
        run.saved.extend(results[result] for result in row.kept_outputs([*operands], [*results]))
        sizes = row.internal_sizes([*operands], [*results])
        run.internal.extend(self.memory(key, nbytes) for nbytes in sizes)
        return made

    def results(self, run, node, tensors, shapes):
        """Results of an operator as `LocalTensor`s: new memory, a view, or the input itself."""
        needs = facts_of(node.operator).gradient != NO_GRADIENT and any(tensor.requires_grad for tensor in tensors)
        outputs = [(value, shape, needs) for value, shape in zip(node.made, shapes)]
        if not tensors or not outputs:
            return [self.made(run, *output) for output in outputs]
        base = tensors[0]
        if is_cast_to_its_dtype(node):  # the result is the same object
            return [base]
        if gives_its_input(node, base.shape, base.strides):
            return [self.made(run, *output, base.strides, base, base.is_view) for output in outputs]
        views = viewed(node, base.shape, base.strides, shapes)
        if views is None:
            return [self.made(run, *output) for output in outputs]
        pairs = zip(outputs, views, strict=True)
        return [self.made(run, *output, strides, None if strides is None else base, True) for output, strides in pairs]

    def made(self, run, value, shape, needs, strides=None, base=None, is_view=False):
        """A result; contiguous in new memory by default, in the memory of `base` if given."""
        nbytes = prod(shape) * ITEM_BYTES[value.dtype]
        on_host = self.memory(run.key, nbytes, True) if run.key in self.on_host else None
        # Cells keep handles only for tensors that a gradient flows through
        has_handle = needs and (on_host is not None or run.key in self.trace.dropped)
        memory = self.memory(run.key, nbytes) if base is None else base.memory
        run.made.extend([memory] if base is None else [])
        strides = contiguous_strides(shape) if strides is None else strides
        return LocalTensor(value, tuple(shape), tuple(strides), needs, memory, run, base, is_view, has_handle, on_host)

    def memory(self, key, nbytes, on_host=False, view=None):
        """A new piece of `Memory`."""
        return Memory(key, next(self.numbers), nbytes, on_host, view)

    def steps(self, key, tensor, steps):
        """The result of a redistribution; Booleans are sent as integers.

        A max or min reduction saves its input and result: the gradient flows to the ranks that hold the extreme.
        """
        dtype = tensor.value.dtype
        if wire_dtype(dtype) != dtype and steps:
            return self.cast(key, self.steps(key, self.cast(key, tensor, wire_dtype(dtype)), steps), dtype)
        for step in steps:
            run = Run(key, (tensor,))
            self.trace.runs.append(run)
            kind, _ = step.forward
            views = {"identity": tensor.is_view, "slice": True}
            strides = tensor.strides
            if step.to_shape is not None:
                (strides,) = reshaped(None, (), {}, tensor.shape, strides, [step.output_shape])
                views["view"] = True
            how = (strides, tensor, views[kind]) if kind in views and strides is not None else ()
            moved = self.made(run, tensor.value, step.output_shape, tensor.requires_grad, *how)
            counts_holders = step.op in EXTREMES and kind not in views
            run.saved.extend([tensor, moved] if tensor.requires_grad and counts_holders else [])
            tensor = moved
        return tensor

    def cast(self, key, tensor, dtype):
        """A tensor of another dtype."""
        run = Run(key, (tensor,))
        self.trace.runs.append(run)
        return self.made(run, replace(tensor.value, dtype=dtype), tensor.shape, tensor.requires_grad)

    def floating(self, key, tensor):
        """A tensor as a Cell with a `bprop` takes it: integers as floating numbers."""
        return tensor if is_float(tensor.value.dtype) else self.cast(key, tensor, "float32")

    def own_gradient(self, key, tensors, values, shapes, trained):
        """Results of a Cell with a `bprop`, for which inputs and results are saved."""
        needs = trained or any(tensor.requires_grad for tensor in tensors)
        run = Run(key, tuple(tensors))
        self.trace.runs.append(run)
        made = [self.made(run, *pair, needs) for pair in zip(values, shapes)]
        run.saved.extend([*tensors, *made] if needs else [])
        return made

    def distributed(self, key, plan, tensors):
        """Results of a distributed algorithm, from its operators and redistributions; or it has its own gradient."""
        if algorithm_named(plan.algorithm).gradient is not None:
            floating = [self.floating(key, each) for each in tensors]
            return self.own_gradient(key, floating, plan.node.made, plan.local_shapes, False)

        def part(node, steps, taken):
            if steps is not None:
                return [self.steps(key, taken[0], steps)]  # others lie on the host
            return self.operator(key, node, taken, [value.shape for value in node.made])

        def constant(use):
            return _outside(use.value, use.value.shape, False)

        return through_algorithm(plan, self.algorithm, tensors, constant, part)
