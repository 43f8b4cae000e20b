"""Feed-forward blocks of decoder layers, as single-card code: (…, hidden_size) → the same shape."""

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.models.experts import MixtureOfExperts, RoutedExperts, Router, RouterConfig
from mindformers_core.models.spec import LayerSpec
from mindformers_core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    gathered_layout,
    hidden_layout,
)


class GatedMLP(nn.Cell):
    """SwiGLU feed-forward block (Shazeer, 2020): `down(silu(gate(x)) * up(x))`.

    Args:
        config: of the layer, as a `LlamaConfig`.
        weight_init: initializer of the projections.
        spec: a `LayerSpec`: whether they have biases. Default: no.
        size: inside the block. Default: the config's `intermediate_size`.
    """

    def __init__(self, config, weight_init, spec=None, size=None):
        super().__init__()
        spec, size = LayerSpec() if spec is None else spec, config.intermediate_size if size is None else size
        settings = {"weight_init": weight_init, "has_bias": spec.mlp_bias, "dtype": getattr(ms, config.dtype)}
        self.gate_proj = ColumnParallelLinear(config.hidden_size, size, **settings)
        self.up_proj = ColumnParallelLinear(config.hidden_size, size, **settings)
        self.down_proj = RowParallelLinear(size, config.hidden_size, **settings)

    def shard(self, config=None):
        """The hidden states are gathered once for both projections."""
        return gathered_layout(config), None, None

    def construct(self, hidden_states):
        return self.down_proj(ops.mul(ops.silu(self.gate_proj(hidden_states)), self.up_proj(hidden_states)))


class PlainMLP(nn.Cell):
    """`down(gelu(up(x)))`, GELU by its tanh approximation (Hendrycks and Gimpel, 2016).

    Args:
        config, weight_init, spec: as of `GatedMLP`.
    """

    def __init__(self, config, weight_init, spec=None):
        super().__init__()
        spec = LayerSpec() if spec is None else spec
        settings = {"weight_init": weight_init, "has_bias": spec.mlp_bias, "dtype": getattr(ms, config.dtype)}
        self.up_proj = ColumnParallelLinear(config.hidden_size, config.intermediate_size, **settings)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, **settings)

    def construct(self, hidden_states):
        return self.down_proj(ops.gelu(self.up_proj(hidden_states), approximate="tanh"))


class SparseMLP(MixtureOfExperts):
    """A `MixtureOfExperts`, perhaps with a `GatedMLP` that all tokens go through.

    Args:
        config, weight_init: as of `GatedMLP`.
        spec: a `LayerSpec` with `router` and sizes.
    """

    def __init__(self, config, weight_init, spec):
        router, settings = RouterConfig(**spec.router), {"weight_init": weight_init, "dtype": getattr(ms, config.dtype)}
        super().__init__(
            Router(config.hidden_size, router, **settings),
            RoutedExperts(router.num_experts, config.hidden_size, spec.expert_size, capacity=spec.capacity, **settings),
            GatedMLP(config, weight_init, spec, spec.shared_size) if spec.shared_size else None,
        )

    def shard(self, config=None):
        """The hidden states are gathered once for router and experts."""
        return {"hidden_states": gathered_layout(config)}, {0: hidden_layout(config)}, None
