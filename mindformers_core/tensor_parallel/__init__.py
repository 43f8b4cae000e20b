"""Tensor parallelism: global tensors (`DTensor`), `shard()` hooks, `local_map`, layers that declare their layouts."""

from mindformers_core.tensor_parallel.clipping import clip_by_global_norm
from mindformers_core.tensor_parallel.compiling import jit
from mindformers_core.tensor_parallel.dtensor import DTensor, distribute_tensor
from mindformers_core.tensor_parallel.full_parameters import full_parameters
from mindformers_core.tensor_parallel.initialize import materialize
from mindformers_core.tensor_parallel.inspecting import explain, prepare, programs
from mindformers_core.tensor_parallel.interception import intercept_operators
from mindformers_core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from mindformers_core.tensor_parallel.local_map import local_map
from mindformers_core.tensor_parallel.propagation.saved import save_plan
from mindformers_core.tensor_parallel.shard import shard
from mindformers_core.tensor_parallel.split import split, split_layer

__all__ = [
    "ColumnParallelLinear",
    "DTensor",
    "LayerNorm",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "clip_by_global_norm",
    "distribute_tensor",
    "explain",
    "full_parameters",
    "jit",
    "local_map",
    "materialize",
    "prepare",
    "programs",
    "save_plan",
    "shard",
    "split",
    "split_layer",
]

intercept_operators()
