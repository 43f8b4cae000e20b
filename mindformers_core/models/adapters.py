"""Low-rank adapters of linear layers (LoRA; Hu et al., "Low-rank adaptation of large language models", 2021).

A layer with an adapter computes `W x + b + B A x * alpha / rank`, single-card code within the layer's own Cell: what
`shard()` declares for its input and output holds, and B is cut as the rows of W, A as its columns.
"""

from collections import Counter
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import cache

from mindspore import DeviceCtx, Parameter, mint, nn, ops
from mindspore.common.initializer import Uniform, initializer

from mindformers_core.hints import nearest
from mindformers_core.mindspore_private import parameters_of
from mindformers_core.padding import with_padding
from mindformers_core.tensor_parallel.layers import Linear

_LINEAR = (Linear, nn.Dense, mint.nn.Linear)


class _Adapted:
    """What a linear layer with an adapter is, before it is of its own class."""

    def construct(self, x):
        low = ops.dense(x if self.adapter_dropout is None else self.adapter_dropout(x), self.lora_A)
        y, low = self.without_adapter(x), ops.mul(low, self.adapter_scale)
        is_padded = y.shape[-1] != self.lora_B.shape[0]  # as logits are
        return ops.add(y, ops.dense(low, with_padding(self.lora_B) if is_padded else self.lora_B))


@cache
def _adapted_class(kind):
    return type(f"{kind.__name__}WithAdapter", (_Adapted, kind), {"without_adapter": kind.construct})


def adapted_layers(net, patterns):
    """Path -> Cell of the linear layers that patterns select: `Linear`s of ours, `nn.Dense`, `mint.nn.Linear`.

    Args:
        net: the model, before `shard()`.
        patterns: of paths of Cells or of their weights, where `*` stands for any letters; the end of a path is enough:
            `"q_proj"`, `"layers.0.*"`, `"*.mlp.*.weight"`.

    Raises:
        ValueError: a pattern selects no linear layer; a layer has an activation of its own, or a weight that another
            Cell has, too.
    """
    linear = {path: cell for path, cell in net.cells_and_names() if isinstance(cell, _LINEAR)}
    shared = Counter(id(weight) for _, cell in net.cells_and_names() for weight in parameters_of(cell).values())
    found = {}
    for pattern in patterns:
        selected = [path for path in linear if any(_matches(text, pattern) for text in (path, f"{path}.weight"))]
        if not selected:
            others = [path for path, _ in net.cells_and_names() if path and _matches(path, pattern)][:1]
            known = [*linear, *(path.rpartition(".")[2] for path in linear)]
            why = f", but {type(dict(net.cells_and_names())[others[0]]).__name__} '{others[0]}'" if others else ""
            raise ValueError(f"pattern '{pattern}' matches no linear layer{why}{nearest(pattern, known)}")
        found |= dict.fromkeys(selected)
    for path in found:
        if getattr(linear[path], "activation", None) is not None:
            raise ValueError(f"'{path}' has an activation of its own, behind which an adapter can't add: take it out")
        if shared[id(linear[path].weight)] > 1:
            raise ValueError(f"the weight of '{path}' is another Cell's, too, which would be without the adapter")
    return {path: linear[path] for path in linear if path in found}


def _matches(path, pattern):
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def add_adapters(net, rank, patterns, alpha=None, dropout=0.0):
    """Give linear layers adapters, in place, and freeze all other Parameters: the paths of the layers, a list.

    Call it before `shard()`. A layer gets the Parameters `lora_A` (rank, in), which is drawn, uniform within
    `1 / sqrt(in)`, and `lora_B` (out, rank), zeros, of its weight's dtype. Checkpoints leave out what this function has
    frozen; Parameters that weren't trained before, as a norm's statistics, are saved, unless none was.

    Args:
        net: the model.
        rank: of the adapters, at least 1.
        patterns: as of `adapted_layers`, a list.
        alpha: factor of what adapters add, divided by the rank. Default: the rank.
        dropout: probability with which inputs of adapters are zero in training.

    Raises:
        ValueError: see `adapted_layers`; a rank below 1; a net that is sharded, or has adapters.
    """
    layers = adapted_layers(net, patterns)
    if rank < 1:
        raise ValueError(f"add_adapters(rank={rank}): the rank of adapters is at least 1")
    for path, layer in layers.items():
        if isinstance(layer, _Adapted) or hasattr(layer.weight, "layout"):
            raise ValueError(f"'{path}' is sharded, or has an adapter: call add_adapters() once, before shard()")
    is_frozen = not net.trainable_params()
    for parameter in net.get_parameters():  # checkpoints leave out what is frozen here: statistics were before
        parameter.requires_grad, parameter.is_base = False, is_frozen or parameter.requires_grad
    for path, layer in layers.items():
        (rows, columns), dtype = layer.weight.shape, layer.weight.dtype
        layer.__class__ = _adapted_class(type(layer))
        layer.adapter_scale = (rank if alpha is None else alpha) / rank
        layer.adapter_dropout = nn.Dropout(p=dropout).set_train(layer.training) if dropout else None
        with DeviceCtx("meta") if layer.weight.is_meta else nullcontext():
            low = initializer(Uniform(columns**-0.5), (rank, columns), dtype), initializer("zeros", (rows, rank), dtype)
            layer.lora_A, layer.lora_B = (Parameter(each, name=f"{path}.lora_{end}") for each, end in zip(low, "AB"))
        layer.lora_A.cut_like, layer.lora_B.cut_like = ("weight", (None, 1)), ("weight", (0, None))
        for low in (layer.lora_A, layer.lora_B):
            low.group, low.adapter = "adapter", (rank, rank if alpha is None else alpha, dropout)
    return list(layers)


def merge_adapters(net):
    """Add the adapters to the weights of their layers, and remove them, in place, before `shard()`: their paths.

    All weights stay frozen.

    Raises:
        ValueError: a net that is sharded.
    """
    layers = {path: cell for path, cell in net.cells_and_names() if isinstance(cell, _Adapted)}
    for path, layer in layers.items():
        if hasattr(layer.weight, "layout"):
            raise ValueError(f"'{path}' is sharded: merge before shard(), or its checkpoint by the command convert")
        added = ops.matmul(layer.lora_B, layer.lora_A) * layer.adapter_scale
        layer.weight.set_data(ops.add(layer.weight, ops.cast(added, layer.weight.dtype)))
        layer.__class__ = type(layer).__mro__[2]
        for name in ("lora_A", "lora_B"):
            del parameters_of(layer)[name]
    for parameter in net.get_parameters():
        parameter.is_base = False
    return list(layers)
