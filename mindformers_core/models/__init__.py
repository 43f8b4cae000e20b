"""Reference models: single-card Cells, with `shard()` hooks that say how to cut them and specs of their layers."""

from mindformers_core.models.configuration import LlamaConfig
from mindformers_core.models.layer_specs import LayerSpec, get_num_layers_to_build, get_transformer_layer_offset
from mindformers_core.models.llama import LlamaForCausalLM, LlamaModel

__all__ = [
    "LayerSpec",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LlamaModel",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
]
