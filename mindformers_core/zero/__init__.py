"""Data parallelism and ZeRO: sharded optimizer state, gradients and weights (Rajbhandari et al. 2020).

The public names load the module behind them when they are first used.
"""

from mindformers_core.lazy_exports import lazy_exports

_PUBLIC = {
    "hsdp": "hybrid_sharding",
    "value_and_grad": "gradients",
    "gathered": "storage",
    "tie_shards": "hybrid_sharding",
    "memory_report": "memory",
    "MixedPrecision": "precision",
    "LossScale": "loss_scale",
    "all_finite": "loss_scale",
    "Lamb": ".optimizers.lamb",
}

__all__ = [*_PUBLIC]

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
