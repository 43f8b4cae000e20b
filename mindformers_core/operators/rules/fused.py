"""Rules of fused operators that decoders call on accelerators: attention, gates and rotary embedding."""

import math

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import as_dim, dim_names, unary
from mindformers_core.operators.rules.elementwise import elementwise
from mindformers_core.operators.saved import INPUTS, UNMEASURED
from mindformers_core.operators.signature import Signature, TensorMeta

_LAYOUTS = ("BSH", "BNSD", "SBH", "BSND", "TND")  # by the number that MindSpore gives them
_HEAD_NUM = 10  # place among the operator's arguments


def _operations(sizes):
    """Two products, a scale and a softmax, of all scores, whatever is masked."""
    scores = sizes.get("b", 1) * sizes["g"] * sizes["r"] * sizes["s"] * sizes["t"]
    return scores * (2 * sizes["d"] + 2 * sizes["v"] + 1 + 5)


@register_operator("FlashAttentionScore", saves=UNMEASURED, operations=_operations)
def flash_attention(query, key, value, real_shift=None, drop_mask=None, padding_mask=None, attn_mask=None, prefix=None,
                    actual_seq_qlen=None, actual_seq_kvlen=None, head_num=1, keep_prob=1.0, *others):  # fmt: skip
    """Softmax's maxima and sums, an unused output, and the attention. Heads of `query` share those of `key` in groups.

    Batch and heads are parallel, sequences and head size are whole.

    `others` are the scale, two numbers of tokens, the precision, the input's layout and the kind of mask. The group of
    heads is the major factor of the query's heads, and the only one of the key's and value's.
    """
    unfit = {"drop_mask": drop_mask, "padding_mask": padding_mask, "prefix": prefix}
    unfit = sorted(name for name, given in unfit.items() if given is not None)
    if unfit or keep_prob != 1:
        raise ValueError(f"{', '.join(unfit) or f'keep_prob={keep_prob}'} is not available for distributed tensors")
    layout = others[4] if len(others) > 4 else 0
    layout = _LAYOUTS[layout] if isinstance(layout, int) and layout < len(_LAYOUTS) else layout
    if layout not in _LAYOUTS:
        raise ValueError(f"input layout {layout!r} is not one of {', '.join(_LAYOUTS)}")
    sizes = _sizes(layout, query, key, value, head_num)
    inputs = [_dims(layout, "s", ("g", "r"), "d"), _dims(layout, "t", ("g",), "d"), _dims(layout, "t", ("g",), "v")]
    for tensor, dims in zip((query, key, value), inputs):
        if tensor.shape != tuple(math.prod(sizes[factor] for factor in factors) for factors in dims):
            raise ValueError(f"query {query.shape}, key {key.shape} and value {value.shape} don't fit {layout}")
    for name, given in {"real_shift": real_shift, "attn_mask": attn_mask}.items():
        inputs += [] if given is None else [_mask(name, given, sizes)]
    for number, given in enumerate((actual_seq_qlen, actual_seq_kvlen)):
        if isinstance(given, TensorMeta):
            inputs.append(((f"lengths{number}",),))
            sizes[f"lengths{number}"] = given.shape[0]
    heads = (("s",), ("g", "r"), ("eight",)) if layout == "TND" else (("b",), ("g", "r"), ("s",), ("eight",))
    outputs = (heads, heads, ((),), _dims(layout, "s", ("g", "r"), "v"))

    def localize(args, shapes):
        return (*args[:_HEAD_NUM], shapes[0][1], *args[_HEAD_NUM + 1 :])

    return Signature(tuple(inputs), outputs, sizes, whole=frozenset(sizes) - {"b", "g", "r"}, localize=localize)


def _dims(layout, sequence, heads, size):
    """The factors of a tensor's dims. `H` merges heads and their size."""
    names = {"B": ("b",), "S": (sequence,), "T": (sequence,), "N": heads, "D": (size,), "H": (*heads, size)}
    return tuple(names[letter] for letter in layout)


def _sizes(layout, query, key, value, head_num):
    """The sizes of all factors, as `query`, `key` and `value` have them."""
    if any(tensor.ndim != len(layout) for tensor in (query, key, value)):
        raise ValueError(f"query {query.shape}, key {key.shape} and value {value.shape} don't have the dims {layout}")
    size = dict(zip(layout, query.shape)), dict(zip(layout, key.shape)), dict(zip(layout, value.shape))
    heads = size[0].get("N", head_num)
    head_size = size[0].get("D") or size[0]["H"] // head_num
    groups = size[1].get("N") or size[1]["H"] // max(head_size, 1)
    if heads != head_num or groups < 1 or heads % groups:
        raise ValueError(f"{head_num} heads in query {query.shape} don't fit {groups} in key {key.shape} ({layout})")
    sequence = "T" if layout == "TND" else "S"
    sizes = {"s": size[0][sequence], "t": size[1][sequence], "g": groups, "r": heads // groups, "d": head_size}
    sizes |= {"v": size[2].get("D") or size[2]["H"] // groups, "eight": 8}
    return sizes | ({"b": size[0]["B"]} if "B" in size[0] else {})


def _mask(name, given, sizes):
    """The factors of a mask (rows, columns) or (batch or 1, heads or 1, rows, columns); enters those of its own."""
    rows = (f"{name}_rows",), (f"{name}_columns",)
    sizes |= {factors[0]: size for factors, size in zip(rows, given.shape[-2:])}
    if given.ndim == 2:
        return rows
    wanted = sizes.get("b", 1), sizes["g"] * sizes["r"]
    if given.ndim != 4 or any(size not in (1, all_) for size, all_ in zip(given.shape, wanted)):
        raise ValueError(f"{name} {given.shape} doesn't fit {wanted[0]} examples of {wanted[1]} heads")
    outer = (("b",) if "b" in sizes else (), ("g", "r"))
    return (*(factors if size == all_ else () for factors, size, all_ in zip(outer, given.shape, wanted)), *rows)


@register_operator("Swiglu", saves=UNMEASURED, operations=5)
@register_operator("GLU", saves=INPUTS, operations=4)
def gated(x, dim=-1):
    """One half of `dim` times a function of the other: the halves of a shard are not shards of the halves."""
    place, names = as_dim(dim, x.ndim), dim_names(x)
    if x.shape[place] % 2:
        raise ValueError(f"dim {place} of {x.shape} can't be halved")
    output = (*names[:place], ("half",), *names[place + 1 :])
    return unary(x, output, sizes={"half": x.shape[place] // 2}, whole=(place,))


@register_operator("RotaryPositionEmbedding", saves=UNMEASURED, operations=3)
def rotary_embedding(x, cos, sin, mode=0):
    """Pairs of elements of the last dim, rotated by angles that are broadcast to `x`: linear in `x`."""
    plain = elementwise(x, cos, sin)
    if plain.outputs != (dim_names(x),) or any(angle.shape[-1] != x.shape[-1] for angle in (cos, sin)):
        raise ValueError(f"angles {cos.shape} and {sin.shape} don't fit {x.shape}")
    return Signature(plain.inputs, plain.outputs, plain.sizes, whole=frozenset({f"d{x.ndim - 1}"}), linear=({0},))
