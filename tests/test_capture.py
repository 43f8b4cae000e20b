"""Capture: the graph holds all that a Cell does, captures nothing else, and leaves the Cell as it was."""

import pickle
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.graph.api import _pynative_executor
from ranks.mindspore_calls import CALLS
from ranks.one_card import draw, same
from support.captured_models import MODELS, Closure, Function, Passing, assert_unchanged, small_llama, snapshot
from support.interpret_graph import interpret
from support.small_cells import Doubled, cell_of
from support.work import calls_in

from mindformers_core.capture.capture import capture
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.operators import tensor_meta
from mindformers_core.program.graph import CallNode, OperatorNode
from mindformers_core.program.structure import tree_leaves


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_graph_computes_what_the_cell_computes(name, training):
    cell, make = MODELS[name]()
    cell.set_train(training)
    (args, named), (others, others_named) = make(1), make(2)
    before = snapshot(cell)
    graph = capture(cell, *args, **named)
    assert_unchanged(cell, before)
    assert graph.training is training
    found = interpret(graph, cell, *others, **others_named)
    same(found, cell(*others, **others_named))
    assert pickle.loads(pickle.dumps(graph)).key == graph.key


def inputs_of(kinds):
    random = np.random.default_rng(3)
    return [draw(random, shape, kind) for kind, shape in kinds]


@pytest.mark.parametrize("name", CALLS)
def test_operators_as_authors_write_them(name):
    function, kinds = CALLS[name]
    cell = Function(function)
    inputs = inputs_of(kinds)
    graph = capture(cell, *inputs)
    same(interpret(graph, cell, *inputs), cell(*inputs))


