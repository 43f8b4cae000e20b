"""Reference models: single-card Cells, with `shard()` hooks that declare their layouts, and specs of their layers.

The public names import their modules at the first use: configs and layer specs need no MindSpore.
"""

from mindformers_core.lazy_exports import lazy_exports

_PUBLIC = {
    "LayerRange": "spec",
    "LayerSpec": "spec",
    "LlamaConfig": "configuration",
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "ModelSpec": "spec",
    "model_split_manual": "manual_split",
}

__all__ = [*_PUBLIC]

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
