"""Models written without any thought of parallelism: one card = eager = generated program in PyNative = under jit.

Losses, results and gradients of all parameters; and no engine communicates more than the one before it.
"""

import mindspore as ms
import numpy as np
from case_shard import BATCH, HIDDEN, LENGTH, compare, layers_alone, layers_input, sharded_layers
from engines import check_engines, check_in_graph, check_in_pynative
from graph_collectives import count_in_graph
from mindspore import Tensor, ops
from models import EXAMPLES, language, plain, vision
from models.authors import AUTHORS
from one_card import part_of
from support.launch import on_ranks

from mindformers_core.communication import world
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import jit

SMALL = {**plain.EXAMPLES, **vision.EXAMPLES}
HOOKED = ("llama",)  # their hooks speak of an axis tp


def check_all(names, shape, axes, in_graph=()):
    """All models on one mesh."""
    mesh = init_device_mesh(shape, axes)
    for name in names:
        check_engines(name, mesh, name in in_graph)


@on_ranks(nightly=(2, 4))
def case_small_models_on_tp():
    """Weights cut over all ranks; every fourth one is compiled, too."""
    check_all(SMALL, (world().size,), ("tp",), in_graph=tuple(SMALL)[::4])


@on_ranks(nightly=(2, 4))
def case_language_models_on_tp():
    """Weights, heads and words cut over all ranks; one is compiled, too."""
    check_all(language.EXAMPLES, (world().size,), ("tp",), in_graph=("llama",))


@on_ranks(nightly=(4,))
def case_small_models_on_dp_2_tp_2():
    """The batch cut over one axis, weights over the other; one is compiled, too."""
    check_all(SMALL, (2, 2), ("dp", "tp"), in_graph=("mlp",))


@on_ranks(nightly=(4,))
def case_language_models_on_dp_2_tp_2():
    """Tied embeddings, a batch that isn't the first dim, also in graphs. Llama's training is in `case_training`."""
    names = "tied language model", "batch second"
    check_all(names, (2, 2), ("dp", "tp"), in_graph=names)


@on_ranks(nightly=(2, 4))
def case_models_on_dp():
    """Only the batch is cut."""
    check_all([name for name in EXAMPLES if name not in HOOKED], (world().size,), ("dp",))


def check_authors(names, in_graph):
    """The batch cut over one axis, weights over the other; the programs of these models are compiled, too."""
    mesh = init_device_mesh((world().size // 2, 2), ("dp", "tp"))
    for name in names:
        check_in_pynative(name, mesh, "eager")
        if name in in_graph:
            _, made = check_in_pynative(name, mesh, "generated")
            check_in_graph(name, mesh, *made)


@on_ranks(4)
def case_models_of_authors():
    """One, eager; generated programs of all, of simulated ranks, are in `test_author_models`."""
    check_authors(("gshard",), ())


@on_ranks(nightly=(4,))
def case_every_model_of_authors_compiled():
    """The first half, as a case has a time limit."""
    check_authors(tuple(AUTHORS)[::2], AUTHORS)


@on_ranks(nightly=(4,))
def case_every_other_model_of_authors_compiled():
    """The second half."""
    check_authors(tuple(AUTHORS)[1::2], AUTHORS)


@on_ranks(nightly=(4,))
def case_models_on_cp_2_tp_2():
    """Sequences are cut, of the last one two. Llama's daily: `case_eager_training_equals_one_rank`."""
    check_all(("llama", "encoder and decoder"), (2, 2), ("cp", "tp"))


@on_ranks(nightly=(2,))
def case_llama_on_cp_2():
    """A ring of chunks; gradients are taken within the compiled step, too."""
    check_engines("llama", init_device_mesh((2, 1), ("cp", "tp")), True)


@on_ranks(nightly=(2,))
def case_documents_in_zigzag_on_cp_2():
    """Likewise a ring, where places that are data hide some of what it multiplies."""
    check_engines("llama of documents", init_device_mesh((2, 1), ("cp", "tp")), True)


@on_ranks(nightly=(8,))
def case_models_on_dp_2_cp_2_tp_2():
    """Batch, sequences and weights cut; one is compiled, too."""
    check_all(("llama", "experts", "mlp"), (2, 2, 2), ("dp", "cp", "tp"), in_graph=("mlp",))


@on_ranks(nightly=(8,))
def case_models_on_dp_2_tp_2_tp_2():
    """Weights cut over two axes at once; also compiled."""
    check_all(("mlp",), (2, 2, 2), ("dp", "tp2", "tp"), in_graph=("mlp",))


def compiled_layers(sequence_parallel):
    """What a compiled forward and backward pass of two decoder layers communicates."""
    (cell, part), (x, weights, others) = sharded_layers(sequence_parallel, 2), layers_input()

    def forward(x, weights, *others):
        return ops.mul(cell(x, *others), weights).sum()

    step = jit(ms.value_and_grad(forward, 0, cell.trainable_params()))
    with count_in_graph(part.mesh) as counts:
        _, (slope, mine) = step(Tensor(part_of(x, part)), Tensor(part_of(weights, part)), *others)
    _, expected, gradients = layers_alone(2)
    np.testing.assert_allclose(slope.asnumpy(), part_of(expected, part), 1e-4, 1e-5)
    compare(mine, gradients, cell.trainable_params(), "gradient", 1e-4, 1e-5)
    return counts


@on_ranks(nightly=(2,))
def case_two_compiled_layers_cost_eight_all_reduces():
    """As many as in PyNative, daily (`case_shard`): in sequence parallel gathers and scatters in their place."""
    whole = BATCH * LENGTH * HIDDEN * 4
    counts = compiled_layers(sequence_parallel=True)
    assert counts.pop(("all_reduce", ("tp",))) == (4, 4 * HIDDEN * 4)  # gradients of the norms' weights
    assert counts == {(kind, ("tp",)): (8, 8 * whole // 2) for kind in ("all_gather", "reduce_scatter")}