METHODS = {
    "all": lambda x: (x > 0).all(axis=1),
    "any": lambda x: (x > 0).any(axis=1, keep_dims=True),
    "any of all": lambda x: (x > 0).any(),
    "cumsum": lambda x: x.cumsum(axis=1),
    "min": lambda x: x.min(axis=1),
    "prod": lambda x: x.prod(1, True),
    "std": lambda x: x.std(axis=1),
    "var": lambda x: x.var(axis=1, keepdims=True),
    "take": lambda x: x.take(Tensor([1, 0]), axis=1),
    "where": lambda x: x.where(x > 0, x * 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "index_select": lambda x: x.index_select(1, Tensor([1, 0])),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_give_nothing_on_the_meta_device(name):
    cell = Function(METHODS[name])
    (x,) = inputs_of([("float32", (2, 4))])
    graph = capture(cell, x)
    same(interpret(graph, cell, x), cell(x))


def only_operators(graph):
    return [node.operator for node in graph.nodes if isinstance(node, OperatorNode)]


def test_large_shapes_and_operators_without_a_kernel():
    def function(x, weight):
        query = x.reshape(4096, 2048, 64)
        normed, _ = ops.rms_norm(x, weight)
        return ops.flash_attention_score(query, query, query, 1, input_layout="BSH"), normed

    shapes = tensor_meta((4096, 2048, 64), "bfloat16"), tensor_meta((64,), "bfloat16")
    graph = capture(Function(function), *shapes)
    assert only_operators(graph) == ["Reshape", "RmsNorm", "FlashAttentionScore"]
    assert [value.dtype for value in tree_leaves(graph.result)] == ["bfloat16", "bfloat16"]
    assert [value.shape for value in tree_leaves(graph.result)] == [(4096, 2048, 64)] * 2


def test_a_graph_says_where_it_comes_from():
    model, make = small_llama()
    (args, named) = make(1)
    graph = capture(model, *args, **named)
    by_path = {call.path: call for call in graph.calls()}
    attention = by_path["model.layers.1.self_attn"]
    assert attention.class_name == "mindformers_core.models.attention.GroupedAttention"
    names = ["hidden_states", "cosines", "sines", "first", "last", "places"]
    assert list(attention.arguments)[:6] == names
    assert [attention.arguments[name].constant for name in names] == [False, *[True] * 5]
    assert [node.child for node in attention.nodes if isinstance(node, CallNode)] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "core_attention",
        "o_proj",
    ]
    assert all(re.search(r"/(attention|rotary)\.py:\d+$", node.source) for node in attention.nodes)
    projection = by_path["model.layers.1.mlp.gate_proj"]
    assert re.search(r"/layers\.py:\d+$", projection.nodes[0].source)
    use = projection.parameters[0]
    assert (use.path, use.local, use.trainable) == ("model.layers.1.mlp.gate_proj.weight", "weight", True)
    constants = by_path["model"].constants
    assert [constant.value.shape for constant in constants] == [(8, 1, 6)] * 2 + [(1, 8)] * 3
    text = str(graph)
    assert "model.layers.0.mlp (mindformers_core.models.feed_forward.GatedMLP, call 12, evaluation)" in text
    assert re.search(r"%2: float32\[2, 8, 40\] = SiLU\(%1\)  # .*feed_forward\.py:\d+", text)
    assert "  parameter %1: float32[32, 24] = weight" in text


X = tensor_meta((2, 4), "float32")
FIVE = np.full(4, 5, np.float32)


def test_inputs_and_generators_stay_as_they_are():
    x = Tensor(np.ones((2, 4), np.float32))
    cell = Function(lambda x: ops.reshape(x, (4, 2)).T + mint.nn.functional.dropout(x, 0.5)[0, 0] + ops.rand(2, 4))
    state = ms.get_rng_state().asnumpy().copy()
    graph = capture(cell, x)
    assert x.device == "CPU" and x.asnumpy().sum() == 8
    np.testing.assert_array_equal(ms.get_rng_state().asnumpy(), state)
    drawn = next(node for node in graph.nodes if node.operator == "RandExt")
    assert not drawn.constant
    free = [node.operator for node in graph.nodes if not tree_leaves((node.args, node.kwargs))]
    assert free == ["RandomState", "RandomState"]
    assert graph.key == capture(cell, x).key


def test_constants_are_known_and_folded():
    def masked(self, x):
        mask = ops.arange(4) > int(self.table[2])  # plain tensors: computed while capturing
        return ops.where(mask, x, self.table * 2) + self.half

    table = Tensor(np.arange(4, dtype=np.float32))
    graph = capture(cell_of(masked, table=table, half=Tensor(np.ones(4), ms.bfloat16)), X)
    by_path = {constant.path: constant for constant in graph.constants}
    np.testing.assert_array_equal(by_path["table"].array, [0, 1, 2, 3])
    np.testing.assert_array_equal(by_path[None].array, [False, False, False, True])
    assert by_path["table"].local == "table" and by_path[None].local is None
    assert by_path["half"].value.dtype == "bfloat16" and by_path["half"].array.dtype == np.float32
    assert [node.operator for node in graph.nodes if node.constant] == ["StridedSlice", "Squeeze", "Muls"]


def test_constants_are_computed_when_they_are_asked_for():
    def counted(self, x, index):
        _, (second, _) = 0, ops.split(self.table * 2, 1)[1:3]
        return ops.reshape(x, (int(second[0]), 4)) + Tensor(np.ones((2, 4), np.float32))[0, index]

    cell = cell_of(counted, table=Tensor(np.arange(4, dtype=np.float32)))
    graph = capture(cell, X, tensor_meta((4,), "int64"))
    assert [node.args[1] for node in graph.nodes if node.operator == "Reshape"] == [(2, 4)]
    assert only_operators(graph)[-3:] == ["Gather", "Squeeze", "AddExt"]


def test_one_tensor_for_two_arguments_is_one_value():
    cell = cell_of(lambda self, x: (self.inner(x, x), self.inner(x, x * 2)), inner=Passing())
    once, twice = (node.graph for node in capture(cell, X).nodes if isinstance(node, CallNode))
    assert once.arguments["x"] == once.result[0] and once.arguments["x"].id == once.arguments["y"].id == 0
    assert (twice.arguments["x"].id, twice.arguments["y"].id) == (0, 1)
    assert once.key != twice.key


def test_primitives_are_known_by_their_attribute():
    def construct(self, x):
        return ops.relu(self.bias(self.matmul(x, self.weight), self.shift))

    weights = {
        name: Parameter(Tensor(np.ones(shape, np.float32))) for name, shape in (("weight", (3, 4)), ("shift", 3))
    }
    primitives = {"matmul": ops.MatMul(transpose_b=True), "bias": ops.BiasAdd(), "other": ops.Gather()}
    nodes = capture(cell_of(construct, **weights, **primitives), X).nodes
    assert [(node.attribute, node.operator, node.kind) for node in nodes] == [
        ("matmul", "MatMul", "function"),
        ("bias", "BiasAdd", "primitive"),
        (None, "ReLU", "function"),
    ]
    assert nodes[1].primitive.attributes == {"data_format": "NCHW"} and nodes[1].primitive.inputs == 2


def test_outer_values_are_listed():
    graph = capture(Closure(), X)
    writer, reader = (node.graph for node in graph.nodes if isinstance(node, CallNode))
    assert [(use.path, use.call, use.id) for use in reader.free_variables] == [("writer", writer.call, 2)]
    assert [(use.path, use.call, use.id) for use in graph.free_variables] == [("writer", writer.call, 1)]


def test_an_outer_variable_that_is_not_set_yet():
    def construct(self, x):
        return first(x) if first else later(x)

    first = ops.square
    assert [node.operator for node in capture(cell_of(construct), X).nodes] == ["Square"]
    later = first
    assert later


def test_parts_of_a_call_that_are_no_operators():
    def construct(self, x):
        self.calls += 1
        ops.assign(self.steps, self.steps + 1)
        y = self.doubled(self.inner(x)).sum()
        for parameter in self.inner.trainable_params():
            y = y + parameter.square().sum()
        return y

    steps = Parameter(Tensor(0.0, ms.float32), requires_grad=False)
    cell = cell_of(construct, inner=nn.Dense(4, 4), doubled=Doubled(), steps=steps, calls=0)
    cell.inner.recompute()
    cell.inner.register_forward_hook(lambda cell, inputs, output: output + 1)
    before = snapshot(cell)
    graph = capture(cell, X)
    assert_unchanged(cell, before)
    kinds = [node.operator if isinstance(node, OperatorNode) else node.child for node in graph.nodes]
    squares = ["Square", "SumExt", "AddExt"] * 2
    assert kinds == ["AddScalar", "StopGradient", "Assign", "inner", "doubled", "SumExt", *squares]
    assert [(call.path, call.custom_gradient) for call in graph.calls()] == [
        ("", False),
        ("inner", False),
        ("doubled", True),
    ]
    assert [use.local for use in graph.parameters] == ["steps", "inner.weight", "inner.bias"]


def test_runs_under_meta_in_jit_and_inside_a_gradient():
    class Jitted(nn.Cell):
        @ms.jit
        def construct(self, x):
            return ops.exp(x) * 2

    assert only_operators(capture(Jitted(), X)) == ["Exp", "Muls"]
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        assert only_operators(capture(Function(lambda x: nn.Tanh()(Jitted()(x))), X)) == ["Exp", "Muls", "Tanh"]
        assert ms.get_context("mode") == ms.GRAPH_MODE
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    x = Tensor(np.ones((2, 4), np.float32))
    graphs = []

    def watched(x):
        assert not _pynative_executor.requires_grad()
        return ops.exp(x)

    def loss(x):
        graphs.append(capture(nn.SequentialCell(Function(watched), Doubled()), x))
        return ops.exp(x).sum()

    np.testing.assert_allclose(ms.grad(loss)(x).asnumpy(), np.e, rtol=1e-6, atol=0)
    assert [only_operators(call) for call in graphs[0].calls()] == [[], ["Exp"], ["Muls"]]
    with ms.DeviceCtx("meta"):
        dense = nn.Dense(4, 3)
        graph = capture(dense, mint.zeros((2, 4)))
        scaled = capture(Function(lambda x: x * Tensor(FIVE)), X)
    assert only_operators(graph) == ["MatMul", "BiasAdd"]
    assert dense.weight.is_meta and dense.weight.has_init
    np.testing.assert_array_equal(scaled.constants[0].array, FIVE)


def test_work_of_capture_grows_with_the_layers():
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    ids = tensor_meta((16, 1024), "int32")

    def large(layers):
        with ms.DeviceCtx("meta"):
            return LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_hidden_layers=layers, **sizes))

    few, many = (calls_in(capture, large(layers), ids, labels=ids) for layers in (4, 16))
    assert many < 4 * few
    calls = [*capture(large(16), ids, labels=ids).calls()]
    assert len({call.key for call in calls}) < 20 < 180 < len(calls)


PLAIN_WRITES = {
    "by index": lambda t: t.__setitem__(0, 5.0),
    "by index of a view": lambda t: t[:1].__setitem__(0, 5.0),
    "copy": lambda t: t.copy_(Tensor([5.0, 2.0])),
    "assignment": lambda t: t.assign_value(Tensor([5.0, 2.0])),
    "none": lambda t: t + 1,
}


@pytest.mark.parametrize("write", PLAIN_WRITES)
def test_a_plain_tensor_that_is_written_between_two_uses_is_two_constants(write):
    class Writes(nn.Cell):
        def construct(self, x):
            table = Tensor([1.0, 2.0])
            first = x + table
            PLAIN_WRITES[write](table)
            return first, x + table

    found = [constant.array.tolist() for constant in capture(Writes(), Tensor([0.0, 0.0])).constants]
    assert found == [[1.0, 2.0], [5.0, 2.0]][: 1 if write == "none" else 2]
