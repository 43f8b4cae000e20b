"""`shard()` against one card: losses, gradients, parameters after some steps; and its collectives, counted."""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from models import TINY_LLAMA
from support.launch import on_ranks
from truth import once

from mindformers_core.communication import count_collectives, world
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.models.decoder import DecoderLayer
from mindformers_core.sharding.initialize import materialize
from mindformers_core.tensor_parallel import shard
from mindformers_core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

BATCH, LENGTH, HIDDEN = 4, 16, 32


@dataclass
class Parallel:
    """What the hooks look at."""

    sequence_parallel: bool = False
    batch_axes: tuple = ("dp",)


def tiny(**changes):
    return LlamaConfig(**{**TINY_LLAMA, "num_hidden_layers": 4, **changes})


def built(make):
    with ms.DeviceCtx("meta"):
        return make()


def arrays(tensors):
    """Copies of what tensors hold now."""
    return [tensor.asnumpy().copy() for tensor in tensors]


def batch():
    random = np.random.default_rng(3)
    tokens = random.integers(0, 64, (BATCH, LENGTH + 1)).astype(np.int32)
    tokens[0, 5:8] = 7
    labels = tokens[:, 1:].copy()
    labels[1, 3:6] = -100  # positions that don't count, more of them in one dp half than in the other
    return tokens[:, :-1], labels


def my_rows(array, mesh):
    """This rank's part of a global batch."""
    return Tensor(array[layout("dp").bind(mesh, array.ndim).local_slices(array.shape, world().rank)])


def compare(mine, whole, parameters, what, rtol=1e-5, atol=1e-6):
    """Local parts against the slices of one card's values, arrays, for all parameters."""
    assert len(mine) == len(whole) == len(parameters)
    for local, value, parameter in zip(mine, whole, parameters):
        expected = value[parameter.layout.local_slices(value.shape, world().rank)]
        np.testing.assert_allclose(local.asnumpy(), expected, rtol, atol, err_msg=f"{what} of {parameter.name}")


class MLP(nn.Cell):
    """Two linear layers."""

    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, 64, has_bias=True)
        self.down = RowParallelLinear(64, HIDDEN, has_bias=True)

    def construct(self, x):
        return ops.mean(ops.square(self.down(ops.gelu(self.up(x)))))


class Layers(nn.Cell):
    """Decoder layers, and nothing else."""

    def __init__(self, config, number):
        super().__init__()
        self.layers = nn.CellList([DecoderLayer(config, place) for place in range(1, number + 1)])
        self.head_dim = config.head_dim

    def shard(self, config=None):
        """As `LlamaForCausalLM` does for its hidden states."""
        return {"x": layout(..., "tp", None) if config.sequence_parallel else None}, None, None

    def construct(self, x, cosines, sines, first, last, places):
        for layer in self.layers:
            x = layer(x, cosines, sines, first, last, places, None, False)
        return x


def layers_input():
    """For the layers: hidden states, the weights of a sum of results, and the other inputs, tensors."""
    random = np.random.default_rng(0)
    x, weights = random.normal(size=(2, BATCH, LENGTH, HIDDEN)).astype(np.float32)
    tables = [Tensor(random.normal(size=(LENGTH, 1, tiny().head_dim)).astype(np.float32)) for _ in range(2)]
    places = np.arange(LENGTH, dtype=np.int32)[None]  # all see all
    return x, weights, (*tables, *map(Tensor, (places * 0, places * 0 + LENGTH, places)))


@once
def layers_alone(number):
    """The weighted sum of the layers' results on one card; its gradients of the input, and of all parameters."""
    single, (x, weights, others) = built(lambda: Layers(tiny(), number)), layers_input()
    materialize(single, seed=5)
    total, (slope, gradients) = ms.value_and_grad(
        lambda x: ops.mul(single(x, *others), Tensor(weights)).sum(), 0, single.trainable_params()
    )(Tensor(x))
    return float(total), slope.asnumpy(), arrays(gradients)


def sharded_layers(sequence_parallel, number):
    """The layers cut over two ranks, and the layout of their input."""
    mesh, cell = init_device_mesh((2,), ("tp",)), built(lambda: Layers(tiny(), number))
    shard(cell, mesh, Parallel(sequence_parallel), seed=5)
    return cell, layout(None, "tp" if sequence_parallel else None, None).bind(mesh)


