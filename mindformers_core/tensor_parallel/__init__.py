"""Tensor parallelism: global tensors (`DTensor`), `shard()` hooks, `local_map`, layers that declare their layouts.

The public names load the module behind them when they are first used.
"""

from mindformers_core.lazy_exports import lazy_exports

_EXPORTS = {
    "layers": "ColumnParallelLinear LayerNorm RMSNorm RowParallelLinear VocabParallelCrossEntropy "
    "VocabParallelEmbedding VocabParallelLinear vocabulary_logits without_columns",
    "fp8": "Fp8Policy get_fp8_context",
    "clipping": "clip_by_global_norm",
    "splitting": "split split_layer",
    ".lowering.split_lookup": "manual_split",
    ".padding": "with_padding",
    ".dtensor.dtensor": "DTensor distribute_tensor",
    ".algorithms.custom": "custom_operator",
    ".sharding.inspecting": "explain prepare programs",
    ".sharding.shard": "ShardConfig full_parameters shard",
    ".sharding.compiling": "jit",
    ".sharding.local_map": "local_map",
    ".sharding.initialize": "materialize",
    ".propagation.saved": "save_plan",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
