"""Functions that are compiled each by itself: which they are, what they share, and that old ones go."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.nightly import daily
from support.recomputed_models import INPUTS, llama, sharded, without
from support.small_cells import cell_of

from mindformers_core.mesh import init_device_mesh
from mindformers_core.recompute import recompute
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import jit, programs, shard
from mindformers_core.zero import hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")


def step(**settings):
    net = recompute(sharded(llama), **settings)
    gradient_of = value_and_grad(hsdp(net), compiled=True)
    loss, gradients = gradient_of(*INPUTS[llama]())
    return net, gradient_of, [loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]


def compiled_by(gradient_of):
    return sorted(name for name, *_ in gradient_of.function._cells_compiled._graphs)


def test_alike_layers_share_a_compiled_function():
    """It takes their weights as arguments; MindSpore keeps memory for every compiled function that there is."""

    def layer(self, x):
        return ops.tanh(self.dense(x)) + x

    layers = [cell_of(layer, dense=nn.Dense(4, 4)) for _ in range(4)]
    net = recompute(on_one_rank(cell_of(in_turn, layers=nn.CellList(layers))), full=True)
    gradient_of = value_and_grad(hsdp(net), compiled=True)
    gradient_of(Tensor(np.ones((2, 4), np.float32)))  # the first layer's input has no gradient
    assert compiled_by(gradient_of) == ["parallel_in_turn_part1", "parallel_layer", "parallel_layer_2"]
    source = programs(net)[-1].source.text
    head = source.partition("def parallel_layer_2(")[2].partition(":")[0]
    assert head.endswith(", passed_weights)") and "passed_weights=passed_weights[0:2], program=" in source


@pytest.mark.nightly  # daily on two ranks: `case_recompute`
@pytest.mark.parametrize("pattern", ["*.mlp", ["layers.0.self_attn", "*.down_proj"]])
def test_what_is_around_recomputed_cells_is_compiled_in_parts(pattern):
    """With the bits of the whole as one function, and in as few functions as can be: two for each layer, that of the
    recomputed Cell and that of what follows; alike layers share them."""
    _, gradient_of, found = step(select=pattern)
    assert all(map(np.array_equal, found, without(llama, compiled=True)))  # of which the first step
    if pattern == "*.mlp":
        assert compiled_by(gradient_of) == [
            "parallel_decoder_layer_part1", "parallel_decoder_part1", "parallel_decoder_part2", "parallel_gated_mlp",
            "parallel_llama_for_causal_lm_part1",
        ]  # fmt: skip


class Scaled(nn.Cell):
    """An identity with a gradient of its own making."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def construct(self, x):
        return ops.sin(x)

    def bprop(self, x, out, dout):
        return (self.factor * dout,)


def in_turn(self, x):
    for layer in self.layers:
        x = layer(x)
    return x.square().mean()


def scalings():
    """Three layers, each with such a Cell and one that may be recomputed, alike but for what only a gradient reads."""

    def scaling(self, x):
        return self.dense(self.scaled(ops.tanh(x))) + x

    layers = [cell_of(scaling, scaled=Scaled(factor), dense=nn.Dense(4, 4)) for factor in (2.0, 3.0, 5.0)]
    return on_one_rank(cell_of(in_turn, layers=nn.CellList(layers)))


def on_one_rank(net):
    return shard(net.set_train(), init_device_mesh((1,), ("dp",)))


@pytest.mark.parametrize("settings", daily([{"select": "*.dense"}], [{"full": True}, {"select": "*.dense"}]))
def test_cells_with_a_gradient_of_their_own_share_no_function(settings):
    """What it reads isn't known from their forward pass."""
    x, found = Tensor(np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)), []
    for given in ({}, settings):
        ms.set_seed(1)
        net = recompute(scalings(), **given)
        loss, gradients = value_and_grad(hsdp(net), compiled=True)(x)
        found.append([loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)])
    for mine, whole in zip(*found, strict=True):
        np.testing.assert_allclose(mine, whole, 1e-5, 1e-6)


