"""Sharded pipeline stages: how hidden states lie between them, and that the boundary sends nothing."""

from itertools import product
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from support.nightly import daily
from support.split_models import SMALL, Sequence, batch, build, config_of, parts_of, whole_of

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.explaining.report import make_report
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM, ModuleSpec
from mindformers_core.models.decoder import DECODER_LAYER, DecoderLayer
from mindformers_core.operators import tensor_meta
from mindformers_core.program.structure import tree_leaves
from mindformers_core.tensor_parallel import prepare, shard


@pytest.mark.parametrize("mode", ["generated", "eager"])
@pytest.mark.parametrize("name", ["empty", "heterogeneous"])
def test_sharded_stages_compute_the_whole(one_rank, name, mode):
    """On a mesh of one rank; hidden states travel as local tensors."""
    mesh = init_device_mesh((1, 1), ("dp", "tp"))
    states, labels = batch()
    for layers in parts_of(name):
        stage = shard(build(config_of(name, tie_word_embeddings=True), layers), mesh, Sequence, seed=1, mode=mode)
        states = stage(states, labels).to_local()
    np.testing.assert_allclose(
        states.asnumpy(), whole_of(name, tie_word_embeddings=True)(*batch()).asnumpy(), rtol=1e-6
    )


def planned(config, stage_inputs, options, layers=None, layer_spec=DECODER_LAYER):
    """The plan of a stage on the mesh (dp 2, tp 2)."""
    with ms.DeviceCtx("meta"):
        net = LlamaForCausalLM(config, layer_spec, layers)
        shard(net, init_device_mesh((2, 2), ("dp", "tp")), options)
    return prepare(net, stage_inputs, tensor_meta((2, 8), "int32")).plan


def added(traffics):
    sums = {}
    for traffic in traffics:
        for key, (number, count) in traffic.items():
            known = sums.get(key, (0, 0))
            sums[key] = known[0] + number, known[1] + count
    return sums


def traffic(plan):
    return make_report(plan, algorithm_of).traffic


OPTIONS = {
    "sequence": Sequence,
    "data": SimpleNamespace(batch_axes=("dp",)),
    "sequence, no batch": SimpleNamespace(sequence_parallel=True),
    "nothing": None,
}


BY_DAY = ("uneven", "sequence"), ("v", "data")


@pytest.mark.parametrize(("name", "options"), daily(BY_DAY, product(("uneven", "v"), OPTIONS)))
def test_boundaries_send_nothing(rank_0_of_4, name, options):
    """Stages together have exactly the collectives of the whole, forward and backward, and neighbours agree."""
    options = OPTIONS[options]
    length = 8 // (2 if getattr(options, "sequence_parallel", False) else 1)
    ids, states = tensor_meta((2, 8), "int32"), tensor_meta((2, length, 24), "float32")
    batch_size = 4 if getattr(options, "batch_axes", None) else 2
    whole = planned(LlamaConfig(**SMALL), ids, options)
    plans = [planned(config_of(name), states if i else ids, options, part) for i, part in enumerate(parts_of(name))]
    assert added(map(traffic, plans)) == traffic(whole)
    for plan, following in zip(plans, plans[1:]):
        arriving = following.graph.arguments["input_ids"]
        assert plan.results == (following.layouts[arriving.id],)
        assert tuple(arriving.shape) == tuple(plan.graph.result.shape) == (batch_size, 8, 24)


class GatheredLayer(DecoderLayer):
    """A layer that gives whole hidden states also in sequence parallel."""

    def shard(self, config=None):
        return None, layout(..., None, None), None


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_boundary_doesnt_depend_on_the_layers(rank_0_of_4, stage):
    """Stages agree with their neighbours whatever the layers leave behind."""
    given = tensor_meta((2, 4, 24), "float32") if stage else tensor_meta((2, 8), "int32")
    plan = planned(config_of("even"), given, Sequence, parts_of("even")[stage], ModuleSpec(GatheredLayer))
    held = layout("dp", "tp", None).bind(plan.mesh)
    assert (plan.results == (held,)) == (stage < 2)
    assert stage == 0 or plan.layouts[plan.graph.arguments["input_ids"].id] == held


def test_mask_and_rotary_tables_have_the_global_length(rank_0_of_4):
    plan = planned(config_of("even"), tensor_meta((2, 4, 24), "float32"), Sequence, parts_of("even")[1])
    layers = [inner for path, inner in plan.walk() if path.startswith("model.layers.") and path.count(".") == 2]
    for layer in layers:
        given = [tuple(value.shape) for value in tree_leaves(layer.graph.arguments) if hasattr(value, "shape")]
        assert given == [(4, 8, 24), (8, 1, 6), (8, 1, 6), *[(1, 8)] * 3]
    assert len(layers) == 2


def test_a_tied_embedding_costs_one_more_gradient(rank_0_of_4):
    """The runtime adds up the two stages' gradients; each was reduced over dp before."""
    ids, states = tensor_meta((2, 8), "int32"), tensor_meta((2, 4, 24), "float32")
    config = config_of("even", tie_word_embeddings=True)
    plans = [planned(config, states if i else ids, Sequence, part) for i, part in enumerate(parts_of("even"))]
    expected = added([traffic(planned(LlamaConfig(**SMALL, tie_word_embeddings=True), ids, Sequence))])
    number, count = expected[("dp",), "backward", "all_reduce"]
    expected[("dp",), "backward", "all_reduce"] = number + 1, count + 16 * 24 * 4
    assert added(map(traffic, plans)) == expected
