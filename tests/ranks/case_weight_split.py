"""Backward passes in two parts on a mesh: local gradients are those of whole ones, and each part sends its own."""

import mindspore as ms
import numpy as np
from case_shard import MLP, Parallel, batch, my_rows, tiny
from mindspore import Tensor, nn, ops
from support.launch import on_ranks
from support.small_cells import cell_of
from support.split_backward import Interpreted, assert_same, filled, gradients

from mindformers_core.communication import count_collectives
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaForCausalLM
from mindformers_core.passes.weight_split import split_weight_gradients
from mindformers_core.tensor_parallel import prepare, shard


def micro_batches(mesh, count=2):
    """This rank's rows of batches that differ."""
    parts = [np.roll(part, number, axis=1) for number in range(count) for part in batch()]
    parts = [my_rows(part, mesh) if "dp" in mesh.axis_names else Tensor(part) for part in parts]
    return [tuple(parts[start : start + 2]) for start in range(0, 2 * count, 2)]


def llama(mesh, tied, sequence_parallel, layers=1):
    """The sharded model; its values are the same at every call, on all ranks."""
    axes = ("dp",) if "dp" in mesh.axis_names else None
    net = filled(LlamaForCausalLM(tiny(num_hidden_layers=layers, tie_word_embeddings=tied))).set_train()
    if "tp" not in mesh.axis_names:  # the hooks name an axis tp
        mesh = init_device_mesh((*mesh.shape, 1), (*mesh.axis_names, "tp"))
    return shard(net, mesh, Parallel(sequence_parallel, axes))


def check_made(make, data, compiled=True):
    """The split backward pass of what `make()` gives, in PyNative and, by default, compiled."""
    expected = gradients(make(), data, compiled=False, split=False)
    assert_same(gradients(make(), data, compiled=False, split=True, order=(0, 1)), expected)
    if not compiled:
        return
    in_graph = gradients(make(), data, compiled=True, split=False)
    assert_same(in_graph, expected, 1e-5)
    assert_same(gradients(make(), data, compiled=True, split=True, order=(0, 1)), in_graph)


def check(shape, axes, tied, sequence_parallel=False, compiled=True):
    """Llama with or without tied embeddings."""
    mesh = init_device_mesh(shape, axes)
    check_made(lambda: llama(mesh, tied, sequence_parallel), micro_batches(mesh), compiled)


@on_ranks(nightly=(2,))
def case_more_split_backward():
    """Weights cut over the ranks, also compiled; with sequence parallelism; gathered ones, compiled."""
    mesh = init_device_mesh((2,), ("dp",))
    check_made(lambda: gathered(mesh), rows_of_gathered(mesh))
    check((2,), ("dp",), tied=False, compiled=False)
    check((2,), ("tp",), tied=True)
    check((2,), ("tp",), tied=False, sequence_parallel=True, compiled=False)


def blocks():
    """Two blocks, which share a program, each of two layers with one weight."""

    def block(self, x):
        return ops.tanh(self.second(ops.tanh(self.first(x))))

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return ops.sum(x)

    made = [cell_of(block, **{name: nn.Dense(8, 8, has_bias=False) for name in ("first", "second")}) for _ in range(2)]
    for each in made:
        each.second.weight = each.first.weight
    return cell_of(construct, blocks=nn.CellList(made))


@on_ranks(2)
def case_split_backward_on_dp_2():
    """Gradients of weights are summed over the ranks, in the second part."""
    check((2,), ("dp",), tied=True, compiled=False)
    mesh = init_device_mesh((2,), ("dp",))
    plan = {"": {"input": (layout("dp"),)}}
    data = [(my_rows(np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32), mesh),) for seed in range(2)]
    check_made(lambda: shard(filled(blocks()), mesh, plan=plan), data)


@on_ranks(nightly=(4,))
def case_split_backward_on_dp_2_tp_2():
    """Both, with sequence parallelism, and tied embeddings."""
    check((2, 2), ("dp", "tp"), tied=True, sequence_parallel=True, compiled=False)


def gathered(mesh):
    """Weights that are gathered over `dp` where they are used, as fully sharded data parallelism has it."""

    def construct(self, x):
        return ops.sum(ops.square(self.down(ops.tanh(self.up(x)))))

    rows = {"input": (layout("dp"),), "weight": {"weight": layout("dp")}, "output": layout("dp")}
    net = filled(cell_of(construct, up=nn.Dense(8, 16), down=nn.Dense(16, 4))).set_train()
    return shard(net, mesh, plan={"": {"input": (layout("dp"),)}, "up": rows, "down": rows})


def rows_of_gathered(mesh):
    """Two micro-batches of this rank."""
    random = np.random.default_rng(1)
    return [(my_rows(random.normal(size=(4, 8)).astype(np.float32), mesh),) for _ in range(2)]


@on_ranks(2)
def case_split_backward_of_gathered_weights():
    """The gradient goes back through the gather: a reduce-scatter of the second part."""
    mesh = init_device_mesh((2,), ("dp",))
    data = rows_of_gathered(mesh)
    check_made(lambda: gathered(mesh), data, compiled=False)
    with count_collectives() as whole:
        net = gathered(mesh)
        ms.value_and_grad(Interpreted(net), None, net.trainable_params())(*data[0])
    net = gathered(mesh)
    deferred = split_weight_gradients(net)
    prepare(net, *data[0])
    weights = (*deferred.ordinary_parameters, *deferred.collectors)
    with count_collectives() as first:
        ms.value_and_grad(Interpreted(net), None, weights)(*data[0])
    pending = deferred.take()
    with count_collectives() as second:
        deferred.weight_gradients(pending)
    assert {key: count for key, (count, _) in second.items()} == {("reduce_scatter", ("dp",)): 1}  # that of down.weight
    for key, (count, _) in whole.items():
        assert count == first.get(key, (0, 0))[0] + second.get(key, (0, 0))[0], key


@on_ranks(2)
def case_sums_over_dp_wait_for_the_second_part():
    """Only those of embedding and norms are in the first part."""
    mesh = init_device_mesh((2, 1), ("dp", "tp"))
    (inputs,) = micro_batches(mesh, 1)

    def sums(split):
        net = llama(mesh, False, False)
        deferred = split_weight_gradients(net) if split else None
        prepare(net, *inputs)
        weights = (*deferred.ordinary_parameters, *deferred.collectors) if split else net.trainable_params()
        with count_collectives() as first:
            ms.value_and_grad(Interpreted(net), None, weights)(*inputs)
        second = {}
        if split:
            pending = deferred.take()
            with count_collectives() as second:
                deferred.weight_gradients(pending)
        return [counts.get(("all_reduce", ("dp",)), (0, 0))[0] for counts in (first, second)]

    (whole, _), (first, second) = sums(False), sums(True)
    assert whole - first == second == 8, (whole, first, second)


@on_ranks(2)
def case_split_backward_with_biases():
    """Biases of column- and row-parallel layers keep their ordinary gradient."""
    mesh = init_device_mesh((2,), ("tp",))
    data = [(Tensor(np.random.default_rng(seed).normal(size=(8, 32)).astype(np.float32)),) for seed in range(2)]
    check_made(lambda: shard(filled(MLP()), mesh), data, compiled=False)
