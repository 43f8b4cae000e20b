"""Backward passes in two parts: all gradients are those of whole ones, and no weight's is computed too early."""

import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore.utils import MsDispatchMode
from models import TINY_LLAMA
from support.nightly import daily
from support.small_cells import cell_of
from support.split_backward import Compiled, Interpreted, assert_same, filled, gradients

from mindformers_core.communication import init_distributed
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.passes.weight_split import split_weight_gradients
from mindformers_core.tensor_parallel import prepare, programs, shard
from mindformers_core.tensor_parallel.layers import RMSNorm

SIZES = TINY_LLAMA | {"num_hidden_layers": 1}


def weight(*shape):
    return Parameter(Tensor(np.zeros(shape, np.float32)))


def frozen():
    return Parameter(Tensor(np.zeros((8, 8), np.float32)), requires_grad=False)


class MLP(nn.Cell):
    """Two layers with biases."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Dense(8, 16), nn.Dense(16, 4)

    def construct(self, x):
        return self.down(ops.relu(self.up(x)))


def chain():
    """One product straight after the other, with one Cell called three times."""
    return cell_of(lambda self, x: self.layer(self.layer(self.layer(x))), layer=nn.Dense(8, 8, has_bias=False))


class Products(nn.Cell):
    """Every way to write a product with a weight."""

    def __init__(self):
        super().__init__()
        self.plain, self.turned, self.bias = weight(8, 8), weight(8, 8), weight(8)
        self.matmul, self.matmul_turned = ops.MatMul(), ops.MatMul(transpose_b=True)

    def construct(self, x):
        x = ops.matmul(x, self.plain) + ops.dense(x, self.turned)
        x = mint.nn.functional.linear(ops.tanh(x), self.turned, self.bias)
        x = ops.tanh(x @ self.plain + x.matmul(self.plain) + ops.dense(x, self.turned, self.bias))
        rows = ops.reshape(x, (-1, 8))
        return ops.tanh(self.matmul(rows, self.plain)) + self.matmul_turned(rows, self.turned)


class Others(nn.Cell):
    """Weights that are used otherwise, too: added, gathered from, on the left of a product, transposed, in a batch."""

    def __init__(self):
        super().__init__()
        self.weight, self.left, self.batched = weight(8, 8), weight(8, 8), weight(3, 8, 8)
        self.frozen = frozen()

    def construct(self, x):
        rows = ops.gather(self.weight, Tensor([1, 3, 1], ms.int32), 0)
        y = ops.matmul(x, self.weight) + ops.matmul(rows, ops.transpose(self.weight, (1, 0)))
        y = ops.matmul(self.left, ops.transpose(y, (0, 2, 1))) + ops.sum(self.weight)
        return ops.matmul(ops.matmul(ops.tanh(y[:, :, :3]), ops.ones((3, 8))), ops.sum(self.batched, 0)) + ops.matmul(
            y[:, :3, :3].sum(2, keepdims=True) * x, self.frozen
        ).sum(1, keepdims=True)


def head():
    """Frozen or used nowhere in a product: nothing to defer."""
    return cell_of(lambda self, x: ops.matmul(self.norm(x), self.frozen), norm=RMSNorm(8), frozen=frozen())


def floats(*shape, seed=0):
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def tokens(batch, length, seed=0):
    random = np.random.default_rng(seed)
    return tuple(Tensor(random.integers(0, 64, (batch, length)).astype(np.int32)) for _ in range(2))


def on_floats(count=3):
    return [(floats(2, 3, 8, seed=seed),) for seed in range(count)]


def on_tokens(count=3):
    return [tokens(2, 8, seed) for seed in range(count)]


MODELS = {  # name -> (how to make it, micro-batches, products, parameters without an ordinary gradient)
    "mlp": (MLP, on_floats, 2, {"up.weight", "down.weight"}),
    "chain": (chain, on_floats, 3, {"layer.weight"}),
    "products": (Products, on_floats, 8, {"plain", "turned"}),
    "others": (Others, on_floats, 1, set()),
    "nothing": (head, on_floats, 0, set()),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), on_tokens, 8, None),
    "tied": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), on_tokens, 8, None),
}


def sharded(make):
    """The model on a mesh of one."""
    init_distributed()
    return shard(filled(make()).set_train(), init_device_mesh((1,), ("tp",)))


def names(parameters):
    """Their paths from the model, which `Compiled` and `Interpreted` keep as `net`."""
    return {parameter.name.removeprefix("net.") for parameter in parameters}


def source(net):
    """The text of the program that was used last."""
    return Path(programs(net)[-1].file).read_text()


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        pytest.param(name, jit, id=f"{name}-{mode}", marks=[pytest.mark.nightly] * (jit and name != "chain"))
        for name in MODELS
        for jit, mode in ((False, "pynative"), (True, "jit"))
    ],
)
def test_gradients_are_those_of_a_whole_backward_pass(name, compiled):
    make, batches, products, whole = MODELS[name]
    net, reference = sharded(make), sharded(make)
    expected = gradients(reference, batches(), compiled, split=False)
    assert_same(gradients(net, batches(), compiled, split=True, order=(1, 0, 2)), expected)
    deferred = split_weight_gradients(net)
    assert source(net).count("deferred_products[") >= min(products, 1) and "deferred" not in source(reference)
    assert len(deferred.collectors) == 2 * products
    ordinary = names(deferred.ordinary_parameters)
    if whole is not None:
        assert names(net.trainable_params()) - ordinary == whole
    else:
        embedding = {"model.embed_tokens.weight"}
        assert all(("norm" in path) or path in embedding for path in ordinary) and embedding <= ordinary
    both = names(deferred.parameters) & ordinary
    assert both == {"tied": {"model.embed_tokens.weight"}, "others": {"weight"}}.get(name, set())


class Counted(MsDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __ms_dispatch__(self, func, args=(), kwargs=None):
        self.counts[func.name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self):
        """How many products ran, those of attention left out."""
        return sum(count for name, count in self.counts.items() if name in ("Dense", "MatMul", "MatMulExt"))


def backward_of(net, stage, deferred):
    """(the backward pass of a stage, its weights)."""
    weights = (*deferred.ordinary_parameters, *deferred.collectors) if deferred else tuple(net.trainable_params())
    gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)
    return gradient(stage, ParameterTuple(weights)), weights


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_no_weight_gradient_is_computed_in_the_first_part(name):
    make, batches, products, _ = MODELS[name]
    (inputs,), ran = batches(1), []
    for split in (False, True):
        net = sharded(make)
        deferred = split_weight_gradients(net) if split else None
        prepare(net, *inputs)
        stage = Interpreted(net).set_grad(True)
        result = stage(*inputs)
        backward, _ = backward_of(net, stage, deferred)
        with Counted() as first:
            backward(*inputs, ops.ones_like(result))
        ran.append(first.products)
    assert ran[0] - ran[1] == products
    pending = deferred.take()
    with Counted() as second:
        deferred.weight_gradients(pending)
    assert second.counts == {"MatMul": products}


def test_no_weight_gradient_is_in_the_graph_of_the_first_part():
    def products_of(split):
        net, x = sharded(MLP), floats(2, 3, 8)
        deferred = split_weight_gradients(net) if split else None
        result = prepare(net, x).results[0]
        backward, _ = backward_of(net, net, deferred)
        slope = floats(*result.shape)

        @ms.jit
        def step(x, slope):
            return backward(x, slope)

        folder = tempfile.mkdtemp()
        ms.set_context(save_graphs=1, save_graphs_path=folder)
        try:
            step(x, slope)
            files = [path for path in Path(folder).rglob("*.ir") if re.fullmatch(r"\d+_execute_\d+\.ir", path.name)]
            return "".join(path.read_text() for path in files).count("= PrimFunc_MatMul(")
        finally:
            ms.set_context(save_graphs=0)
            shutil.rmtree(folder)

    found = products_of(split=False), products_of(split=True)
    assert found == (5, 3), "without the last one forward, which nobody needs"


@pytest.mark.parametrize("compiled", daily([False], [False, True]), ids=["pynative", "jit"])
def test_several_shapes_are_outstanding_at_once_and_share_collectors(compiled):
    batches = [(floats(2, 3, 8),), (floats(5, 8),), (floats(1, 3, 8),), (floats(4, 8, seed=1),)]
    net = sharded(MLP)
    expected = gradients(sharded(MLP), batches, compiled, split=False)
    assert_same(gradients(net, batches, compiled, split=True, order=(2, 0, 3, 1)), expected)
    assert len(programs(net)) == 4 and len(split_weight_gradients(net).collectors) == 4


def branching():
    """Batches of odd sizes go another way."""

    def construct(self, x):
        return self.odd(x) if x.shape[0] % 2 else ops.tanh(self.even(x)) + self.even(x)

    return cell_of(construct, odd=nn.Dense(8, 4), even=nn.Dense(8, 4))


@pytest.mark.parametrize("compiled", daily([False], [False, True]), ids=["pynative", "jit"])
def test_programs_that_defer_different_weights(compiled):
    net, reference = sharded(branching), sharded(branching)
    batches = [(floats(size, 8),) for size in (3, 2, 5)]
    stage_gradients = gradients(net, batches, compiled, split=True)
    assert len(split_weight_gradients(net).collectors) == 6
    for found, whole in zip(stage_gradients, gradients(reference, batches, compiled, split=False), strict=True):
        missing = whole.keys() - found.keys()  # weights that this program doesn't have: zeros
        assert len(missing) == 1 and not any(np.any(whole.pop(name)) for name in missing)
        assert found.keys() == whole.keys()
        for name in whole:
            np.testing.assert_allclose(found[name], whole[name], 1e-5, 1e-6, err_msg=name)


@pytest.mark.parametrize("compiled", daily([False], [False, True]), ids=["pynative", "jit"])
def test_recomputed_cells(compiled):
    def make():
        net = LlamaForCausalLM(LlamaConfig(**(SIZES | {"num_hidden_layers": 2})))
        net.model.layers["0"].recompute()
        net.model.layers["1"].mlp.recompute()
        return net

    expected = gradients(sharded(make), on_tokens(), compiled, split=False)
    assert_same(gradients(sharded(make), on_tokens(), compiled, split=True), expected)


def test_inputs_without_a_gradient_and_evaluation_mode():
    """No gradient is asked for but those of collectors, of a Cell that isn't trained as yet."""
    net, x = sharded(MLP).set_train(False), floats(2, 3, 8)
    deferred = split_weight_gradients(net)
    prepare(net, x)
    ms.value_and_grad(lambda x: net(x).to_local().sum(), None, deferred.collectors)(x)
    found = {p.name: value.asnumpy() for p, value in deferred.weight_gradients(deferred.take())}
    hidden = np.maximum(x.asnumpy() @ net.up.weight.asnumpy().T + net.up.bias.asnumpy(), 0).reshape(-1, 16)
    np.testing.assert_allclose(found["down.weight"], np.tile(hidden.sum(0), (4, 1)), 1e-3)
    assert found.keys() == {"up.weight", "down.weight"}


