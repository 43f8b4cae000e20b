"""Cells that are compiled each by itself: which they are, what they share, and that their memory is let go of."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from test_recompute_gradients import INPUTS, llama, sharded

from mindformers_core.mesh import init_device_mesh
from mindformers_core.pipeline.compiled_cells import cells_apart
from mindformers_core.recompute import recompute
from mindformers_core.tensor_parallel import jit, programs, shard
from mindformers_core.zero import hsdp, value_and_grad


class Layer(nn.Cell):
    """A Cell with two others."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = nn.Dense(2, 2), nn.Dense(2, 2)


class Model(nn.Cell):
    """Two layers, between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 2), nn.Dense(2, 4)
        self.layers = nn.CellList([Layer(), Layer()])


class Outer(nn.Cell):
    """A model in a model."""

    def __init__(self):
        super().__init__()
        self.model, self.loss = Model(), nn.MSELoss()


LAYERS = ["model.layers.0", "model.layers.1"]
REST = ["model.embedding", "model.head", "loss"]
UNITS = [*LAYERS, "model.embedding", "model.head"]


@pytest.mark.parametrize(
    "units, recomputed, again, once",
    [
        ([], LAYERS, LAYERS, REST),
        ([], LAYERS[:1], LAYERS[:1], [LAYERS[1], *REST]),
        ([], ["model"], ["model"], ["loss"]),
        ([], [""], ["model", "loss"], []),
        ([], [f"{LAYERS[1]}.mlp"], [f"{LAYERS[1]}.mlp"], [LAYERS[0], f"{LAYERS[1]}.attention", *REST]),
        (UNITS, [], [], UNITS),
        (UNITS, LAYERS, LAYERS, UNITS[2:]),
        (UNITS, ["model"], UNITS, []),
        (UNITS, [f"{LAYERS[0]}.mlp"], [f"{LAYERS[0]}.mlp"], [f"{LAYERS[0]}.attention", *UNITS[1:]]),
    ],
)
def test_which_cells_are_compiled_apart(units, recomputed, again, once):
    """What holds a recomputed Cell isn't compiled; weights that come and go are in place for one unit at a time."""
    assert cells_apart(Outer(), units, recomputed) == dict.fromkeys(again, True) | dict.fromkeys(once, False)


def step(**settings):
    net = recompute(sharded(llama), **settings)
    gradient_of = value_and_grad(hsdp(net), compiled=True)
    loss, gradients = gradient_of(*INPUTS[llama]())
    return net, gradient_of, [loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]


@pytest.mark.usefixtures("one_rank")
def test_alike_layers_share_a_compiled_function():
    """It takes their weights as arguments; MindSpore keeps memory for every compiled function that there is."""
    _, _, expected = step()
    net, gradient_of, found = step(full=True)
    assert all(map(np.array_equal, found, expected))
    compiled = [key[1] or key[0] for key in gradient_of._function._cells_compiled._graphs]
    layer = "parallel_llama_decoder_layer"
    assert sorted(compiled) == ["lm_head", "loss", "model.embed_tokens", "model.norm", layer]
    source = programs(net)[-1].source.text
    head = source.partition(f"def {layer}(")[2].partition(":")[0]
    assert head.endswith(", passed_weights)") and "passed_weights=passed_weights[1:5], program=" in source


class Structured(nn.Cell):
    """Takes and gives tensors in all kinds of structures."""

    def __init__(self, seed):
        super().__init__()
        values = np.random.default_rng(seed).normal(size=(8, 8)).astype(np.float32)
        self.weight = Parameter(Tensor(values), name="weight")

    def construct(self, pair, by_name, *rest, scale=None):
        x, (y, _) = pair
        x = ops.tanh(ops.matmul(x, self.weight)) + by_name["z"] * rest[0]
        return {"pair": (x * scale, [y, None]), "number": 3}


class Stack(nn.Cell):
    """Two of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Structured(0), Structured(1)])

    def construct(self, x):
        y = ops.tanh(x)
        for layer in self.layers:
            found = layer((x, (y, None)), {"z": x * 2}, y, scale=ops.sin(x))
            x, (y, _) = found["pair"]
        return (x * y).mean()


def structured_steps(compiled, **settings):
    net = recompute(shard(Stack().set_train(), init_device_mesh((1,), ("dp",))), **settings)
    gradient_of, found = value_and_grad(hsdp(net), compiled), []
    for seed in range(2):
        x = Tensor(np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32))
        loss, gradients = gradient_of(x)
        found += [loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]
    return found


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("settings", [{"full": True}, {"full": "1"}])
def test_tensors_in_structures_have_gradients(settings):
    """MindSpore gives those in the tuples and dicts of a compiled function none, or wrong ones, at a second step."""
    expected, found = structured_steps(False), structured_steps(True, **settings)
    for mine, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, whole, 1e-5, 1e-6)


@pytest.mark.usefixtures("one_rank")
def test_a_pattern_that_matches_nothing_out_of_training_mode():
    net = recompute(sharded(llama).set_train(False), select="layers.*.nothing")
    with pytest.raises(ValueError, match="'layers.\\*.nothing' matches no Cell or operator"):
        value_and_grad(hsdp(net), compiled=True)(*INPUTS[llama]())


@pytest.mark.usefixtures("one_rank")
def test_pynative_gradients_of_a_compiled_function_recompute_nothing():
    """So they are an error."""
    net = recompute(sharded(llama), full=True)

    def forward(*inputs):
        return net(*inputs)

    with pytest.raises(ValueError, match=r"is recomputed, but PyNative differentiates a compiled function"):
        ms.value_and_grad(jit(forward), None, net.trainable_params())(*INPUTS[llama]())
