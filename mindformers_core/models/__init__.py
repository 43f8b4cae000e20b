"""Reference models: single-card Cells, with `shard()` hooks that say how to cut them and specs of their layers.

The public names load the module behind them when they are first used: configs and layer specs need no MindSpore.
"""

from mindformers_core.front_door import public_names

_PUBLIC = {
    "LayerSpec": "layer_specs",
    "LlamaConfig": "configuration",
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "get_num_layers_to_build": "layer_specs",
    "get_transformer_layer_offset": "layer_specs",
    "layers_of_stages": "layer_specs",
    "model_split_manual": "manual_split",
    "stage_count": "layer_specs",
    "stage_index": "layer_specs",
    "tied_paths": "layer_specs",
}

__all__ = [*_PUBLIC]

__getattr__, __dir__ = public_names(__name__, _PUBLIC)
