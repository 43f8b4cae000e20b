"""Parallel training for MindSpore: single-card code on a mesh of devices.

The public names load the module behind them when they are first used, so that `import mindformers_core` and everything
that is pure Python need no MindSpore. `layout(...)` is imported from its module, `from mindformers_core.layout import
layout`, because `mindformers_core.layout` is that module.
"""

from importlib import import_module

from mindformers_core.mesh import nearest

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
    "DTensor": "tensor_parallel",
    "distribute_tensor": "tensor_parallel",
    "explain": "tensor_parallel",
    "jit": "tensor_parallel",
    "local_map": "tensor_parallel",
    "prepare": "tensor_parallel",
    "programs": "tensor_parallel",
    "shard": "tensor_parallel",
    "split": "tensor_parallel",
}

__all__ = [*_PUBLIC]


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'{nearest(name, _PUBLIC)}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__():
    return sorted([*globals(), *_PUBLIC])
