"""Causal self-attention with grouped key and value heads (Ainslie et al., "GQA", 2023), as single-card code."""

import math

import mindspore as ms
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer

from mindformers_core.layout import layout
from mindformers_core.models.rotary import apply_rotary
from mindformers_core.models.spec import LayerSpec
from mindformers_core.tensor_parallel.attention import attention
from mindformers_core.tensor_parallel.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear, gathered_layout


class GroupedAttention(nn.Cell):
    """Hidden states (batch, length, hidden_size) → the same shape. Heads are sharded over `tp`.

    Args:
        config: of the layer, as a `LlamaConfig`.
        weight_init: initializer of the projections.
        spec: a `LayerSpec`: biases, and norms of queries and keys. Default: neither.

    Attributes:
        cache: a `KeyValueCache` where the model generates, else None. Calls with `slots` attend to all that it holds,
            others to their own keys and values.
        copies: number of copies of each key and value head, see `share_heads`.
    """

    def __init__(self, config, weight_init, spec=None):
        super().__init__()
        spec = LayerSpec() if spec is None else spec
        self.cache, self.copies = None, 1
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.is_rotary = config.rotary_size > 0
        dtype = getattr(ms, config.dtype)
        settings = {"weight_init": weight_init, "has_bias": spec.query_bias, "dtype": dtype}
        query_size, key_value_size = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.q_proj = ColumnParallelLinear(config.hidden_size, query_size, **settings)
        self.k_proj = ColumnParallelLinear(config.hidden_size, key_value_size, **settings)
        self.v_proj = ColumnParallelLinear(config.hidden_size, key_value_size, **settings)
        norms = [InnerNorm(self.head_dim, spec.norm_eps, dtype) if spec.head_norms else None for _ in range(2)]
        self.q_norm, self.k_norm = norms
        self.core_attention = CoreAttention(self.head_dim**-0.5, config.attention_dropout)
        self.o_proj = RowParallelLinear(query_size, config.hidden_size, **settings | {"has_bias": spec.output_bias})

    @property
    def cache_sizes(self):
        """Of a `KeyValueCache`: heads, and the sizes of a key's and a value's one."""
        return self.num_key_value_heads * self.copies, self.head_dim, self.head_dim

    def share_heads(self, ranks, exchanged=1):
        """Copy key and value heads, so that `ranks` x `exchanged`, which divides the query heads, divides them as well.

        Each rank of `tp`, of `ranks`, exchanges its heads with `exchanged - 1` others for their parts of sequences.
        """
        self.copies = math.lcm(self.num_key_value_heads, ranks * exchanged) // self.num_key_value_heads
        self.k_proj.gather_output = self.v_proj.gather_output = self.num_key_value_heads % ranks > 0

    def shard(self, config=None):
        """The hidden states are gathered once for all three projections."""
        return {"hidden_states": gathered_layout(config)}, None, None

    def construct(self, hidden_states, cosines, sines, first, last, places, order, exact, slots=None):
        batch, length, _ = hidden_states.shape
        query = ops.reshape(self.q_proj(hidden_states), (batch, length, self.num_heads, self.head_dim))
        shape = batch, length, self.num_key_value_heads, self.head_dim
        key, value = ops.reshape(self.k_proj(hidden_states), shape), ops.reshape(self.v_proj(hidden_states), shape)
        if self.copies > 1:
            key, value = _copied(key, self.copies), _copied(value, self.copies)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.is_rotary:
            query, key = apply_rotary(query, cosines, sines), apply_rotary(key, cosines, sines)
        if slots is not None:
            key, value = self.cache(key, value, slots)
        return self.o_proj(self.core_attention(query, key, value, first, last, places, order, exact))


def _copied(x, copies):
    """Copies of each head of (batch, length, heads, size), side by side."""
    batch, length, heads, size = x.shape
    x = ops.broadcast_to(ops.expand_dims(x, 3), (batch, length, heads, copies, size))
    return ops.reshape(x, (batch, length, heads * copies, size))


class CoreAttention(nn.Cell):
    """Attention between its projections, without parameters.

    Inputs are queries (batch, length, heads, head_dim), keys (batch, length, key_value_heads, head_dim), values, whose
    heads may have another size, and what `places_seen` gives; the output is (batch, length, heads * size). The name is
    Megatron-LM's (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).

    Args:
        scale: factor of the products of queries and keys.
        dropout: probability with which a weight is 0 in training. Default: 0.

    Attributes:
        algorithm: where sequences are cut, see `attention`.
    """

    def __init__(self, scale, dropout=0.0):
        super().__init__()
        self.scale, self.algorithm, self.dropout = scale, "auto", dropout

    def construct(self, query, key, value, first, last, places, order, exact):
        batch, length, heads, _ = query.shape
        known = self.scale, order, (None, 0), exact, self.algorithm, self.dropout if self.training else 0.0
        mixed, _ = attention(query, key, value, first, last, places, *known)
        return ops.reshape(mixed, (batch, length, heads * value.shape[-1]))


class InnerNorm(RMSNorm):
    """An `RMSNorm` within a block, as its input is cut: of each head, or of latent vectors."""

    def shard(self, config=None):
        return None, None, layout(None)


class KeyValueCache(nn.Cell):
    """Keys and values of all positions so far, for generation: state that a call writes, sharded by batch and heads.

    Inputs are keys and values (batch, length, key_value_heads, head_dim) and the slots to write them to (length,), of
    an int dtype; the output is all that is held: two tensors (batch, slots, key_value_heads, head_dim).

    Args:
        slots, batch, heads, head_dim, value_size, dtype: of the cache; `value_size` is that of a value's head.

    Attributes:
        keys, values: Parameters of shape (slots, batch, heads, size), so that a write is one of rows.
    """

    def __init__(self, slots, batch, heads, head_dim, value_size, dtype):
        super().__init__()
        zeros = [initializer("zeros", (slots, batch, heads, size), dtype) for size in (head_dim, value_size)]
        self.keys, self.values = (Parameter(each, requires_grad=False) for each in zeros)
        self.keys.persistent = self.values.persistent = False  # of no checkpoint

    def shard(self, config=None):
        """As the activations that are written."""
        held = layout(None, getattr(config, "batch_axes", None), "tp", None)
        return None, None, {"keys": held, "values": held}

    def construct(self, key, value, slots):
        ops.scatter_update(self.keys, slots, ops.transpose(key, (1, 0, 2, 3)))
        ops.scatter_update(self.values, slots, ops.transpose(value, (1, 0, 2, 3)))
        return ops.transpose(self.keys, (1, 0, 2, 3)), ops.transpose(self.values, (1, 0, 2, 3))
