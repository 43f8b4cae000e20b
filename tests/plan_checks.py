"""What has to hold of every `FramePlan`, checked from its instructions alone; and what it communicates."""

from types import SimpleNamespace

from mindformers_core.layout import Layout, bind_layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import resolve, tensor_meta
from mindformers_core.redistribution import CPU
from mindformers_core.tensor_parallel.capturing import capture
from mindformers_core.tensor_parallel.capturing.structure import values_in
from mindformers_core.tensor_parallel.declare import collect_declarations
from mindformers_core.tensor_parallel.propagation import CallPlan, Move, propagate
from mindformers_core.tensor_parallel.propagation.aliases import match_arguments, match_results

__all__ = ["CONFIGS", "MESH", "check_plan", "move_bytes", "plan_of", "stored", "whole"]


MESH = init_device_mesh((2, 2), ("dp", "tp"))


def whole(value, mesh=MESH):
    """The layout of a tensor that all ranks hold alike."""
    return Layout.on(mesh, ((),) * len(value.shape))


def stored(graph, declarations, mesh=MESH):
    """The layouts of all parameters: as declared, or whole."""
    found = {}
    for call in graph.calls():
        weights = declarations[call.path].weights if call.path in declarations else {}
        for use in call.parameters:
            given = weights.get(use.local)
            bound = whole(use.value, mesh) if given is None else bind_layout(given, mesh, len(use.value.shape))
            if given is not None or use.path not in found:
                found[use.path] = bound
    return found


def plan_of(model, args, named, config=None, plan=None, arriving=None, mesh=MESH):
    """The plan of a model whose inputs arrive whole, or as `arriving` (by number) says."""
    declarations = collect_declarations(model, config, plan)
    graph = capture(model, *args, **named)
    layouts = {value.id: whole(value, mesh) for value in values_in(graph.arguments)} | (arriving or {})
    return propagate(graph, mesh, layouts, stored(graph, declarations, mesh), declarations)


CONFIGS = {
    "plain": SimpleNamespace(),
    "dp": SimpleNamespace(batch_axes="dp"),
    "sequence parallel": SimpleNamespace(batch_axes="dp", sequence_parallel=True),
}


def check_plan(frame, checked=None):
    """Assert that everything that an instruction uses is at hand, and that it is what its operator computes with."""
    checked = set() if checked is None else checked
    if id(frame) in checked:
        return
    checked.add(id(frame))
    graph = frame.graph
    known = [*values_in(graph.arguments), *(use.value for use in (*graph.parameters, *graph.constants))]
    hand = {value.id: {frame.layouts[value.id]} for value in known}
    hand |= {use.value.id: set() for use in graph.outer}
    for value, layout in frame.lifted:
        assert layout not in hand[value.id]
        hand[value.id].add(layout)
    nodes = iter(graph.nodes)
    for entry in frame.instructions:
        if isinstance(entry, Move):
            check_move(entry, hand)
            assert entry.gradient == (entry.value.id in frame.gradients)
            continue
        assert entry.node is next(nodes)
        for value, layout in zip(values_in((entry.node.args, entry.node.kwargs)), entry.inputs, strict=True):
            assert layout in hand[value.id], (str(entry.node), str(value), str(layout), hand[value.id])
        check_call(entry, hand, checked) if isinstance(entry, CallPlan) else check_operator(entry, frame.mesh)
        for value, layout in zip(values_in(entry.node.outputs), entry.outputs, strict=True):
            assert frame.layouts[value.id] == layout
            layout.local_shape(value.shape)
            hand[value.id] = {layout}
    assert next(nodes, None) is None
    for value, layout in zip(values_in(graph.result), frame.results, strict=True):
        assert layout in hand[value.id]


def check_move(move, hand):
    """Assert that a move starts from what is at hand, that it is new, and that its steps lead to its target."""
    layouts = hand[move.value.id]
    assert move.source in layouts and move.target not in layouts, move
    way = [move.source, *(step.target for step in move.steps)]
    assert way[:-1] == [step.source for step in move.steps] and way[-1] == move.target
    layouts.add(move.target)


def check_call(call, hand, checked):
    """Assert that the callee gets what it expects, and gives what the caller expects."""
    for value, layout in call.lifted:
        assert layout in hand[value.id]
    if call.frame is None:
        assert all(layout.is_replicated for layout in (*call.inputs, *call.outputs))
        return
    passed = dict(zip(values_in((call.node.args, call.node.kwargs)), call.inputs, strict=True))
    for inner, outer in match_arguments(call.node).items():
        assert call.frame.layouts[inner.id] == passed[outer]
    assert [layout for _, layout in call.lifted] == [layout for _, layout in call.frame.lifted]
    given = dict(zip(values_in(call.frame.graph.result), call.frame.results, strict=True))
    received = dict(zip(values_in(call.node.outputs), call.outputs, strict=True))
    for outer, inner in match_results(call.node).items():
        assert given[inner] == received[outer]
    check_plan(call.frame, checked)


def check_operator(plan, mesh):
    """Assert that the operator computes with these layouts as they are, and gives these outputs."""
    if not plan.inputs:
        assert all(layout.is_replicated for layout in plan.outputs)
        return
    values = values_in((plan.node.args, plan.node.kwargs))
    metas = [tensor_meta(v.shape, v.dtype, layout, not layout.varying) for v, layout in zip(values, plan.inputs)]
    again = resolve(plan.signature, metas, mesh, CPU)
    assert again.cost == 0, (str(plan.node), [str(layout) for layout in plan.inputs])
    assert [i.replace(varying=()) for i in again.inputs] == [i.replace(varying=()) for i in plan.inputs]
    assert [o.replace(varying=()) for o in again.outputs] == [o.replace(varying=()) for o in plan.outputs]


def move_bytes(plan):
    """Bytes that a rank sends in all moves of a plan: forward, and backward where a trained parameter is behind."""
    moves = [move for _, frame in plan.walk() for move in frame.moves]
    forward = sum(step.nbytes for move in moves for step in move.steps)
    return forward, sum(step.backward[1] for move in moves if move.gradient for step in move.steps)
