"""Linear layers, embedding, norms and cross-entropy: single-card Cells whose `shard()` hooks declare their layouts.

The layouts are those of Megatron-LM (Shoeybi et al., 2019) and, for the sequence dim, of Korthikanti et al. (2022). A
hook declares some dims, and `...` stands for the others in their arriving layout. The communication follows from the
declarations; on one card, unsharded, these are ordinary Cells. They are composed of operators that have kernels on
every device, in PyNative and under `@ms.jit`.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import Normal, initializer

from mindformers_core.algorithms.custom import custom_operator
from mindformers_core.algorithms.rows import rms_norm
from mindformers_core.hints import check_loss
from mindformers_core.layout import layout
from mindformers_core.operators import register_operator
from mindformers_core.operators.rules.normalization import rms_norm_of_rows
from mindformers_core.operators.saved import SavedByOperator
from mindformers_core.padding import with_padding
from mindformers_core.tensor_parallel.fp8 import current_fp8, fp8_dense

register_operator(
    "RMSNorm", source="mindformers_core.algorithms.rows.rms_norm", saves=SavedByOperator((0, 1)), operations=4
)(rms_norm_of_rows)
_rms_norm = custom_operator("RMSNorm", rms_norm)


class Linear(nn.Cell):
    """`y = x @ weight.T + bias`: (…, in_features) → (…, out_features). The base of the two linear layers below.

    Args:
        in_features, out_features: sizes of the last dim before and after.
        has_bias: whether there is a `bias` of shape (out_features,), else it is None. Default: False.
        weight_init, bias_init: initializers. Default: Normal(0.02) and zeros.
        dtype: of the parameters. Default: float32.

    Attributes:
        weight: shape (out_features, in_features).
        fp8: name of the `Fp8Policy` in whose context it was built, see `get_fp8_context`, by which it multiplies; None:
            in the dtype of its inputs.
    """

    def __init__(
        self, in_features, out_features, has_bias=False, weight_init=None, bias_init="zeros", dtype=ms.float32
    ):
        super().__init__()
        self.weight = _declare((out_features, in_features), weight_init, dtype)
        self.bias = _declare((out_features,), bias_init, dtype) if has_bias else None
        self.fp8 = current_fp8()

    def construct(self, x):
        y = ops.dense(x, self.weight) if self.fp8 is None else fp8_dense(x, self.weight, self.fp8)
        return y if self.bias is None else ops.add(y, self.bias)

    def own_layouts(self, weight, bias):
        """The layouts by parameter name, without the bias's where there is none."""
        return {"weight": weight} if self.bias is None else {"weight": weight, "bias": bias}


class ColumnParallelLinear(Linear):
    """A `Linear` whose output features are sharded over `tp`, and so the output.

    Args:
        gather_output: whether every rank gets the global output. Default: False.
        others: as `Linear`.
    """

    def __init__(self, in_features, out_features, gather_output=False, **others):
        super().__init__(in_features, out_features, **others)
        self.gather_output = gather_output

    def shard(self, config=None):
        output_layout = layout(..., None) if self.gather_output else layout(..., "tp")
        return gathered_layout(config), output_layout, self.own_layouts(weight=layout("tp", None), bias=layout("tp"))


class RowParallelLinear(Linear):
    """A `Linear` whose input features are sharded over `tp`: every rank computes one term of the output.

    The terms are summed, with `config.sequence_parallel` straight to an output that is sharded over `tp` on the
    sequence dim (the last but one).

    Args:
        reduce_output: whether to sum, rather than leave the output partial. Default: True.
        others: as `Linear`.
    """

    def __init__(self, in_features, out_features, reduce_output=True, **others):
        super().__init__(in_features, out_features, **others)
        self.reduce_output = reduce_output

    def shard(self, config=None):
        output_layout = hidden_layout(config) if self.reduce_output else None
        return layout(..., "tp"), output_layout, self.own_layouts(weight=layout(None, "tp"), bias=layout(None))


class VocabParallelLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` whose output features are a vocabulary, of any size: logits.

    Where `tp` doesn't divide it, see `vocabulary_logits`.
    """

    def shard(self, config=None):
        inputs, outputs, _ = super().shard(config)
        return inputs, outputs, self.own_layouts(layout("tp", None, pad=True), layout("tp", pad=True))

    def construct(self, x):
        logits = vocabulary_logits(x, self.weight)
        return logits if self.bias is None else ops.add(logits, with_padding(self.bias))


class VocabParallelEmbedding(nn.Cell):
    """Rows of `weight`, sharded over `tp` on the vocabulary dim: ids (…) of an int dtype → (…, embedding_size).

    A vocabulary that `tp` doesn't divide is padded in storage: `layout("tp", None, pad=True)`.
    Negative ids count from the end. An id outside of the vocabulary gives zeros where the vocabulary is sharded,
    while one card raises an error.

    Args:
        vocab_size, embedding_size: shape of the weight.
        weight_init: initializer. Default: Normal(0.02).
        dtype: of the weight. Default: float32.
    """

    def __init__(self, vocab_size, embedding_size, weight_init=None, dtype=ms.float32):
        super().__init__()
        self.weight = _declare((vocab_size, embedding_size), weight_init, dtype)

    def shard(self, config=None):
        return None, hidden_layout(config), {"weight": layout("tp", None, pad=True)}

    def construct(self, input_ids):
        weight, rows = with_padding(self.weight), self.weight.shape[0]
        if weight.shape[0] != rows:
            input_ids = ops.where(ops.less(input_ids, 0), ops.add(input_ids, rows), input_ids)
        return ops.gather(weight, input_ids, 0)


class VocabParallelCrossEntropy(nn.Cell):
    """Cross-entropy in float32 over all positions that count, with logits sharded over `tp` on the vocabulary dim.

    Logits (…, vocab_size) and labels (…) of an int dtype → the mean, a scalar; NaN, as with `ops.cross_entropy`, where
    no position counts. Or the sum, a scalar, and the number of positions that count, an int32 scalar.

    Args:
        ignore_index: label of the positions that don't count. Default: -100.
        loss: `"mean"` (default) or `"sum"`.

    Raises:
        ValueError: another `loss`.
    """

    def __init__(self, ignore_index=-100, loss="mean"):
        super().__init__()
        check_loss(loss, "VocabParallelCrossEntropy")
        self.ignore_index, self.returns_sum = ignore_index, loss == "sum"

    def shard(self, config=None):
        return {"logits": layout(..., "tp")}, (layout(), layout()) if self.returns_sum else layout(), None

    def construct(self, logits, labels):
        logits = cast_to(logits, ms.float32)
        highest = ops.stop_gradient(ops.amax(logits, -1, keepdims=True))
        shifted = ops.sub(logits, highest)
        log_sum = ops.log(ops.sum(ops.exp(shifted), -1))
        counted = ops.not_equal(labels, self.ignore_index)
        weight = ops.cast(counted, ms.float32)
        safe_labels = ops.mul(labels, ops.cast(counted, labels.dtype))
        target = ops.squeeze(ops.gather_elements(shifted, -1, ops.expand_dims(safe_labels, -1)), -1)
        losses = ops.mul(ops.sub(log_sum, target), weight)
        if self.returns_sum:
            return ops.sum(losses), ops.sum(ops.cast(counted, ms.int32))
        return ops.div(ops.sum(losses), ops.sum(weight))


class RMSNorm(nn.Cell):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dim, in float32 (Zhang and Sennrich, 2019).

    With `config.sequence_parallel` its input is sharded over `tp` on the sequence dim, the last but one.

    Args:
        hidden_size: size of the last dim.
        eps: added to the mean square. Default: 1e-6.
        dtype: of the weight. Default: float32.
    """

    def __init__(self, hidden_size, eps=1e-6, dtype=ms.float32):
        super().__init__()
        self.eps = eps
        self.weight = _declare((hidden_size,), "ones", dtype)

    def shard(self, config=None):
        return hidden_layout(config), None, layout(None)

    def construct(self, x):
        return _rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Cell):
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dim, in float32 (Ba et al., 2016).

    With `config.sequence_parallel` its input is sharded over `tp` on the sequence dim, the last but one.

    Args:
        hidden_size: size of the last dim.
        eps: added to the variance. Default: 1e-5.
        dtype: of weight and bias. Default: float32.
    """

    def __init__(self, hidden_size, eps=1e-5, dtype=ms.float32):
        super().__init__()
        self.eps = eps
        self.weight = _declare((hidden_size,), "ones", dtype)
        self.bias = _declare((hidden_size,), "zeros", dtype)

    def shard(self, config=None):
        return hidden_layout(config), None, {"weight": layout(None), "bias": layout(None)}

    def construct(self, x):
        wide = cast_to(x, ms.float32)
        centred = ops.sub(wide, ops.mean(wide, -1, keep_dims=True))
        variance = ops.mean(ops.square(centred), -1, keep_dims=True)
        normed = ops.mul(centred, ops.rsqrt(ops.add(variance, self.eps)))
        return ops.add(ops.mul(cast_to(normed, x.dtype), self.weight), self.bias)


def vocabulary_logits(x, weight):
    """`x @ weight.T`, logits: (…, in_features) → (…, vocab_size), or with the columns of the weight's padding.

    These have the lowest numbers, which no softmax sees, and give no gradient; `without_columns` takes them off.
    """
    stored, rows = with_padding(weight), weight.shape[0]
    logits = ops.dense(x, stored)
    if stored.shape[0] == rows:
        return logits
    lowest = -65504.0 if logits.dtype == ms.float16 else -3e38
    return ops.masked_fill(logits, ms.Tensor(np.arange(stored.shape[0]) >= rows), lowest)


def without_columns(logits, count):
    """The first `count` columns of logits (…, columns), gathered from all ranks where there are others."""
    return logits if logits.shape[-1] == count else ops.narrow(logits, -1, 0, count)


def cast_to(tensor, dtype):
    """`tensor` as `dtype`; no operator at all where it is that already."""
    return tensor if tensor.dtype == dtype else ops.cast(tensor, dtype)


def hidden_layout(config):
    """Layout of hidden states between blocks: replicated over `tp`; sequence parallel: sharded on the sequence dim."""
    return layout(..., *sequence_entry(config), None)


def gathered_layout(config):
    """Layout of hidden states before a column-parallel linear: replicated over `tp`, gathered in sequence parallel."""
    own = sequence_entry(config)
    return layout(..., *(tuple(axis for axis in axes if axis != "tp") for axes in own), None)


def sequence_entry(config):
    """The entry of a layout for the sequence dim of hidden states between blocks: a tuple of one; of none if it is as
    it arrives.

    The dim is sharded over `config.sequence_axes`, and with `config.sequence_parallel` each part of it over `tp`.
    """
    axes, also = getattr(config, "sequence_axes", None), getattr(config, "sequence_parallel", False)
    if axes is None and not also:
        return ()
    axes = (axes,) if isinstance(axes, str) else axes or ()
    return ((*axes, *(("tp",) if also else ())),)


def _declare(shape, given, dtype):
    return Parameter(initializer(Normal(0.02) if given is None else given, shape, dtype))
