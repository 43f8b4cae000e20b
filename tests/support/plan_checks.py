"""Plans of models, and what they communicate."""

from types import SimpleNamespace

import pytest

from mindformers_core.capture.capture import capture
from mindformers_core.layout import Layout, bind_layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.checking import check_plan
from mindformers_core.propagation.propagate import propagate
from mindformers_core.redistribution import redistribution_price
from mindformers_core.sharding.declare import collect_declarations

__all__ = ["CONFIGS", "MESH", "check_plan", "communication", "move_bytes", "plan_of", "stored", "whole"]


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


def plan_of(model, args, named, config=None, plan=None, arriving=None, mesh=MESH, algorithm=None):
    """The plan of a model whose inputs arrive whole, or as `arriving` (by number) says; `algorithm`: `propagate`'s."""
    declarations = collect_declarations(model, config, plan)
    graph = capture(model, *args, **named)
    layouts = {value.id: whole(value, mesh) for value in tree_leaves(graph.arguments)} | (arriving or {})
    return propagate(graph, mesh, layouts, stored(graph, declarations, mesh), declarations, algorithm=algorithm)


CONFIGS = {
    "plain": SimpleNamespace(),
    "dp": SimpleNamespace(batch_axes="dp"),
    "sequence parallel": SimpleNamespace(batch_axes="dp", sequence_parallel=True),
}


def move_bytes(plan):
    """Bytes that a rank sends in all moves of a plan: forward, and backward where a trained parameter is behind."""
    moves = [move for _, inner in plan.walk() for move in inner.redistributions]
    forward = sum(step.nbytes for move in moves for step in move.steps)
    return forward, sum(step.backward[1] for move in moves if move.gradient for step in move.steps)


def communication(plan):
    """Seconds of all redistributions of a plan: forward, and backward where a trained parameter is behind."""
    moves = [move for _, inner in plan.walk() for move in inner.redistributions]
    ends = [(move.source, move.target, move.value.shape, move.value.dtype, move.gradient) for move in moves]
    return pytest.approx(sum(redistribution_price(*each, plan.device_model).communication for each in ends))
