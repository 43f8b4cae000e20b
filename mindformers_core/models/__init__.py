"""Reference models: single-card Cells, with `shard()` hooks that declare their layouts, and specs of their layers.

The public names import their modules at the first use: configs and layer specs need no MindSpore.
"""

from mindformers_core.lazy_exports import lazy_exports

_EXPORTS = {
    "adapters": "add_adapters merge_adapters",
    "spec": "LayerRange LayerSpec ModelSpec ModuleSpec build_module",
    "configuration": "LlamaConfig",
    "decoder": "CausalDecoder Decoder",
    "llama": "LlamaForCausalLM",
    "manual_split": "model_split_manual",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
