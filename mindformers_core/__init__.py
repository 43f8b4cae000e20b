"""Parallel training for MindSpore: single-card code on a mesh of devices.

The public names import their modules at the first use, so that `import mindformers_core` and all modules in pure
Python need no MindSpore. `layout(...)` is imported from its module, `from mindformers_core.layout import
layout`, because `mindformers_core.layout` is that module; `mindformers_core.recompute` is a package that can be called.
"""

from mindformers_core.lazy_exports import lazy_exports

__version__ = "0.1.0"

_PUBLIC = {
    "DeviceMesh": "mesh",
    "init_device_mesh": "mesh",
    "Layout": "layout",
    "Partial": "layout",
    "Replicate": "layout",
    "Shard": "layout",
    "Varying": "layout",
    "plan_redistribution": "redistribution",
    "init_distributed": "communication",
    "register_operator": "operators",
    "hsdp": "zero",
    "swap": "recompute",
    "PipelineStage": "pipeline",
    "DTensor": "tensor_parallel",
    "distribute_tensor": "tensor_parallel",
    "explain": "tensor_parallel",
    "full_parameters": "tensor_parallel",
    "jit": "tensor_parallel",
    "local_map": "tensor_parallel",
    "prepare": "tensor_parallel",
    "programs": "tensor_parallel",
    "shard": "tensor_parallel",
    "split": "tensor_parallel",
    "record_digests": "diff",
    "verify": "verification",
}

__all__ = [*_PUBLIC]

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
