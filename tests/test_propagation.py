"""Propagation: the plan is complete and consistent, its choices are the eager engine's, and it moves no more bytes."""

from itertools import product
from math import prod

import mindspore as ms
import pytest
from mindspore import Tensor, ops
from models.authors import AUTHORS
from models.example import axes_of
from support.captured_models import MODELS, small_llama
from support.nightly import daily
from support.plan_checks import CONFIGS, MESH, check_plan, communication, move_bytes, plan_of, stored, whole
from support.planned_models import captured
from support.small_cells import Dense, FeedForward, cell_of
from support.written_models import MODELS as WRITTEN, batches, built

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.capture.capture import capture
from mindformers_core.communication import count_collectives
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.free_variables import lambda_lift
from mindformers_core.program.plan import CallPlan, OperatorPlan
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.boundaries import Declaration, OperatorDeclaration
from mindformers_core.propagation.decide import FLOWS, NOTHING
from mindformers_core.propagation.propagate import Propagation, derive_parameters, propagate
from mindformers_core.redistribution import CPU
from mindformers_core.tensor_parallel import distribute_tensor, shard

CAPTURED = [name for name in MODELS if name != "batch norm"]  # has no rule


PLANS = [*product(CAPTURED, CONFIGS)]


@pytest.mark.parametrize(("name", "config"), daily(PLANS[::4], PLANS))  # configs in turn
def test_plans_are_complete(name, config):
    model, make = MODELS[name]()
    plan = plan_of(model, *make(1), CONFIGS[config])
    check_plan(plan)


@pytest.mark.parametrize("name", [name for name in CAPTURED if "llama" not in name])
def test_whole_inputs_and_parameters_move_nothing(name):
    model, make = MODELS[name]()
    assert not [move for _, plan in plan_of(model, *make(1)).walk() for move in plan.redistributions]


@pytest.mark.usefixtures("rank_0_of_4")
@pytest.mark.parametrize(
    ("tied", "config"), daily([(False, "sequence parallel"), (True, "dp")], product((False, True), CONFIGS))
)
def test_llama_moves_what_the_eager_engine_moves(tied, config):
    model, make = small_llama(tie_word_embeddings=tied)
    args, named = make(1)
    plan = plan_of(model, args, named, CONFIGS[config], algorithm=algorithm_of)
    forward, backward = move_bytes(plan)
    shard(model, MESH, CONFIGS[config], mode="eager")
    inputs = [distribute_tensor(x, Layout.on(MESH, ((),) * x.ndim)) for x in (*args, named["labels"])]
    with count_collectives() as counts:
        model(*inputs)
    eager_forward = sum(total for _, total in counts.values())
    with count_collectives() as counts:
        ms.value_and_grad(model, None, model.trainable_params())(*inputs)
    eager_backward = sum(total for _, total in counts.values()) - eager_forward
    assert (forward + extremes_bytes(plan), backward) == (eager_forward, eager_backward)


def extremes_bytes(plan):
    """Bytes of what the algorithm "max" communicates over one axis of 2: the maximum, and how many hold it."""
    entries = [entry for _, inner in plan.walk() for entry in inner.instructions]
    cut = [entry for entry in entries if getattr(entry, "algorithm", None) == "max"]
    values = [pair for entry in cut for pair in zip(tree_leaves(entry.node.outputs), entry.outputs)]
    return sum(2 * 4 * prod(place.local_shape(value.shape)) for value, place in values)


class MixedDense(Dense):
    """Computes in float16 with parameters in float32."""

    def construct(self, x):
        weight, bias = ops.cast(self.weight, ms.float16), ops.cast(self.bias, ms.float16)
        return self.add(self.matmul(ops.cast(x, ms.float16), weight), bias)


def strategies(plan):
    """Into how many parts every operator's inputs are cut, in order."""
    found = []
    for entry in plan.instructions:
        if isinstance(entry, OperatorPlan):
            cut = tuple(tuple(map(place.divisor, range(place.ndim))) for place in entry.inputs)
            found.append((entry.node.operator, cut))
        elif isinstance(entry, CallPlan):
            found += strategies(entry.plan)
    return found


def derived(cell, mesh, declarations, *inputs):
    """The layouts of all parameters, none of them declared, and the plan with these."""
    graph = capture(cell, *inputs)
    arriving = {value.id: whole(value, mesh) for value in tree_leaves(graph.arguments)}
    found = stored(graph, declarations, mesh)
    found = derive_parameters(graph, mesh, arriving, found, declarations, free=found.keys())
    plan = propagate(graph, mesh, arriving, found, declarations)
    check_plan(plan)
    return found, plan


