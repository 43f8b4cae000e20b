"""Models that others wrote, in small: every rank against one card."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from support.nightly import daily
from support.zoo_cells import KINDS, WIDTH, EqualNames, HalfInside, HalfThroughout, OwnStrategies, Projected, numbers

from mindformers_core import explain, full_parameters, verify
from mindformers_core.capture.capture import capture
from mindformers_core.communication.world import rank_of, world
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.sharding.shard import shard
from mindformers_core.sharding.sharded_cells import ShardedCell
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm

TP = {"weight": {"weight": layout("tp", None)}}


@pytest.mark.parametrize("kind", daily(KINDS[::5], KINDS), ids=lambda kind: kind.__name__)
def test_every_rank_computes_what_one_card_does(kind):
    plan = {"": {"input": layout("dp")}, "inner": TP}
    check = verify(kind(), DeviceMesh((2, 2), ("dp", "tp")), numbers(4, WIDTH), plan=plan)
    assert not check.faults, check.report()
    assert check.compared and "not verified" not in check.report()


def test_a_gradient_without_elements_adds_nothing_to_the_norm():
    """MindSpore's sum of no elements is what the memory held before."""
    weights = [Parameter(Tensor(np.ones(shape, np.float32)), name) for name, shape in (("a", (0, 8)), ("b", (4,)))]
    gradients = tuple(Tensor(weight.asnumpy()) for weight in weights)
    (numbers(7) * 3).sum().asnumpy()
    assert ClipByGlobalNorm(weights, 1.0)(gradients)[1] == 2


def test_a_dict_by_name_has_all_parameters_of_equal_names():
    with rank_of(1, 0):
        net = shard(EqualNames(), DeviceMesh((1,), ("tp",)))
        assert len(full_parameters(net)) == len(list(net.get_parameters())) == 4


def test_a_convolution_in_groups_whose_bias_is_cut():
    class Mixed(Projected):
        def __init__(self):
            super().__init__()
            self.kernel = Parameter(numbers(WIDTH, 1, 3, 3), "kernel")
            self.bias = Parameter(numbers(WIDTH), "bias")

        def construct(self, x):
            h = self.inner(x).swapaxes(1, 2).reshape(-1, WIDTH, 2, 2)
            return mint.nn.functional.conv2d(h, self.kernel, self.bias, 1, 1, 1, WIDTH)

    with rank_of(4, 0):
        cut = {"kernel": layout("tp"), "bias": layout("tp")}
        plan = {"": {"input": layout("dp"), "weight": cut}, "inner": TP}
        net = shard(Mixed(), DeviceMesh((2, 2), ("dp", "tp")), plan=plan)
        (line,) = [line for line in str(explain(net, numbers(2, 4, WIDTH))).splitlines() if "Conv2DExt(" in line]
    assert "[4, 8, 2, 2] -> [2, 4, 2, 2]" in line and "[dp, tp, -, -]" in line


def test_without_a_plan_a_method_of_another_meaning_is_an_error_that_names_the_way_out():
    class Chained(OwnStrategies):
        def shard(self, product_strategy):
            return self

    with rank_of(2, 0), pytest.raises(TypeError, match="a method of another meaning, give shard.. a plan"):
        shard(Chained(), DeviceMesh((2,), ("tp",)))


def test_the_casts_of_to_float_are_operators_of_the_program():
    graph = capture(HalfInside(), numbers(4, WIDTH))
    inner = next(call for call in graph.calls() if call.path == "inner")
    assert [node.operator for node in inner.nodes].count("Cast") == 3  # of x, the weight and the bias
    assert {node.outputs.dtype for node in inner.nodes} == {"float16"}
    whole = capture(HalfThroughout(), numbers(4, WIDTH))
    assert [node.operator for node in whole.nodes if hasattr(node, "operator")] == ["Tanh", "Muls"], whole.nodes
    assert whole.result.dtype == "float16"


class Experts(nn.Cell):
    """Each expert computes the rows that chose it, as many as there are."""

    def __init__(self, slip=0.0):
        super().__init__()
        self.gate, self.slip = nn.Dense(WIDTH, 4, has_bias=False), slip
        self.gate.weight.set_data(numbers(4, WIDTH, seed=2))  # each expert is chosen by a row
        self.experts = nn.CellList([nn.Dense(WIDTH, WIDTH) for _ in range(4)])

    def construct(self, x):
        weights, chosen = ops.topk(ops.softmax(self.gate(x), -1), 2, -1)
        total = ops.zeros_like(x)
        for number, expert in enumerate(self.experts):
            places = ops.nonzero(chosen == number)
            row, slot = places[:, 0], places[:, 1]
            made = expert(x[row]) * weights[row, slot][:, None]
            total = ops.tensor_scatter_add(total, row[:, None], made)
        return total * (1.0 + self.slip * (world().rank if isinstance(self, ShardedCell) else 0))


class Layer(nn.Cell):
    def __init__(self, slip=0.0):
        super().__init__()
        self.attention, self.experts = nn.Dense(WIDTH, WIDTH), Experts(slip)
        self.attention.weight.set_data(numbers(WIDTH, WIDTH, seed=3))  # MindSpore has no gradient for an idle expert

    def construct(self, x):
        x = x + ops.tanh(self.attention(x))
        return x + self.experts(x)


EAGER = {
    "": {"input": layout("dp")},
    "attention": TP,
    "experts": {"eager": True},
    "experts.experts.*": TP,
}


def test_experts_by_nonzero_run_eagerly_and_their_siblings_have_programs():
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    check = verify(Layer(), mesh, numbers(6, WIDTH), plan=EAGER)
    assert not check.faults, check.report()
    assert "'experts' and the Cells around run operator by operator" in check.report()
    slipped = verify(Layer(slip=0.01), DeviceMesh((1, 2), ("dp", "tp")), numbers(6, WIDTH), plan=EAGER)
    assert slipped.faults and "result of 'number 0'" in slipped.report(), slipped.report()
