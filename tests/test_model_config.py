"""What a `LlamaConfig` says of stages and of single layers, and its errors."""

import subprocess
import sys

import pytest
from split_models import BLOCKS, BOTH_COUNTED, SMALL, build

from mindformers_core.models import LlamaConfig


def test_layers_have_their_own_config():
    config = LlamaConfig(**SMALL, heterogeneous_block_specs=BLOCKS)
    second, fifth = config.get_config_for_layer(2), config.get_config_for_layer(5)
    assert (second.intermediate_size, second.num_key_value_heads, second.heterogeneous_block_specs) == (16, 2, None)
    assert (fifth.num_attention_heads, fifth.head_dim, fifth.intermediate_size) == (2, 6, 40)
    assert (
        config.get_config_for_layer(1).intermediate_size == 40 and config.get_config_for_layer(6).rms_norm_eps == 1e-3
    )
    plain = LlamaConfig(**SMALL)
    assert plain.get_config_for_layer(3) is plain
    model = build(config)
    assert model.model.layers["1"].mlp.gate_proj.weight.shape == (16, 24)
    assert model.model.layers["2"].self_attn.k_proj.weight.shape == (24, 24)
    assert model.model.layers["4"].self_attn.q_proj.weight.shape == (12, 24)
    assert model.model.layers["5"].input_layernorm.eps == 1e-3


def test_configs_are_values():
    """Lists become tuples, and later changes of what was given change nothing."""
    counts, blocks = [2, 4], [dict(block) for block in BLOCKS]
    given = {**SMALL, "pipeline_parallel": 2, "layers_per_stage": counts, "heterogeneous_block_specs": blocks}
    config = LlamaConfig.from_dict(given)
    counts[0], blocks[0]["intermediate_size"] = 3, 8
    assert config.layers_per_stage == (2, 4) and config.heterogeneous_block_specs == tuple(BLOCKS)
    assert hash(config) == hash(LlamaConfig.from_dict({**given, "layers_per_stage": (2, 4)}))


TWO, COUNTED = {"pipeline_parallel": 2}, {"account_for_embedding_in_pipeline_split": True}
ERRORS = [
    ({"pipeline_parallel": 4}, ValueError, r"num_hidden_layers: 6 should be .* \(4\): for example 4 or 8; or give"),
    ({**TWO, **COUNTED}, ValueError,
        r"num_hidden_layers: 6 with embedding counted makes 7, .* \(2\): for example 5 or 7"),
    ({"pipeline_parallel": 3, **BOTH_COUNTED}, ValueError, "embedding and output layer counted makes 8"),
    ({**TWO, "layers_per_stage": [6]}, ValueError,
        r"layers_per_stage: \[6\] has 1 entries, but .* 2 .* 1 makes 2 stages"),
    ({**TWO, "layers_per_stage": [3, 4]}, ValueError, r"layers_per_stage: \[3, 4\] makes 7 layers, .* is 6"),
    ({**TWO, "layers_per_stage": [7, -1]}, ValueError, r"layers_per_stage\[1\]: -1 should be at least 0"),
    ({**TWO, "layers_per_stage": [3, 3.0]}, TypeError, r"layers_per_stage\[1\]: expected an int, not 3.0"),
    ({**TWO, "layers_per_stage": 3}, TypeError, "layers_per_stage: expected a list of whole numbers, not 3"),
    ({**TWO, "layers_per_stage": [3, 3], **COUNTED}, ValueError, "leave account_for_embedding_in_pipeline_split out"),
    ({"pipeline_parallel": 4, "layers_per_stage": [0, 6, 0, 0]}, ValueError, "leaves stage 2 without anything"),
    ({"pipeline_parallel": 3, "layers_per_stage": [3, 0, 3]}, ValueError, "leaves stage 1 without anything"),
    ({"account_for_loss_in_pipeline_split": 1}, TypeError,
        "account_for_loss_in_pipeline_split: expected true or false"),
    ({"pipeline_placement": "V"}, ValueError, "pipeline_placement: 'V' should be one of loop, v"),
    ({**TWO, "pipeline_placement": "v"}, ValueError, 'virtual_pipeline: 1 should be 2 with pipeline_placement: "v"'),
    ({"heterogeneous_block_specs": [{}]}, ValueError,
        "heterogeneous_block_specs: 1 entries, but num_hidden_layers is 6"),
    ({"heterogeneous_block_specs": {}}, TypeError, "heterogeneous_block_specs: expected a list of dicts, not {}"),
    ({"heterogeneous_block_specs": [{}] * 5 + [3]}, TypeError, r"heterogeneous_block_specs\[5\]: expected a dict"),
    ({"heterogeneous_block_specs": [{"intermediate": 8}] * 6}, ValueError,
        r"heterogeneous_block_specs\[0\]: unknown key 'intermediate' \(did you mean 'intermediate_size'\?\)"),
    ({"heterogeneous_block_specs": [{"intermediate_size": "8"}] * 6}, TypeError,
        r"specs\[0\]: inter.* expected an int"),
    ({"heterogeneous_block_specs": [{"hidden_size": 8}] * 6}, ValueError, "unknown key 'hidden_size'.* own are: inter"),
    ({"heterogeneous_block_specs": [{}] * 4 + [{"num_key_value_heads": 3}, {}]}, ValueError,
        r"heterogeneous_block_specs\[4\]: num_attention_heads: 4 .* num_key_value_heads .3."),
    ({"layer_per_stage": [3, 3]}, ValueError, "unknown key 'layer_per_stage' .*did you mean 'layers_per_stage'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS)
def test_config_errors(changes, kind, message):
    with pytest.raises(kind, match=message):
        LlamaConfig.from_dict({**SMALL, **changes})


def test_no_such_layer():
    with pytest.raises(ValueError, match="layer number 0 should be from 1 to 6"):
        LlamaConfig(**SMALL).get_config_for_layer(0)


def test_configs_and_splits_need_no_mindspore():
    code = (
        "import sys; sys.modules['mindspore'] = None\n"
        "from mindformers_core.models import LlamaConfig, layers_of_stages, stage_index\n"
        "config = LlamaConfig(pipeline_parallel=2, pipeline_rank=1, virtual_pipeline=2, pipeline_placement='v')\n"
        "assert layers_of_stages(config) == (8,) * 4 and stage_index(config, 1) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
