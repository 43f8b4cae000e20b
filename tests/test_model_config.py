"""What a `LlamaConfig` says of single layers, and its errors."""

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


def test_no_such_layer():
    with pytest.raises(ValueError, match="layer number 0 should be from 1 to 6"):
        LlamaConfig(**SMALL).get_config_for_layer(0)
