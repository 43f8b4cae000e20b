"""The models of the tensor-parallel benchmark: single-card Cells, and the same with collectives written by hand.

The hand-written ones are what an expert writes in MindSpore: Cells of local sizes, and Megatron-LM's pair of functions
around every block (Shoeybi et al., 2019), `f` and `g` there, `CopyToRanks` and `SumOverRanks` here.
"""

from dataclasses import replace

from mindspore import nn, ops
from mindspore.common.initializer import XavierNormal

from mindformers_core.models.decoder import DecoderLayer
from mindformers_core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class Stack(nn.Cell):
    """Layers one after the other, and the mean square of what comes out as the loss."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.CellList(layers)

    def construct(self, x, *tables):
        for layer in self.layers:
            x = layer(x, *tables)
        return ops.mean(ops.square(x))


class MLPLayer(nn.Cell):
    """(…, hidden) → (…, inner) → (…, hidden)."""

    def __init__(self, hidden, inner):
        super().__init__()
        self.up = ColumnParallelLinear(hidden, inner, weight_init=XavierNormal())
        self.down = RowParallelLinear(inner, hidden, weight_init=XavierNormal())

    def construct(self, x):
        return self.down(ops.gelu(self.up(x)))


class CopyToRanks(nn.Cell):
    """Identity; the gradient is summed over all ranks."""

    def __init__(self):
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, x):
        return x

    def bprop(self, x, out, dout):
        return (self.all_reduce(dout),)


class SumOverRanks(nn.Cell):
    """Sum over all ranks; the gradient passes as it is."""

    def __init__(self):
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, x):
        return self.all_reduce(x)

    def bprop(self, x, out, dout):
        return (dout,)


class HandwrittenMLPLayer(MLPLayer):
    """One of `ranks` parts of an `MLPLayer`."""

    def __init__(self, hidden, inner, ranks):
        super().__init__(hidden, inner // ranks)
        self.copy = CopyToRanks()
        self.sum = SumOverRanks()

    def construct(self, x):
        return self.sum(self.down(ops.gelu(self.up(self.copy(x)))))


class HandwrittenDecoderLayer(DecoderLayer):
    """One of `ranks` parts of a `DecoderLayer`: of its heads, and of the inner size of its feed-forward block."""

    def __init__(self, config, layer_number, ranks):
        part = {"num_attention_heads": config.num_attention_heads // ranks}
        part |= {"num_key_value_heads": config.num_key_value_heads // ranks}
        part |= {"intermediate_size": config.intermediate_size // ranks}
        super().__init__(replace(config, **part), layer_number)
        self.copy = CopyToRanks()
        self.sum = SumOverRanks()

    def construct(self, hidden_states, cosines, sines, *seen):
        normed = self.copy(self.input_layernorm(hidden_states))
        hidden_states = ops.add(hidden_states, self.sum(self.self_attn(normed, cosines, sines, *seen)))
        normed = self.copy(self.post_attention_layernorm(hidden_states))
        return ops.add(hidden_states, self.sum(self.mlp(normed)))