@pytest.mark.parametrize("stage_class", [Interpreted, Compiled])
def test_a_deferred_gradient_that_is_asked_for_is_zero(stage_class):
    net, x = sharded(MLP), floats(2, 3, 8)
    split_weight_gradients(net)
    prepare(net, x)
    stage = stage_class(net).set_grad(True)
    result = stage(x)
    backward, weights = backward_of(net, stage, None)
    zeros = {p.name for p, value in zip(weights, backward(x, ops.ones_like(result))[1]) if not value.asnumpy().any()}
    assert zeros == {"net.up.weight", "net.down.weight"}


def test_nothing_else_sees_the_collectors():
    net, reference = sharded(MLP), sharded(MLP)
    split_weight_gradients(net)
    prepare(net, floats(2, 3, 8))
    assert split_weight_gradients(net).collectors
    assert [p.name for p in net.get_parameters()] == [p.name for p in reference.get_parameters()]
    assert net.parameters_dict().keys() == reference.parameters_dict().keys()


def test_programs_from_before_are_made_anew():
    net, x = sharded(MLP), floats(2, 3, 8)
    before = prepare(net, x)
    assert split_weight_gradients(net).collectors == ()
    assert prepare(net, x) is not before and len(split_weight_gradients(net).collectors) == 4


def test_what_can_not_be_split():
    with pytest.raises(TypeError, match=r"split_weight_gradients\(\) takes a Cell that shard.*not MLP: on one card"):
        split_weight_gradients(MLP())
    net = sharded(MLP)
    with pytest.raises(ValueError, match=r"Cell 'up' \(Dense\) is part of a sharded tree.*the root Cell \(MLP\)"):
        split_weight_gradients(net.up)
    net.up.eager()
    with pytest.raises(ValueError, match=r"the root Cell \(MLP\), Cell 'up' \(Dense\): runs operator by operator"):
        split_weight_gradients(net)


def test_taking_at_the_wrong_time():
    net = sharded(MLP)
    deferred = split_weight_gradients(net)
    assert deferred.take() == (), "there is no program as yet"
    prepare(net, floats(2, 3, 8))
    with pytest.raises(ValueError, match=r"root Cell \(MLP\): no gradient has arrived for later"):
        deferred.take()
    with pytest.raises(ValueError, match=r"has 4 collectors, and take\(\) got the gradients of 2"):
        deferred.take((Tensor([0.0]),) * 2)
    ms.value_and_grad(lambda x: net(x).to_local().sum(), None, deferred.collectors)(floats(2, 3, 8))
    deferred.discard()
    with pytest.raises(ValueError, match="no gradient has arrived for later"):
        deferred.take()
