"""Data parallelism keeps the batch cut: each of two ranks computes half of what one card does, and gathers nothing."""

import inspect
from math import prod

import pytest
from mindspore import Tensor, set_seed
from models import EXAMPLES
from models.authors import AUTHORS
from support.nightly import daily
from support.planned_models import captured

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators.computation import computation_seconds
from mindformers_core.program.plan import OperatorPlan, Redistribution, operators_in_order
from mindformers_core.propagation.algorithms import algorithm_steps, own_gradient_steps
from mindformers_core.propagation.propagate import propagate
from mindformers_core.redistribution import DeviceModel, Link

MODELS = {name: example for name, example in (EXAMPLES | AUTHORS).items() if name != "batch second"}
# the launch of a collective takes longer than all that these small models compute: here work counts, as in large ones
BUSY = DeviceModel("busy", 1e7, 0.0, Link(0.0, 1e12))
# every node asks for its neighbours, every image is compared with every text, each view with all others
REDUCED = "all_reduce", "all_reduce_varying"
OF_ALL_PAIRS = {"gnn": 1, "clip": 1, "two towers": 1, "simclr": 1}


def data_parallel(example):
    """The plans of a model on one rank, and on two, whose inputs alone are declared cut, along dim 0."""
    args, named = example.inputs(0)
    set_seed(0)
    cell, (one, two) = example.make().set_train(), (DeviceMesh((ranks, 1), ("dp", "tp")) for ranks in (1, 2))
    given = dict(zip(inspect.signature(cell.construct).parameters, args)) | named
    cut = {name: layout("dp") for name, value in given.items() if isinstance(value, Tensor) and value.ndim}
    with rank_of(2, 0):
        graph, _, *layouts, declared = captured(cell, two, args, named, plan={"": {"input": cut}}, arriving=cut)
        on_one = [{key: Layout.on(one, each.dims) for key, each in found.items()} for found in layouts]
        return [propagate(graph, *call, declared, BUSY) for call in ((one, *on_one), (two, *layouts))]


def work_of(plan):
    """What a rank computes, in seconds."""
    total = 0
    for place in operators_in_order(plan):
        entry = place.entry
        if isinstance(entry, OperatorPlan):
            dtypes = [value.dtype for value, _ in (*entry.consumed, *entry.produced)]
            total += computation_seconds(
                entry.node.operator, entry.signature, plan.mesh, entry.axes_of, dtypes, plan.device_model
            )
    return total


@pytest.mark.parametrize("name", daily(list(MODELS)[::6], MODELS))
def test_a_rank_of_two_does_half_of_the_work(name):
    one, two = data_parallel(MODELS[name])
    moves = [place.entry for place in operators_in_order(two) if isinstance(place.entry, Redistribution)]
    gathered = [str(move.value) for move in moves for step in move.steps if step.forward[0] == "all_gather"]
    assert len(gathered) == OF_ALL_PAIRS.get(name, 0), gathered
    assert work_of(two) <= 0.52 * work_of(one)


def test_a_residual_net_sends_gradients_and_statistics_only():
    """Of each weight the gradient, backward; of each batch norm statistics, once; of the loss 3 numbers."""
    _, two = data_parallel(MODELS["resnet"])
    weights = {use.value.shape for _, plan in two.walk() for use in plan.graph.parameters}
    channels = {shape for (count, *_) in weights for shape in ((count,), (1, count, 1, 1))}
    moves = [place.entry for place in operators_in_order(two) if isinstance(place.entry, Redistribution)]
    assert {step.kind for move in moves for step in move.steps} <= {"mark_varying", "unmark_varying", *REDUCED}
    assert {move.value.shape for move in moves} <= {(), *weights, *channels}
    entries = [place.entry for place in operators_in_order(two) if isinstance(place.entry, OperatorPlan)]
    running = sum(prod(entry.local_shapes[0]) for entry in entries if entry.node.operator == "Assign")
    inside = [step for entry in entries if entry.algorithm == "batch_norm" for step in steps_inside(entry)]
    assert {step.kind for step in inside} == {"all_reduce"}
    assert sum(step.nbytes for step in inside) == 2 * 4 * running > 0, "forward, and backward"
    assert sum(step.nbytes for move in moves for step in move.steps) == 4 * 3, "of the loss"


def steps_inside(entry):
    """The steps of an algorithm and of its own gradient."""
    return [*(step for step, _ in algorithm_steps(entry, algorithm_of)), *own_gradient_steps(entry, algorithm_of)]
