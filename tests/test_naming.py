"""Names in generated code: those that the user's code gives, unique and legal ones, and functions' names."""

import builtins
import keyword
import linecache

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.captured_models import small_llama
from support.small_cells import cell_of

from mindformers_core.capture.capture import capture
from mindformers_core.program.graph import CellGraph, OperatorNode
from mindformers_core.program.naming import Names, assigned_names, snake_case
from mindformers_core.program.structure import Value


def names_of(construct):
    """`operator or child: names` for every node of a Cell with this `construct(self, x)`, in order."""

    parts = {"a": nn.ReLU(), "b": nn.Sigmoid(), "c": nn.Tanh(), "product": ops.Mul()}
    cell = cell_of(construct, layers=nn.CellList([nn.ReLU(), nn.ReLU()]), **parts)
    graph = capture(cell, Tensor(np.ones((4, 4), np.float32)))
    names = {index: first for index, (first, *_) in assigned_names(graph).items()}
    assert names.keys() <= {*range(len(graph.nodes))}
    nodes = [node.operator if isinstance(node, OperatorNode) else node.child for node in graph.nodes]
    return [(node.removesuffix("Ext").removesuffix("s"), names.get(index)) for index, node in enumerate(nodes)]


def plain(self, x):
    q = self.a(x)
    total: object = q + x
    total *= 2
    self.kept = ops.exp(total)
    return self.b(total)


def nested(self, x):
    y = self.c(self.b(self.a(x)) * 2)
    z = ops.exp(
        ops.matmul(
            self.a(y),
            x,
        ),
    )
    total = x + y + z
    scaled = self.product(self.product(x, y), z)
    picked = self.a(x) if x is y else self.b(total)
    return scaled + picked


def tuples(self, x):
    left, right = ops.split(x, 2)
    halves = ops.split(x, 2)
    [first, _] = ops.split(x, 2)
    one, *rest = ops.split(x, 1)
    holder = {}
    holder["x"] = ops.exp(left)
    return right, halves, first, one, rest, holder["x"]


def loop(self, x):
    for layer in self.layers:
        x = layer(x)
    for layer in self.layers:
        y = layer(x) + x
        x = ops.exp(y)
    return x


# fmt: off
def several(self, x):
    y = self.a(x); z = self.b(y)  # noqa: E702
    if True: z = self.c(z)  # noqa: E701
    _ = ops.exp(z)
    pair = self.a(x), self.b(x)
    __ = [ops.exp(part) for part in pair]
    return helper(x, z)
# fmt: on


def helper(x, other):
    product = x * other
    return ops.exp(product)


def chained(self, x):
    p = pair = self.a(x)
    _ = kept = ops.exp(p)
    *most, last = both = ops.split(x, 1)
    parts = [self.b(each) for each in most]
    by_place = {place: ops.exp(each) for place, each in enumerate(parts)}
    *nothing, one, other = ops.split(x, 2)
    return pair, kept, last, both, by_place, one, other


def parallel(self, x):
    q, k, v = self.a(x), self.b(self.a(x)), x
    first, second = ops.exp(x * 2), ops.exp(x)
    (left, right), total = pair = ops.split(x, 2), x + q
    for layer in self.layers:
        even, odd = layer(x), ops.exp(layer(x))
    one, two = self.a(x) if x is q else self.b(x), ops.exp(x)
    *rest, last = self.a(x), self.b(x)
    for flag in (False, False):
        three, four = flag and ops.exp(x), ops.exp(x)
    [turned, part] = ops.cat((x.permute(1, 0), x)), x[:2]
    return three, four, turned, part, q, k, v, first, second, left, right, total, pair, even, odd, one, two, rest, last


