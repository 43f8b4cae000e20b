"""Tensor parallelism: global tensors (`DTensor`), `shard()` with its hooks, `local_map`, and layers that declare their layouts."""

from mindformers_core.tensor_parallel.clipping import clip_by_global_norm
from mindformers_core.tensor_parallel.dtensor import DTensor, distribute_tensor
from mindformers_core.tensor_parallel.interception import intercept_operators
from mindformers_core.tensor_parallel.local_map import local_map
from mindformers_core.tensor_parallel.shard import shard

__all__ = ["DTensor", "clip_by_global_norm", "distribute_tensor", "local_map", "shard"]

intercept_operators()
