"""Models written without any thought of parallelism: one card = eager = generated program in PyNative = under jit.

Losses, results and gradients of all parameters; and no engine communicates more than the one before it.
"""

import mindspore as ms
import numpy as np
from case_shard import BATCH, HIDDEN, LENGTH, Layers, Parallel, built, tiny
from engines import check_engines
from graph_collectives import count_in_graph
from launch import on_ranks
from mindspore import Tensor, ops
from models import EXAMPLES, language, plain, vision
from one_card import part_of

from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import jit, shard
from mindformers_core.tensor_parallel.initialize import materialize

SMALL = {**plain.EXAMPLES, **vision.EXAMPLES}
HOOKED = ("llama",)  # their hooks speak of an axis tp


def check_all(names, shape, axes, in_graph=()):
    """All models on one mesh."""
    mesh = init_device_mesh(shape, axes)
    for name in names:
        check_engines(name, mesh, name in in_graph)


@on_ranks(4)
def case_small_models_on_tp_4():
    """Weights cut over all ranks; one is compiled, too."""
    check_all(SMALL, (4,), ("tp",), in_graph=("mlp",))


@on_ranks(4)
def case_language_models_on_tp_4():
    """Weights, heads and words cut over all ranks; one is compiled, too."""
    check_all(language.EXAMPLES, (4,), ("tp",), in_graph=("llama",))


@on_ranks(4)
def case_small_models_on_dp_2_tp_2():
    """The batch cut over one axis, weights over the other; every fourth one is compiled, too."""
    check_all(SMALL, (2, 2), ("dp", "tp"), in_graph=tuple(SMALL)[::4])


@on_ranks(4)
def case_language_models_on_dp_2_tp_2():
    """The batch cut over one axis, weights over the other; one is compiled, too."""
    check_all(language.EXAMPLES, (2, 2), ("dp", "tp"), in_graph=("tied language model",))


@on_ranks(4)
def case_models_on_dp_4_and_on_cp_2_tp_2():
    """Only the batch is cut; and sequences are."""
    check_all([name for name in EXAMPLES if name not in HOOKED], (4,), ("dp",))
    check_all(language.EXAMPLES, (2, 2), ("cp", "tp"))


@on_ranks(8)
def case_models_on_dp_2_cp_2_tp_2():
    """Batch, sequences and weights cut; one is compiled, too."""
    check_all(("llama", "experts", "mlp"), (2, 2, 2), ("dp", "cp", "tp"), in_graph=("mlp",))


@on_ranks(8)
def case_models_on_dp_2_tp_2_tp_2():
    """Weights cut over two axes at once; also compiled."""
    check_all(("mlp",), (2, 2, 2), ("dp", "tp2", "tp"), in_graph=("mlp",))


def compiled_layers(sequence_parallel):
    """What a compiled forward and backward pass of four decoder layers communicates."""
    mesh, config = init_device_mesh((2,), ("tp",)), tiny()
    single, parallel = built(lambda: Layers(config)), built(lambda: Layers(config))
    materialize(single, seed=5)
    shard(parallel, mesh, Parallel(sequence_parallel), seed=5)
    random = np.random.default_rng(0)
    x, slopes = random.normal(size=(2, BATCH, LENGTH, HIDDEN)).astype(np.float32)
    tables = [Tensor(random.normal(size=(LENGTH, 1, config.head_dim)).astype(np.float32)) for _ in range(2)]
    others = (*tables, Tensor(np.zeros((LENGTH, LENGTH), np.float32)))
    part = layout(None, "tp" if sequence_parallel else None, None).bind(mesh)

    def step_of(cell):
        def forward(x, slopes, *others):
            return ops.mul(cell(x, *others), slopes).sum()

        return ms.value_and_grad(forward, 0, cell.trainable_params())

    with count_in_graph(mesh) as counts:
        _, (slope, mine) = jit(step_of(parallel))(Tensor(part_of(x, part)), Tensor(part_of(slopes, part)), *others)
    _, (expected, gradients) = step_of(single)(Tensor(x), Tensor(slopes), *others)
    np.testing.assert_allclose(slope.asnumpy(), part_of(expected.asnumpy(), part), 1e-4, 1e-5)
    for parameter, found, whole in zip(parallel.trainable_params(), mine, gradients, strict=True):
        whole = part_of(whole.asnumpy(), parameter.layout)
        np.testing.assert_allclose(found.asnumpy(), whole, 1e-4, 1e-5, err_msg=parameter.name)
    return counts


@on_ranks(2)
def case_four_compiled_layers_cost_sixteen_all_reduces():
    """As many as in PyNative (`case_shard`), and in sequence parallel gathers and scatters in their place."""
    whole = BATCH * LENGTH * HIDDEN * 4
    assert compiled_layers(sequence_parallel=False) == {("all_reduce", ("tp",)): (16, 16 * whole)}
    counts = compiled_layers(sequence_parallel=True)
    assert counts.pop(("all_reduce", ("tp",))) == (8, 8 * HIDDEN * 4)  # gradients of the norms' weights
    assert counts == {(kind, ("tp",)): (16, 16 * whole // 2) for kind in ("all_gather", "reduce_scatter")}