NAMED = {  # the names of each node's results; of several targets the first gives generated code its name
    plain: [("q",), ("total",), ("total",), ("kept",), None],
    tuples: [("left", "right"), ("halves", "halves"), ("first", None), ("one", *["rest"] * 3), None],
    chained: [
        *(("p",), ("kept",), ("most", "most", "most", "last")),
        *[("parts",)] * 3, *[("by_place",)] * 3, ("one", "other"),
    ],
    parallel: [
        *(("q",), None, ("k",), None, ("first",), ("second",), None, ("total",)),
        *[("even",), None, ("odd",)] * 2, *[None] * 7, ("turned",), ("part",),
    ],
    loop: [("x",), ("x",), *[None, ("y",), ("x",)] * 2],  # every round
    several: [None, None, ("z",), *[None] * 5, ("product",), None],
}  # fmt: skip


@pytest.mark.parametrize("construct", NAMED)
def test_names_of_results(construct):
    assert [names for _, names in names_of(construct)] == NAMED[construct]


def test_only_the_outermost_call_has_the_name():
    assert names_of(nested) == [
        *[("a", None), ("b", None), ("Mul", None), ("c", ("y",))],
        *[("a", None), ("MatMul", None), ("Exp", ("z",))],
        *[("Add", None), ("Add", ("total",))],
        *[("Mul", None), ("Mul", ("scaled",))],
        ("b", ("picked",)),
        ("Add", None),
    ]


@pytest.mark.parametrize("source", [None, "/no/such/file.py:3", "broken.py:1", "<string>:1"])
def test_sources_that_can_not_be_read(source, monkeypatch):
    monkeypatch.setitem(linecache.cache, "broken.py", (8, None, ["x = = 1\n"], "broken.py"))
    node = OperatorNode("Exp", "function", (), {}, Value(0, (), "float32", "exp"), None, None, source)
    assert assigned_names(CellGraph("", "m.C", 0, True, False, {}, (node,), None)) == {}


def test_a_model():
    cell, make = small_llama()
    args, named = make(1)
    graphs = list(capture(cell, *args, **named).calls())
    found = {graph.path: [names for names, *_ in assigned_names(graph).values() if names] for graph in graphs}
    assert found[""] == [("hidden_states",), ("loss",)]
    assert found["model"] == [("hidden_states",)] * 4
    attention = "model.layers.0.self_attn"
    assert [name for names in found[attention] for name in names][:3] == ["query", "key", "value"]


def test_variables_are_unique():
    names = Names(("all_reduce_tp", "ops"))
    assert [names.variable("x") for _ in range(3)] == ["x", "x_2", "x_3"]
    assert [names.variable(hint) for hint in ("x_2", "x_3", "x")] == ["x_2_2", "x_3_2", "x_4"]
    assert [names.variable("sum") for _ in range(3)] == ["sum_", "sum_2", "sum_3"]
    assert names.variable("ops") == "ops_2" and names.variable("all_reduce_tp") == "all_reduce_tp_2"
    module = {"ops"}
    names = Names(module)
    module.add("all_gather_tp")
    assert names.variable("all_gather_tp") == "all_gather_tp_2", "the module got a name after the function was begun"
    assert Names().variable("ops") == "ops", "reserved in one function, free in another"


def test_variables_are_legal():
    rng = np.random.default_rng(0)
    hints = [*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "", "0", "layers.0.x", "a-b", "2x", "größe"]
    hints = [hints[index] for index in rng.permutation(len(hints) * 3) % len(hints)]
    names = Names(("x",))
    found = [names.variable(hint) for hint in hints]
    assert len(set(found)) == len(found)
    forbidden = {*keyword.kwlist, *dir(builtins), "self", "x"}
    assert all(name.isidentifier() and name not in forbidden for name in found)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("LlamaForCausalLM", "llama_for_causal_lm"),
        ("MLP", "mlp"),
        ("RMSNorm", "rms_norm"),
        ("MatMul", "matmul"),
        ("BatchMatMulExt", "batch_matmul_ext"),
        ("ReLU", "relu"),
        ("SiLU", "silu"),
        ("LogSoftmax", "log_softmax"),
        ("Conv2D", "conv2d"),
        ("ResNet50Block", "res_net50_block"),
        ("already_snake", "already_snake"),
    ],
)
def test_snake_case(name, function):
    assert snake_case(name) == function
