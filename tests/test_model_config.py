"""What a `LlamaConfig` says of single layers, and its errors."""

import subprocess
import sys

import pytest
from support.split_models import BLOCKS, SMALL, build

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
    blocks = [dict(block) for block in BLOCKS]
    given = {**SMALL, "heterogeneous_block_specs": blocks}
    config = LlamaConfig(**given)
    blocks[0]["intermediate_size"] = 3
    assert config.heterogeneous_block_specs == tuple(BLOCKS)
    assert hash(config) == hash(LlamaConfig(**given))


ERRORS = [
    ({"account_for_loss_in_pipeline_split": 1}, TypeError,
        "account_for_loss_in_pipeline_split: expected true or false"),
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
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS)
def test_config_errors(changes, kind, message):
    with pytest.raises(kind, match=message):
        LlamaConfig(**{**SMALL, **changes})


def test_no_such_layer():
    with pytest.raises(ValueError, match="layer number 0 should be from 1 to 6"):
        LlamaConfig(**SMALL).get_config_for_layer(0)


def test_configs_and_splits_need_no_mindspore():
    code = (
        "import sys; sys.modules['mindspore'] = None\n"
        "from mindformers_core.models import LlamaConfig\n"
        "from mindformers_core.pipeline import split_layers, stages_of_rank\n"
        "parts = split_layers(LlamaConfig().num_hidden_layers, 4)\n"
        "assert [part.count for part in parts] == [8] * 4 and stages_of_rank(1, 2, 2, 'v') == [1, 2]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
