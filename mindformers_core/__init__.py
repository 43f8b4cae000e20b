"""Parallel training for MindSpore: single-card code on a mesh of devices.

The public names import their modules at the first use, so that `import mindformers_core` and all modules in pure
Python need no MindSpore. `layout(...)` is imported from its module, `from mindformers_core.layout import
layout`, because `mindformers_core.layout` is that module; `mindformers_core.recompute` is a package that can be called.
"""

from mindformers_core.lazy_exports import lazy_exports

__version__ = "0.1.0"

_EXPORTS = {
    "mesh": "DeviceMesh init_device_mesh",
    "layout": "Layout Partial Replicate Shard Varying",
    "redistribution": "plan_redistribution",
    "communication": "init_distributed",
    "operators": "register_operator",
    "zero": "hsdp",
    "recompute": "swap",
    "pipeline": "PipelineStage",
    "sharding.replicas": "check_replicas",
    "tensor_parallel": "DTensor ShardConfig distribute_tensor explain full_parameters jit local_map prepare programs "
    "shard split",
    "diff": "record_digests",
    "verification": "verify",
    "checkpoint": "Checkpointer global_checksums relayout",
    "trainer.trainer": "Trainer",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