def run_layers(sequence_parallel):
    """Counts of a forward and of a forward and backward pass, with the outputs compared to one card's."""
    (parallel, part), (x, weights, others) = sharded_layers(sequence_parallel, 4), layers_input()
    mine = Tensor(x[part.local_slices(x.shape, world().rank)])
    with count_collectives() as forward:
        parallel(mine, *others)
    with count_collectives() as both:
        output, (my_x, my_gradients) = ms.value_and_grad(
            lambda x: ops.mul(parallel(x, *others), Tensor(weights)).sum().redistribute(layout()),
            0,
            parallel.trainable_params(),
        )(mine)
    total, slope, gradients = layers_alone(4)
    np.testing.assert_allclose(float(output), total, 1e-5, 1e-5)
    np.testing.assert_allclose(my_x.asnumpy(), slope[part.local_slices(x.shape, world().rank)], 1e-4, 1e-5)
    compare(my_gradients, gradients, parallel.trainable_params(), "gradient", 1e-4, 1e-5)
    return dict(forward), dict(both)


@on_ranks(2)
def case_four_layers_cost_sixteen_all_reduces():
    """Two collectives a layer each way (Megatron-LM), whole hidden states each; nothing else is communicated."""
    forward, both = run_layers(sequence_parallel=False)
    hidden_bytes = BATCH * LENGTH * HIDDEN * 4
    on_wire = hidden_bytes  # a ring of 2: 2 (n - 1) / n of the whole
    assert forward == {("all_reduce", ("tp",)): (8, 8 * on_wire)}
    assert both == {("all_reduce", ("tp",)): (16, 16 * on_wire)}


@on_ranks(2)
def case_sequence_parallel_gathers_and_scatters():
    """In the place of every all-reduce an all-gather on one side and a reduce-scatter on the other, each half of it."""
    forward, both = run_layers(sequence_parallel=True)
    on_wire = BATCH * LENGTH * HIDDEN * 4 // 2
    assert forward == {("all_gather", ("tp",)): (8, 8 * on_wire), ("reduce_scatter", ("tp",)): (8, 8 * on_wire)}
    norms = both.pop(("all_reduce", ("tp",)))  # weights of the norms: their gradients, and the test's own sum
    assert norms == (9, 8 * HIDDEN * 4 + 4)
    assert both == {("all_gather", ("tp",)): (16, 16 * on_wire), ("reduce_scatter", ("tp",)): (16, 16 * on_wire)}


@once
def llama_alone(config, steps):
    """On one card the initial values, the loss and gradients of each step of AdamW, and the values at the end."""
    net, (ids, labels), rows = built(lambda: LlamaForCausalLM(config)), batch(), []
    materialize(net, seed=11)
    parameters = net.trainable_params()
    first, optimizer = arrays(parameters), nn.AdamWeightDecay(parameters, 1e-3)
    for _ in range(steps):
        loss, gradients = ms.value_and_grad(net, None, parameters)(Tensor(ids), Tensor(labels))
        rows.append((float(loss), arrays(gradients)))
        optimizer(gradients)
    return first, rows, arrays(parameters)


def check_llama(mesh, config, parallel_config, steps=2):
    """Loss, gradients of all parameters, and parameters after some steps of AdamW, all as on one card."""
    (first, rows, last), (ids, labels) = llama_alone(config, steps), batch()
    net = shard(built(lambda: LlamaForCausalLM(config)), mesh, parallel_config, seed=11)
    parameters = net.trainable_params()
    compare(parameters, first, parameters, "initial value", 0, 0)
    optimizer = nn.AdamWeightDecay(parameters, 1e-3)
    for loss, gradients in rows:
        my_loss, mine = ms.value_and_grad(net, None, parameters)(my_rows(ids, mesh), my_rows(labels, mesh))
        np.testing.assert_allclose(float(my_loss), loss, 1e-5)
        compare(mine, gradients, parameters, "gradient", 1e-4, 2e-6)
        optimizer(mine)
    compare(parameters, last, parameters, "value", 1e-4, 2e-5)


@on_ranks(nightly=(4,))
def case_llama_on_dp_2_tp_2():
    """Grouped-query attention, an untied head, labels that don't count. Daily: `case_training`."""
    check_llama(init_device_mesh((2, 2), ("dp", "tp")), tiny(), Parallel())


@on_ranks(4)
def case_llama_sequence_parallel_tied():
    """Sequence parallel, and an embedding that is the head, too."""
    config = tiny(num_hidden_layers=2, tie_word_embeddings=True)
    check_llama(init_device_mesh((2, 2), ("dp", "tp")), config, Parallel(True))


@on_ranks(nightly=(4,))
def case_llama_on_other_meshes():
    """Pure data parallelism and pure tensor parallelism over 4 ranks, axes of size 1 among them, tp before dp."""
    check_llama(init_device_mesh((1, 4, 1), ("pp", "dp", "tp")), tiny(num_hidden_layers=2), Parallel(), 1)
    check_llama(
        init_device_mesh((4, 1), ("tp", "dp")), tiny(num_hidden_layers=2, num_key_value_heads=4), Parallel(True), 1
    )
    check_llama(init_device_mesh((2, 2), ("tp", "dp")), tiny(num_hidden_layers=2), Parallel(), 1)
