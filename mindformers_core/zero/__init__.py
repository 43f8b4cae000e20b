"""Data parallelism and ZeRO: sharded optimizer state, gradients and weights (Rajbhandari et al. 2020).

The public names load the module behind them when they are first used.
"""

from mindformers_core.lazy_exports import lazy_exports

_EXPORTS = {
    "hybrid_sharding": "hsdp tie_shards",
    "gradients": "value_and_grad",
    "storage": "gathered",
    "memory": "memory_report",
    "precision": "MixedPrecision",
    "loss_scale": "LossScale all_finite",
    ".optimizers.lamb": "Lamb",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
