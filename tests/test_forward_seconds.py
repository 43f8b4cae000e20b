"""What it takes to compute an instruction again: figures found by hand, and the price of the plan."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.captured_models import Function, small_llama
from support.planned_models import COUNTING, captured, planned, silent_algorithm

from mindformers_core.analysis.forward_seconds import forward_seconds
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import signature_of, tensor_meta
from mindformers_core.operators.choice import Choice
from mindformers_core.program.graph import OperatorNode
from mindformers_core.program.plan import Instruction, OperatorPlan, operators_in_order
from mindformers_core.program.structure import Value
from mindformers_core.propagation.propagate import propagate
from mindformers_core.redistribution import CPU, GPU, Link

ONE, TWO = init_device_mesh((1,), ("tp",)), init_device_mesh((2,), ("tp",))
TOKENS = 2 * 8  # of the small Llama: hidden 24, intermediate 40, 4 heads of 6, 2 of keys, 32 words, 2 layers
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
CORE = f"{ATTENTION}.core_attention"


def float_meta(*shape):
    return tensor_meta(shape, "float32")


@cache
def llama(mesh, device=CPU, trained=True):
    model, make = small_llama()
    args, named = make(1)
    for parameter in model.get_parameters():
        parameter.requires_grad = trained
    found = captured(model.set_train(), mesh, args, named, SimpleNamespace(sequence_parallel=False))
    return propagate(*found, device)


def priced_by(device, place):
    """An `Instruction` whose plan has another device model."""
    return replace(place, plan=replace(place.plan, device_model=device))


def costs(plan, path):
    """`[(operator, floating-point operations)]` of the instructions in one Cell's `construct`."""
    places = [place for place in operators_in_order(plan) if place.path == path]
    steps = {place.key: forward_seconds(priced_by(COUNTING, place), silent_algorithm) for place in places}
    return [(place.entry.node.operator, steps[place.key]) for place in places if hasattr(place.entry, "node")]


def test_products_of_a_llama():
    plan = llama(ONE)
    for path, inside, outside in (
        (f"{ATTENTION}.q_proj", 24, 24),
        (f"{ATTENTION}.k_proj", 24, 12),
        (f"{ATTENTION}.o_proj", 24, 24),
        (f"{MLP}.gate_proj", 24, 40),
        (f"{MLP}.down_proj", 40, 24),
        ("lm_head", 24, 32),
    ):
        assert costs(plan, path) == [("Dense", 2 * TOKENS * inside * outside)]
    scores = 2 * 4 * 36  # of 8 x 8: causal
    assert costs(plan, CORE)[0] == ("Attention", scores * 2 * (6 + 6))


def test_element_by_element():
    plan = llama(ONE)
    assert costs(plan, MLP) == [("SiLU", 4 * TOKENS * 40), ("Mul", TOKENS * 40)]
    assert dict(costs(plan, CORE))["Reshape"] == 0
    assert costs(plan, "model.norm") == [("RMSNorm", 4 * TOKENS * 24)]
    assert costs(plan, "model.embed_tokens") == [("Gather", TOKENS * 24)]  # not the table's 32 * 24


def test_each_rank_computes_its_part():
    whole, half = llama(ONE), llama(TWO)
    for path in (f"{ATTENTION}.q_proj", f"{ATTENTION}.o_proj", f"{MLP}.gate_proj", f"{MLP}.down_proj"):
        assert [2 * cost for _, cost in costs(half, path)] == [cost for _, cost in costs(whole, path)]
    assert costs(half, MLP) == [("SiLU", 4 * TOKENS * 20), ("Mul", TOKENS * 20)]


def test_a_roofline_of_operations_and_memory():
    """And the launch of an operator; views take nothing."""
    places = {place.path: place for place in operators_in_order(llama(ONE)) if hasattr(place.entry, "node")}
    product, sizes = places[f"{MLP}.gate_proj"], (TOKENS * 24, 24 * 40, TOKENS * 40)
    busy = replace(COUNTING, operator_launch=7.0, memory_bandwidth=1e6)
    assert forward_seconds(priced_by(busy, product)) == 7 + 2 * TOKENS * 24 * 40
    assert forward_seconds(priced_by(replace(busy, memory_bandwidth=0.1), product)) == 7 + 4 * sum(sizes) / 0.1


