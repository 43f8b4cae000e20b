"""Tensor parallelism: global tensors (`DTensor`), `shard()` hooks, `local_map`, layers that declare their layouts.

The public names load the module behind them when they are first used.
"""

from mindformers_core.lazy_exports import lazy_exports

_PUBLIC = {
    "ColumnParallelLinear": "layers",
    "LayerNorm": "layers",
    "RMSNorm": "layers",
    "RowParallelLinear": "layers",
    "VocabParallelCrossEntropy": "layers",
    "VocabParallelEmbedding": "layers",
    "clip_by_global_norm": "clipping",
    "split": "splitting",
    "split_layer": "splitting",
    "DTensor": ".dtensor.dtensor",
    "custom_operator": ".dtensor.interception",
    "distribute_tensor": ".dtensor.dtensor",
    "explain": ".sharding.inspecting",
    "full_parameters": ".sharding.shard",
    "jit": ".sharding.compiling",
    "local_map": ".sharding.local_map",
    "materialize": ".sharding.initialize",
    "prepare": ".sharding.inspecting",
    "programs": ".sharding.inspecting",
    "save_plan": ".propagation.saved",
    "shard": ".sharding.shard",
}

__all__ = [*_PUBLIC]

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
