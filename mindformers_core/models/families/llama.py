"""Llama (Touvron et al., 2023), to 3.3: rotary positions, grouped heads, gated feed-forward blocks. Pure Python."""

from mindformers_core.models.configuration import LlamaConfig
from mindformers_core.models.families.decoders import decoder_spec
from mindformers_core.models.spec import HuggingFaceFormat

KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_scaling", "tie_word_embeddings", "attention_dropout", "initializer_range", "heterogeneous_block_specs",
)  # fmt: skip
FIXED = {"hidden_act": "silu", "quantization_config": None}
FORMAT = HuggingFaceFormat(
    "llama",
    "LlamaForCausalLM",
    KEYS,
    fixed=FIXED | {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    ignored=("*.rotary_emb.inv_freq",),
)
SPEC = decoder_spec(LlamaConfig, FORMAT, "mindformers_core.models.llama:llama_for_training")
