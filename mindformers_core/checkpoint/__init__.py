"""Checkpoints that belong to no mesh: global tensors in safetensors files, written and read by boxes.

The public names load the module behind them when they are first used.
"""

from mindformers_core.lazy_exports import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(
    __name__, {"between_meshes": "global_checksums relayout", "checkpointer": "Checkpointer"}
)