SEED_STRATEGIES = [
    ("MatMul", ((2, 1), (1, 4))),
    ("Add", ((2, 4), (4,))),
    ("ReLU", ((2, 4),)),
    ("MatMul", ((2, 4), (4, 1))),
    ("Add", ((2, 1), (1,))),
]
SEED_PARAMETERS = {
    "dense1.weight": "[-, tp]",
    "dense1.bias": "[tp]",
    "dense2.weight": "[tp, -]",
    "dense2.bias": "[-]",
}


def test_the_seed_s_example():
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    declarations = {"dense1": Declaration(operators={"matmul": OperatorDeclaration(((2, 1), (1, 4)))})}
    found, plan = derived(FeedForward(), mesh, declarations, tensor_meta((256, 28, 28), "float32"))
    flatten, *rest = strategies(plan)
    assert flatten == ("Flatten", ((2, 1, 1),))  # the part of dp alone
    assert rest == SEED_STRATEGIES
    assert {path: str(place) for path, place in found.items()} == SEED_PARAMETERS


SEED_MESH = init_device_mesh((2, 4), ("dp", "tp"))
FIRST = {"dense1": Declaration(operators={"matmul": OperatorDeclaration(((2, 1), (1, 4)))})}
SECOND = {"dense2": Declaration(operators={"matmul": OperatorDeclaration(((2, 4), (4, 1)))})}


@pytest.mark.parametrize("declarations", [FIRST, SECOND, FIRST | SECOND])
@pytest.mark.parametrize("dense", [Dense, MixedDense])
def test_what_is_declared_spreads_both_ways(dense, declarations):
    found, plan = derived(FeedForward(dense), SEED_MESH, declarations, tensor_meta((65536, 28, 28), "float32"))
    cut = [pair for pair in strategies(plan) if pair[0] not in ("Cast", "Flatten")]
    assert cut == SEED_STRATEGIES
    assert {path: str(place) for path, place in found.items()} == SEED_PARAMETERS


def compared(cell, inputs, arriving, declarations=None, parameters=None, mesh=MESH):
    """The plan, and the costs with every operator decided by itself and after looking ahead."""
    graph = capture(cell, *inputs)
    values = tree_leaves(graph.arguments)
    layouts = {value.id: place.bind(mesh, len(value.shape)) for value, place in zip(values, arriving)}
    found = stored(graph, declarations or {}, mesh) | (parameters or {})
    plan = propagate(graph, mesh, layouts, found, declarations)
    check_plan(plan)
    run = Propagation(mesh, found, declarations or {}, CPU)
    arguments = {number: (place, FLOWS, False) for number, place in layouts.items()}
    improved, greedy = run.decide_root(graph, layouts, True), run.decide(graph, arguments, True)
    assert improved.price.communication == communication(plan)
    assert improved is greedy or improved.price.improves_on(greedy.price)
    return plan, greedy.price, improved.price


def sums(steps):
    """Two tensors added, and what follows: a `construct`."""

    def construct(self, x, y):
        z = x + y
        for _ in range(steps):
            z = ops.relu(ops.transpose(z, (1, 0)))
        return z

    return construct


PAIR = [tensor_meta((8, 8), "float32")] * 2


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_looking_ahead_moves_the_other_summand(steps):
    wanted = layout(None, "dp") if steps % 2 == 0 else layout("dp", None)
    declarations = {"": Declaration(outputs={0: wanted})}
    plan, greedy, improved = compared(
        cell_of(sums(steps)), PAIR, [layout("dp", None), layout(None, "dp")], declarations
    )
    assert improved.communication * 2 == pytest.approx(greedy.communication)
    assert improved.computation == pytest.approx(greedy.computation)
    assert [move.value.hint for move in plan.redistributions] == ["x"], "once, and not the sum again"


def test_looking_ahead_into_a_called_cell():
    outer = cell_of(lambda self, x, y: self.inner(x, y), inner=cell_of(sums(2)))
    declarations = {"": Declaration(outputs={0: layout(None, "dp")})}
    plan, greedy, improved = compared(outer, PAIR, [layout("dp", None), layout(None, "dp")], declarations)
    assert improved.communication * 2 == pytest.approx(greedy.communication)
    assert [move.value.hint for move in plan.redistributions] == ["x"], (
        "the caller moves what the callee needs moved only"
    )
    assert not plan.calls[0].plan.redistributions


