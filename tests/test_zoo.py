"""What models that others wrote do, one small Cell for each kind that once failed: every rank against one card."""

from collections import OrderedDict
from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops

from mindformers_core import explain, full_parameters, verify
from mindformers_core.capture.capture import capture
from mindformers_core.communication.world import rank_of, world
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.sharding.shard import shard
from mindformers_core.sharding.sharded_cells import ShardedCell
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm

WIDTH = 8
TP = {"weight": {"weight": layout("tp", None)}}


def numbers(*shape, seed=0):
    return Tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


class Projected(nn.Cell):
    """A projection, in the attribute `inner`, and something after it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Dense(WIDTH, WIDTH)
        self.inner.weight.set_data(numbers(WIDTH, WIDTH, seed=1))


class OwnStrategies(Projected):
    """A method `shard` of another meaning: it takes the strategy of a product, and returns the Cell."""

    def construct(self, x):
        return ops.tanh(self.inner(x))

    def shard(self, product_strategy, bias_strategy=None):
        raise AssertionError("this method is no hook")


class TwoHalves(Projected):
    """Pieces along `axis`, the older name of the argument."""

    def construct(self, x):
        left, right = self.inner(x).chunk(2, axis=-1)
        return ops.sigmoid(left) * right


class ListsAsIndices(Projected):
    """Lists of slices, of lists, and with `None`, `...` or a tensor in them are read as tuples."""

    def construct(self, x):
        h = self.inner(x)
        middle = [slice(None)] * h.ndim
        middle[-1] = slice(2, 6)
        pairs = h[[[0, 1], [2, 3]]]
        return h[middle] * h[[..., 0]][:, None] + pairs.sum() + h[[None, 1]].sum() + h[[Tensor([3, 2]), 1]].sum()


class Asks(Projected):
    """`None`, or a word, is searched in a tensor: it isn't there, whatever its values."""

    def construct(self, x):
        h = self.inner(x)
        return h if None in h or "mask" in h else ops.relu(h)


class NamedProducts(Projected):
    """The operands of a sum and a product go by their names in the method."""

    def construct(self, x):
        h = self.inner(x).reshape(-1, 2, WIDTH // 2)
        bias = x.reshape(-1, 2, WIDTH // 2)[:, :1, :1]
        return bias.baddbmm(batch1=h, batch2=h.swapaxes(1, 2), beta=0.5, alpha=2.0)


class HalfInside(Projected):
    """A projection in float16 by `to_float`, between casts, and masks by slices with all five masks given."""

    def __init__(self):
        super().__init__()
        self.inner.to_float(ms.float16)
        self.lower = Tensor(np.tril(np.ones((16, 16), np.float32)))

    def construct(self, x):
        mask = ops.strided_slice(self.lower, (0, 0), (WIDTH, WIDTH), (1, 1), 0, 0, 0, 0, 0)
        return ops.matmul(self.inner(x).astype(ms.float32), mask) * 0.5


class HalfThroughout(Projected):
    """`to_float` of the root holds for operators that it calls itself, too."""

    def __init__(self):
        super().__init__()
        self.to_float(ms.float16)

    def construct(self, x):
        return ops.tanh(self.inner(x)) * 2.0


class OneStrategy(Projected):
    """A primitive with a strategy that cuts nothing, for tensors of other numbers of dims, too."""

    def __init__(self):
        super().__init__()
        self.cast = ops.Cast().shard(((1, 1, 1, 1),))
        self.scale = Parameter(numbers(1, seed=4), "scale")

    def construct(self, x):
        return self.cast(self.inner(x), ms.float32) * self.cast(self.scale, ms.float32)


class SharedInLists(nn.Cell):
    """A Cell in two plain lists and in a SequentialCell, a bound method in the place of another's `construct`."""

    def __init__(self):
        super().__init__()
        shared = nn.Dense(WIDTH, WIDTH)
        self.inner, self.stages = shared, [shared, nn.ReLU(), shared]
        self.whole = nn.SequentialCell(self.stages)
        self.adapted = nn.Dense(WIDTH, WIDTH)
        self.adapted.construct = self.doubled

    def doubled(self, x):
        return ops.dense(x, self.adapted.weight, self.adapted.bias) * 2

    def construct(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.whole(self.adapted(x))


@dataclass
class Output(OrderedDict):
    """A result that is a dataclass and a dict, and looks into its first field when it is made."""

    hidden: Tensor = None
    mask: Tensor = None

    def __post_init__(self):
        next(iter(self.hidden))
        self.update(hidden=self.hidden)

    def __reduce__(self):
        return Output, (self.hidden, self.mask)


class Encoded(Projected):
    def construct(self, x):
        return Output(ops.tanh(self.inner(x)))


class Outputs(nn.Cell):
    """Results of a Cell that are made anew by whoever copies them."""

    def __init__(self):
        super().__init__()
        self.inner, self.encoder = nn.Dense(WIDTH, WIDTH), Encoded()

    def construct(self, x):
        return self.inner(self.encoder(x)["hidden"])


class DotsInNames(Projected):
    """Parameters in a tuple, whose names have dots, as paths have; one as if it were of the Cell inside."""

    def __init__(self):
        super().__init__()
        names = ("token.0", "token.1", "inner.scale")
        self.tokens = ParameterTuple([Parameter(numbers(WIDTH, seed=3 + at), name) for at, name in enumerate(names)])

    def construct(self, x):
        return self.inner(x * self.tokens[0]) * self.tokens[1] + self.tokens[2]


class EqualNames(nn.Cell):
    """Two Parameters of one name: optimizers would refuse them, and a dict by name has one."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = Projected(), nn.Dense(WIDTH, WIDTH)
        for cell in (self.first.inner, self.inner):
            cell.weight.name = "self.weight"

    def construct(self, x):
        return self.inner(self.first.inner(x))


class NoElements(Projected):
    """A Parameter without elements: no further tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = Parameter(Tensor(np.zeros((0, WIDTH), np.float32)), "tokens")

    def construct(self, x):
        return self.inner(ops.cat((self.tokens, x)))


KINDS = (OwnStrategies, TwoHalves, ListsAsIndices, Asks, NamedProducts, HalfInside, SharedInLists)
KINDS += (OneStrategy, Outputs, DotsInNames, NoElements)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
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
        plan = {"": {"input": layout("dp")}, "inner": TP}
        net = shard(Mixed(), DeviceMesh((2, 2), ("dp", "tp")), plan=plan)
        (line,) = [line for line in str(explain(net, numbers(2, 4, WIDTH))).splitlines() if "Conv2DExt(" in line]
    assert "[4, 8, 2, 2] -> [4, 4, 2, 2]" in line and "[-, tp, -, -]" in line


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
    slipped = verify(Layer(slip=0.01), mesh, numbers(6, WIDTH), plan=EAGER)
    assert slipped.faults and "result of 'number 0'" in slipped.report(), slipped.report()
