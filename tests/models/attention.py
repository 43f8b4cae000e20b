"""Parts that several models have: attention, and a feed-forward block."""

from mindspore import nn, ops

from models.example import columns, rows

__all__ = ["Attention", "FeedForward", "attention_plan"]


class Attention(nn.Cell):
    """Attention of `x` to `context`; `bias` is added to the scores."""

    def __init__(self, size, heads, has_bias=True):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Dense(size, size, has_bias=has_bias) for _ in range(4))

    def split_heads(self, x):
        batch, length, _ = x.shape
        return x.reshape(batch, length, self.heads, -1).swapaxes(1, 2)

    def construct(self, x, context, bias=None):
        query, key, value = (
            self.split_heads(self.query(x)),
            self.split_heads(self.key(context)),
            self.split_heads(self.value(context)),
        )
        scores = ops.matmul(query, key.swapaxes(2, 3)) * query.shape[-1] ** -0.5
        if bias is not None:
            scores = scores + bias
        mixed = ops.matmul(ops.softmax(scores, -1), value)
        return self.out(mixed.swapaxes(1, 2).reshape(x.shape))


class FeedForward(nn.Cell):
    """Two linear layers."""

    def __init__(self, size, inner, activation=ops.gelu, has_bias=True):
        super().__init__()
        self.up, self.down = nn.Dense(size, inner, has_bias=has_bias), nn.Dense(inner, size, has_bias=has_bias)
        self.activation = activation

    def construct(self, x):
        return self.down(self.activation(self.up(x)))


def attention_plan(path, axes, bias=True):
    """Megatron-LM's: heads are cut."""
    return {f"{path}.{name}": columns(axes, bias) for name in ("query", "key", "value")} | {f"{path}.out": rows(axes)}