def test_nothing_is_computed_on_all_ranks_to_save_communication():
    """Gathering the ids would save the gradient's all-reduce, and with it data parallelism."""
    model, make = small_llama()
    plan = plan_of(model, *make(1), CONFIGS["dp"], arriving={0: Layout.on(MESH, (("dp",), ()))})
    embedding = plan.calls[0].plan.calls[0].plan
    assert [str(place) for place in embedding.instructions[1].inputs] == ["[tp, -] (varying: dp)", "[dp, -]"]


@pytest.mark.parametrize(
    ("declared", "kept"),
    [
        ({}, {"dp"}),
        ({"norm2": {"output": layout("dp", "tp")}}, {"dp", "tp"}),
        ({"norm2": {"input": layout("dp", "None")}}, {"dp"}),
        ({"norm2": {"output": layout("dp", "tpp")}}, "output 0 of Cell 'norm2'.*tpp"),
        ({"norm2": {"input": layout("a")}}, "input 'x' of Cell 'norm2'.*unknown mesh axis 'a'"),
    ],
)
def test_axes_of_activations(declared, kept):
    """Over other axes, which cut weights, work is replicated where that costs less: the last convolution is whole."""
    example, (args, _) = AUTHORS["unet"], AUTHORS["unet"].inputs(0)
    plan = example.plan(axes_of(MESH)) | declared
    graph, mesh, *given = captured(example.make().set_train(), MESH, args, plan=plan)
    free, bound = (Propagation(mesh, *given[1:], CPU, algorithm=algorithm_of) for _ in range(2))
    if isinstance(kept, str):
        with pytest.raises(ValueError, match=kept):
            free.decide_root(graph, given[0], True)
        return
    found = free.decide_root(graph, given[0], True)
    assert free.activation_axes == kept
    bound.activation_axes = frozenset(mesh.axis_names)
    other = bound.improved(graph, {key: (at, NOTHING, False) for key, at in given[0].items()}, True)
    assert found.price.improves_on(other.price) == (kept == {"dp"}), (found.price, other.price)


@pytest.mark.parametrize(("name", "kept"), [("sums", {"dp"}), ("sums cut", set())])
def test_axes_of_written_states(name, kept):
    """The axis of the batch that also cuts a written state is left to the price: the small batch is gathered."""
    kind, plan = WRITTEN[name]
    graph, mesh, *given = captured(built(kind), MESH, (Tensor(batches(1)[0]),), plan=plan)
    free, bound = (Propagation(mesh, *given[1:], CPU, algorithm=algorithm_of) for _ in range(2))
    found = free.decide_root(lambda_lift(graph), given[0], True)
    assert free.activation_axes == kept
    bound.activation_axes = frozenset(mesh.axis_names)
    other = bound.improved(lambda_lift(graph), {key: (at, NOTHING, False) for key, at in given[0].items()}, True)
    assert found.price.improves_on(other.price) == (not kept), (found.price, other.price)


def test_a_partial_sum_that_is_needed_whole_and_cut_is_reduced_once():
    def twice(self, x, y):
        z = ops.matmul(x, y)
        return ops.exp(z), ops.sin(z)

    declarations = {"": Declaration(outputs={0: layout("dp")})}
    arriving = [layout(None, "dp"), layout("dp", None)]
    plan, _, _ = compared(cell_of(twice), PAIR, arriving, declarations)
    assert [[step.kind for step in move.steps] for move in plan.redistributions] in (
        [["all_reduce"], ["slice"]],
        [["reduce_scatter"], ["all_gather"]],
    )


@pytest.mark.parametrize("heads", [3, 4])
def test_a_gather_tells_that_a_dim_does_not_divide(heads):
    arriving = {0: layout(None, "tp").bind(MESH)}
    cell = cell_of(lambda self, x: x.reshape(x.shape[0], -1, 4).sum())
    plan = plan_of(cell, (tensor_meta((2, 4 * heads), "float32"),), {}, arriving=arriving)
    said = [str(move.reason) for move in plan.redistributions if move.reason.undivided]
    wanted = ["Reshape: dim 1, 3 x 4, can't stay sharded over tp: 3 doesn't divide by 2"]
    assert said == (wanted if heads == 3 else [])