def test_what_is_sent_has_a_price():
    """An all-reduce of n ranks sends 2 (n - 1) / n of the tensor; to mark a tensor as varying takes nothing."""
    moves = {place.path: place for place in operators_in_order(llama(TWO)) if not hasattr(place.entry, "node")}
    for device in (CPU, GPU, GPU.with_links(tp=Link(5e-6, 25e9))):
        sent = device.seconds("all_reduce", ("tp",), 2, TOKENS * 24 * 4)
        assert forward_seconds(priced_by(device, moves[f"{MLP}.down_proj"])) == sent
    assert forward_seconds(moves["model.layers.1"]) == 0


@pytest.mark.parametrize(("mesh", "device"), [(ONE, CPU), (ONE, GPU), (TWO, COUNTING)])
def test_one_price(mesh, device):
    """That by which layouts are chosen: without gradients the price of a plan is the sum of its instructions.

    Slices and masks, which the choice of layouts takes as free, take nothing on the last device.
    """
    plan = llama(mesh, device, trained=False)
    seconds = [forward_seconds(place, silent_algorithm) for place in operators_in_order(plan)]
    assert sum(seconds) == pytest.approx(plan.price.seconds) and plan.price.given_up == 0


def test_what_an_algorithm_sends():
    mesh = init_device_mesh((2,), ("tp",))
    cell = Function(lambda x: ops.softmax(x, 1))
    _, plan = planned(cell, mesh, (float_meta(4, 6),), arriving={"inputs": layout(None, "tp")})
    (place,) = [place for place in operators_in_order(plan) if getattr(place.entry, "algorithm", None)]
    with pytest.raises(ValueError, match=r"Softmax .* algorithm 'softmax' over tp: pass algorithm=, "):
        forward_seconds(place)
    step = SimpleNamespace(forward=("all_reduce", 16), backward=("identity", 0), axes=("tp",), group_size=2, whole=16)
    node = SimpleNamespace(operator="Redistribute", taken=(), made=())
    graph = SimpleNamespace(arguments={}, constants=(), nodes=[node], result=())
    counted = forward_seconds(priced_by(COUNTING, place), lambda plan: (graph, [[step]]))
    assert counted == 5 * 4 * 3 + 16


def place_of(operator, tensors, shapes, cut=None):
    """A `Instruction` of one operator whose inputs are whole tensors; `cut`: factor -> axes."""
    signature = signature_of(operator, tensors)
    given = [tensor.shape for tensor in tensors if hasattr(tensor, "shape")]
    values = [Value(number, shape, "float32", "") for number, shape in enumerate(given)]
    made = tuple(Value(len(values) + number, shape, "float32", "") for number, shape in enumerate(shapes))
    node = OperatorNode(operator, "function", tuple(values), {}, made, None, None, "here:1")
    layouts = [tuple(layout().bind(TWO, len(value.shape)) for value in group) for group in (values, made)]
    return Instruction(
        (0,),
        "",
        SimpleNamespace(mesh=TWO, device_model=COUNTING),
        OperatorPlan(node, signature, *layouts, Choice(tuple((cut or {}).items()))),
    )


def test_attention_and_convolutions():
    query, key = float_meta(2, 4, 8 * 6), float_meta(2, 10, 2 * 6)  # 8 heads in 2 groups
    tensors = [query, key, key, *[None] * 7, 8]
    shapes = [(2, 8, 4, 8), (2, 8, 4, 8), (1,), (2, 4, 48)]
    scores = 2 * 8 * 4 * 10
    whole = scores * 2 * (6 + 6)
    assert forward_seconds(place_of("FlashAttentionScore", tensors, shapes)) == whole
    assert forward_seconds(place_of("FlashAttentionScore", tensors, shapes, {"g": ("tp",)})) == whole // 2
    image, kernel = float_meta(3, 4, 9, 9), float_meta(6, 2, 3, 3)  # in 2 groups
    tensors = [image, kernel, 6, 3, 1, "valid", 0, 1, 1, 2]
    assert forward_seconds(place_of("Conv2D", tensors, [(3, 6, 7, 7)])) == 2 * (3 * 6 * 7 * 7) * (2 * 3 * 3)


def test_a_cell_with_a_gradient_of_its_own():
    class Scaled(nn.Cell):
        """A Cell with a `bprop`."""

        def __init__(self):
            super().__init__()
            self.weight = Parameter(Tensor([[1.0] * 5] * 3), name="weight")

        def construct(self, x):
            return ops.relu(ops.matmul(x, self.weight))

        def bprop(self, x, out, dout):
            return (dout,)

    _, plan = planned(Function(Scaled()), ONE, (float_meta(4, 3),))
    (place,) = operators_in_order(plan)
    assert forward_seconds(priced_by(COUNTING, place)) == 2 * 4 * 3 * 5 + 4 * 5