def stack():
    """Two Cells that take and give tensors in all kinds of structures."""

    def structured(self, pair, by_name, *rest, scale=None, kind="none", mask=0):
        x, (y, _) = pair
        assert kind == "a kind" and mask is None and by_name["text"] == "after a tensor"
        x = ops.tanh(ops.matmul(x, self.weight)) + by_name["z"] * rest[0]
        return {"pair": (x * scale, [y, None]), "number": 3}

    def stack(self, x):
        y = ops.tanh(x)
        for layer in self.layers:
            named = {"z": x * 2, "none": None, "text": "after a tensor"}
            found = layer((x, (y, None)), named, y, scale=ops.sin(x), kind="a kind", mask=None)
            x, (y, _) = found["pair"]
        return (x * y).mean()

    values = [np.random.default_rng(seed).normal(size=(8, 8)).astype(np.float32) for seed in range(2)]
    weights = [Parameter(Tensor(value), name="weight") for value in values]
    return on_one_rank(cell_of(stack, layers=nn.CellList([cell_of(structured, weight=each) for each in weights])))


def structured_steps(compiled, **settings):
    net = recompute(stack(), **settings)
    gradient_of, found = value_and_grad(hsdp(net), compiled), []
    for seed in range(2):
        x = Tensor(np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32))
        loss, gradients = gradient_of(x)
        found += [loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]
    return found


@pytest.mark.parametrize("settings", daily([{"full": "1"}], [{"full": True}, {"full": "1"}]))
def test_tensors_in_structures_have_gradients(settings):
    """MindSpore gives those in the tuples and dicts of a compiled function none, or wrong ones, at a second step."""
    whole_steps, found = structured_steps(False), structured_steps(True, **settings)
    for mine, whole in zip(found, whole_steps, strict=True):
        np.testing.assert_allclose(mine, whole, 1e-5, 1e-6)


def watched():
    """A Cell with one that gives no tensor, and a number that a program has written in, for a mesh of one."""

    def silent(self, x):
        ops.sin(x)

    def watched(self, x):
        self.silent(x * 2)
        return (self.dense(ops.tanh(x)) * self.factor).square().mean()

    return on_one_rank(cell_of(watched, silent=cell_of(silent), dense=nn.Dense(4, 4), factor=1.0))


def test_a_recomputed_cell_without_results():
    """Is part of what is around it."""
    x = Tensor(np.ones((2, 4), np.float32))
    net = recompute(watched(), select=["silent", "dense"])
    gradient_of = value_and_grad(hsdp(net), compiled=True)
    assert np.isfinite(gradient_of(x)[0].asnumpy())
    assert compiled_by(gradient_of) == ["parallel_dense", "parallel_watched_part1", "parallel_watched_part2"]


def test_compiled_functions_go_with_their_programs():
    x = Tensor(np.ones((2, 4), np.float32))
    net = recompute(watched(), select="dense")
    gradient_of = value_and_grad(hsdp(net), compiled=True)
    losses = []
    for factor in (1.0, 2.0):
        net.factor = factor
        tree_of(net).forget_programs()
        losses.append(float(gradient_of(x)[0]) / factor**2)
        assert len(compiled_by(gradient_of)) == 3 == len(gradient_of.function._cells_compiled._calls)
    np.testing.assert_allclose(losses, losses[0], 1e-6)


def test_a_pattern_that_matches_nothing_out_of_training_mode():
    net = recompute(sharded(llama).set_train(False), select="layers.*.nothing")
    with pytest.raises(ValueError, match="'layers.\\*.nothing' matches no Cell or operator"):
        value_and_grad(hsdp(net), compiled=True)(*INPUTS[llama]())


def test_pynative_gradients_of_a_compiled_function_recompute_nothing():
    """So they are an error."""
    net = recompute(sharded(llama), full=True)

    def forward(*inputs):
        return net(*inputs)

    with pytest.raises(ValueError, match=r"is recomputed, but PyNative differentiates a compiled function"):
        ms.value_and_grad(jit(forward), None, net.trainable_params())(*INPUTS[llama]())
