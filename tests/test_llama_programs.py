"""What is generated for a Llama of many layers: they share their functions, and so the module hardly grows."""

import mindspore as ms
import pytest

from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.operators import tensor_meta
from mindformers_core.tensor_parallel import explain, prepare, programs, shard

pytestmark = pytest.mark.usefixtures("rank_0_of_4")


class Parallelism:
    """What the model's hooks ask for."""

    sequence_parallel = True


def generated(layers):
    """The sharded model, and the text of its program's file."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    with ms.DeviceCtx("meta"):
        net = shard(LlamaForCausalLM(config), init_device_mesh((2, 2), ("dp", "tp")), Parallelism())
    ids = tensor_meta((2, 16), "int32")
    with open(prepare(net, ids, ids).file, encoding="utf-8") as file:
        return net, file.read()


def test_layers_share_their_functions():
    (few, short), (many, long) = generated(3), generated(24)
    assert short.count("\ndef ") == long.count("\ndef ") and "def parallel_decoder_layer(self" in long
    assert long.count("\n") - short.count("\n") == 24 - 3, "a line for each layer more: its call"
    plans = [plan for _, plan in programs(many)[0].plan.walk()]
    assert len({id(plan) for plan in plans}) == len({id(f) for _, f in programs(few)[0].plan.walk()}) < len(plans)
    assert "layers.1 … layers.23" in explain(many) or "layers.2" in explain(many)


def test_a_cell_below_is_explained_by_its_part():
    net, _ = generated(2)
    assert explain(net.model.layers["1"].mlp).startswith("GatedMLP on the mesh (dp=2, tp=2)")
    with pytest.raises(ValueError, match="has no program yet"):
        explain(shard(ms.nn.ReLU(), init_device_mesh((2, 2), ("dp", "tp")), plan={"": {"input": layout("dp")}}))
