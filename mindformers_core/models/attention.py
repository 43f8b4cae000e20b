"""Causal self-attention with grouped key and value heads (Ainslie et al., "GQA", 2023), as single-card code."""

import mindspore as ms
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer

from mindformers_core.layout import layout
from mindformers_core.models.rotary import apply_rotary, positions
from mindformers_core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, cast_to, gathered_layout


class LlamaAttention(nn.Cell):
    """Hidden states (batch, length, hidden_size) → the same shape. Heads are sharded over `tp`.

    Args:
        config: a `LlamaConfig`.
        weight_init: initializer of the projections.

    Attributes:
        cache: a `KeyValueCache` where the model generates, else None. Calls with `slots` attend to all that it holds,
            with the mask of `slot_mask`; others to their own keys and values.
    """

    def __init__(self, config, weight_init):
        super().__init__()
        self.cache = None
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        settings = {"weight_init": weight_init, "dtype": getattr(ms, config.dtype)}
        query_size, key_value_size = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.q_proj = ColumnParallelLinear(config.hidden_size, query_size, **settings)
        self.k_proj = ColumnParallelLinear(config.hidden_size, key_value_size, **settings)
        self.v_proj = ColumnParallelLinear(config.hidden_size, key_value_size, **settings)
        self.core_attention = CoreAttention(config)
        self.o_proj = RowParallelLinear(query_size, config.hidden_size, **settings)

    def shard(self, config=None):
        """The hidden states are gathered once for all three projections."""
        return {"hidden_states": gathered_layout(config)}, None, None

    def construct(self, hidden_states, cosines, sines, mask, slots=None):
        batch, length, _ = hidden_states.shape
        query = ops.reshape(self.q_proj(hidden_states), (batch, length, self.num_heads, self.head_dim))
        key = ops.reshape(self.k_proj(hidden_states), (batch, length, self.num_key_value_heads, self.head_dim))
        value = ops.reshape(self.v_proj(hidden_states), (batch, length, self.num_key_value_heads, self.head_dim))
        query, key = apply_rotary(query, cosines, sines), apply_rotary(key, cosines, sines)
        if slots is not None:
            key, value = self.cache(key, value, slots)
        return self.o_proj(self.core_attention(query, key, value, mask))


class CoreAttention(nn.Cell):
    """Attention between its projections, without parameters: the part that selective recomputation recomputes.

    Inputs are queries (batch, length, heads, head_dim), keys and values (batch, length, key_value_heads, head_dim), and
    a float32 mask, which is added to scores (batch, heads, length, length of keys); the output is (batch, length,
    heads * head_dim). The name is Megatron-LM's (Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022).

    Args:
        config: a `LlamaConfig`.
    """

    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.scale = config.head_dim**-0.5

    def construct(self, query, key, value, mask):
        batch, length, _, head_dim = query.shape
        query = ops.transpose(query, (0, 2, 1, 3))
        key = ops.transpose(key, (0, 2, 3, 1))
        value = ops.transpose(value, (0, 2, 1, 3))
        scores = ops.mul(ops.matmul(query, self._repeat(key)), self.scale)
        weights = ops.softmax(ops.add(cast_to(scores, ms.float32), mask), -1)
        mixed = ops.matmul(cast_to(weights, query.dtype), self._repeat(value))
        return ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (batch, length, self.num_heads * head_dim))

    def _repeat(self, x):
        """A copy of each key or value head for every query head of its group: (batch, heads, …, …) of either kind."""
        if self.num_heads == self.num_key_value_heads:
            return x
        batch, kv_heads, rows, columns = x.shape
        grouped = ops.broadcast_to(ops.expand_dims(x, 2), (batch, kv_heads, self.num_heads // kv_heads, rows, columns))
        return ops.reshape(grouped, (batch, self.num_heads, rows, columns))


class KeyValueCache(nn.Cell):
    """Keys and values of all positions so far, for generation: state that a call writes, sharded by batch and heads.

    Inputs are keys and values (batch, length, key_value_heads, head_dim) and the slots to write them to (length,), of
    an int dtype; the output is all that is held: two tensors (batch, slots, key_value_heads, head_dim).

    Args:
        slots, batch, heads, head_dim, dtype: of the cache.

    Attributes:
        keys, values: Parameters of shape (slots, batch, heads, head_dim), so that a write is one of rows.
    """

    def __init__(self, slots, batch, heads, head_dim, dtype):
        super().__init__()
        zeros = [initializer("zeros", (slots, batch, heads, head_dim), dtype) for _ in range(2)]
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


_LOWEST = -3.4028234663852886e38  # of float32


def causal_mask(length, order=(0,)):
    """Float32 tensor (length, length) to add to scores: the lowest number where the key is after the query, else 0.

    The equal chunks of the sequence lie in this order.
    """
    key = positions(length, order)
    return ops.mul(ops.cast(ops.greater(key, ops.expand_dims(key, -1)), ms.float32), _LOWEST)


def document_mask(own, places):
    """Float32 tensor (batch, 1, length, length) to add to scores: a query sees its document up to itself.

    Args:
        own: int32 (batch, length): of every token its position in its document.
        places: int32 (length,) or (batch, length): of every token its place in the row.
    """
    key, query = ops.expand_dims(places, -2), ops.expand_dims(places, -1)
    first = ops.sub(query, ops.expand_dims(own, -1))
    hidden = ops.logical_or(ops.greater(key, query), ops.less(key, first))
    return ops.mul(ops.cast(ops.expand_dims(hidden, 1), ms.float32), _LOWEST)


def slot_mask(slots, starts, cache_length):
    """Float32 tensor (batch, 1, length, cache_length) to add to scores with the keys of a cache.

    Args:
        slots: of the queries, (length,): each sees its own slot and those before it.
        starts: of every row, (batch,), its first slot that isn't padding.
        cache_length: number of the cache's slots.
    """
    key = positions(cache_length)
    after, padding = ops.greater(key, ops.expand_dims(slots, -1)), ops.less(key, ops.expand_dims(starts, -1))
    hidden = ops.logical_or(after, ops.expand_dims(ops.expand_dims(padding, 1), 1))
    return ops.mul(ops.cast(hidden, ms.float32), _LOWEST)
