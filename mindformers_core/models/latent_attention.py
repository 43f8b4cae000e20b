"""Attention whose queries, keys and values come from small latent vectors (DeepSeek-AI, "DeepSeek-V2", 2024: MLA).

Single-card code. A head's key is a part without positions, from the latent vector, and a turned one that all heads
have in common.
"""

import math

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.layout import layout
from mindformers_core.models.attention import CoreAttention, InnerNorm
from mindformers_core.models.rotary import apply_rotary
from mindformers_core.tensor_parallel.layers import (
    ColumnParallelLinear,
    Linear,
    RowParallelLinear,
    gathered_layout,
)


class LatentAttention(nn.Cell):
    """Hidden states (batch, length, hidden_size) → the same shape. Heads are sharded over `tp`, latent vectors aren't.

    Args:
        config: of the layer, as a `DeepseekV3Config`.
        weight_init: initializer of the projections.
        spec: a `LayerSpec`: whether projections have biases.

    Attributes:
        cache: as of `GroupedAttention`; it holds whole keys and values.
    """

    def __init__(self, config, weight_init, spec):
        super().__init__()
        self.cache, dtype = None, getattr(ms, config.dtype)
        self.num_heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.plain, self.turned, self.value_size = (
            config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        )  # fmt: skip
        self.interleaved, self.size = config.rope_interleave, self.plain + self.turned
        settings = {"weight_init": weight_init, "dtype": dtype}
        biased = settings | {"has_bias": spec.query_bias}
        query_size, hidden = self.num_heads * self.size, config.hidden_size
        self.q_a_proj = self.q_a_layernorm = self.q_b_proj = self.q_proj = None
        if config.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, query_size, **settings)
        else:
            self.q_a_proj = LatentLinear(hidden, config.q_lora_rank, **biased)
            self.q_a_layernorm = InnerNorm(config.q_lora_rank, dtype=dtype)
            self.q_b_proj = ColumnParallelLinear(config.q_lora_rank, query_size, **settings)
        self.kv_a_proj_with_mqa = LatentLinear(hidden, self.rank + self.turned, **biased)
        self.kv_a_layernorm = InnerNorm(self.rank, dtype=dtype)
        self.kv_b_proj = ColumnParallelLinear(self.rank, self.num_heads * (self.plain + self.value_size), **settings)
        self.core_attention = CoreAttention(
            self.size**-0.5 * _amplitude(config.rope_scaling) ** 2, config.attention_dropout
        )
        self.o_proj = RowParallelLinear(
            self.num_heads * self.value_size, hidden, **settings | {"has_bias": spec.output_bias}
        )

    @property
    def cache_sizes(self):
        """Of a `KeyValueCache`: heads, and the sizes of a key's and a value's one."""
        return self.num_heads, self.size, self.value_size

    def shard(self, config=None):
        """The hidden states are gathered once for both projections."""
        return {"hidden_states": gathered_layout(config)}, None, None

    def construct(self, hidden_states, cosines, sines, first, last, places, order, exact, slots=None):
        batch, length, _ = hidden_states.shape
        if self.q_proj is not None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = ops.reshape(query, (batch, length, self.num_heads, self.size))
        plain, turned = ops.split(query, [self.plain, self.turned], -1)
        query = ops.concat((plain, self.turn(turned, cosines, sines)), -1)
        latent, common = ops.split(self.kv_a_proj_with_mqa(hidden_states), [self.rank, self.turned], -1)
        common = self.turn(ops.reshape(common, (batch, length, 1, self.turned)), cosines, sines)
        both = self.kv_b_proj(self.kv_a_layernorm(latent))
        both = ops.reshape(both, (batch, length, self.num_heads, self.plain + self.value_size))
        plain, value = ops.split(both, [self.plain, self.value_size], -1)
        common = ops.broadcast_to(common, (batch, length, self.num_heads, self.turned))
        key = ops.concat((plain, common), -1)
        if slots is not None:
            key, value = self.cache(key, value, slots)
        return self.o_proj(self.core_attention(query, key, value, first, last, places, order, exact))

    def turn(self, x, cosines, sines):
        """`apply_rotary` to pairs of neighbours, which come out as halves, where files have them so."""
        if self.interleaved:
            batch, length, heads, size = x.shape
            x = ops.transpose(ops.reshape(x, (batch, length, heads, size // 2, 2)), (0, 1, 2, 4, 3))
            x = ops.reshape(x, (batch, length, heads, size))
        return apply_rotary(x, cosines, sines)


class LatentLinear(Linear):
    """A `Linear` whose weight and output are whole on every rank of `tp`."""

    def shard(self, config=None):
        return gathered_layout(config), None, self.own_layouts(weight=layout(None, None), bias=layout(None))


def _amplitude(scaling):
    """What scores of longer sequences are multiplied with, twice, see YaRN's `mscale_all_dim`."""
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
