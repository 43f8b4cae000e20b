"""Rules of fused attention: batch and heads are parallel, sequences and head size are whole.

The group of heads is the major factor of the query's heads, and the only one of the key's and value's. Arguments of an
operator are told apart by their places, its primitive's attributes behind its tensors: see `_attention`.
"""

from dataclasses import replace
from functools import partial

from mindformers_core.batches import chunk_length
from mindformers_core.hints import nearest
from mindformers_core.operators.registry import NO_GRADIENT, register_operator
from mindformers_core.operators.rules.dims import equation
from mindformers_core.operators.signature import LocalCall, TensorMeta, tensors_in, whole_signature
from mindformers_core.operators.visible_blocks import visible_part
from mindformers_core.operators.words import word

_LAYOUTS = ("BSH", "BNSD", "SBH", "BSND", "TND")


def attention_operations(sizes):
    """Two products of all scores, whatever is masked, as formulas of MFU count: see `Signature.part`."""
    scores = sizes.get("b", 1) * sizes["g"] * sizes["r"] * sizes["s"] * sizes["t"]
    return scores * 2 * (sizes["d"] + sizes["v"])


def _attention(args, heads, layout, masks=(), lengths=(), groups=None, **results):
    """The `Signature` of an attention.

    Args:
        args: of the operator; query, key and value come first, the latter two also as lists of one tensor.
        heads, groups, layout: places of the numbers of heads, and of the input's layout, among them.
        masks: places of tensors (rows, columns), (batch, rows, columns) or (batch, heads, rows, columns).
        lengths: places of numbers for every example: a tensor, or a tuple, for which the batch is whole.
        results: `before`, `after`: what the outputs before and after the attention are, as dims by letter.

    Other tensors (of a quantised cache, or of pages) are whole, and then all is.
    """
    layout = args[layout] if len(args) > layout else 0
    layout = word("input_layout", layout)
    if layout not in _LAYOUTS:
        raise ValueError(f"input layout {layout!r} is not one of {', '.join(_LAYOUTS)}")
    tensors = [_alone(each) for each in args[:3]]
    sizes = _sizes(layout, *tensors, args[heads])
    inputs = [_dims(layout, "s", "g*r", "d"), _dims(layout, "t", "g", "d"), _dims(layout, "t", "g", "v")]
    parallel = {"b", "g", "r"}
    for place, given in enumerate(args[3:], 3):
        if not isinstance(given, TensorMeta):
            parallel -= {"b"} if place in lengths and given is not None and len(given) > 1 else set()
            continue
        tensors.append(given)
        if place in masks:
            inputs.append(_mask(place, given, "b" in sizes))
        elif place in lengths and "b" in sizes and given.shape == (sizes["b"],):
            inputs.append("b")
        else:
            inputs.append(" ".join(f"o{place}.{dim}" for dim in range(given.ndim)))
            parallel -= {"b"} if place in lengths else parallel if given.ndim else set()
    rows = "s g*r" if layout == "TND" else "b g*r s"
    known = {"eight": f"{rows} eight", "one": f"{rows} 1", "none": "1", "empty": "empty", "scalar": ""}
    before, after = ([known[name] for name in results.get(part, ())] for part in ("before", "after"))
    outputs = (*before, _dims(layout, "s", "g*r", "v"), *after)

    def localize(local, shapes):
        own = shapes[len(before)]
        count = own[layout.index("N")] if "N" in layout else own[layout.index("H")] // sizes["v"]
        local = (*local[:heads], count, *local[heads + 1 :])
        if groups is None or not local[groups]:
            return local
        return (*local[:groups], max(1, count * sizes["g"] // args[heads]), *local[groups + 1 :])

    plain = equation(
        f"{', '.join(inputs)} -> {', '.join(outputs)}", *tensors, sizes=sizes | {"eight": 8, "empty": 0},
        reduced={}, local=LocalCall(localize=localize),
    )  # fmt: skip
    return replace(plain, whole=frozenset(plain.sizes) - parallel)


def _alone(given):
    """The tensor of a list of one."""
    if isinstance(given, (tuple, list)) and len(given) == 1:
        (given,) = given
    if not isinstance(given, TensorMeta):
        raise ValueError(f"{given!r} is no tensor: key and value of all examples have to be one")
    return given


def _dims(layout, sequence, heads, size):
    """The factors of a tensor's dims, as in an equation. `H` merges heads and their size."""
    names = {"B": "b", "S": sequence, "T": sequence, "N": heads, "D": size, "H": f"{heads}*{size}"}
    return " ".join(names[letter] for letter in layout)


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
    sizes |= {"v": size[2].get("D") or size[2]["H"] // groups}
    return sizes | ({"b": size[0]["B"]} if "B" in size[0] else {})


def _mask(place, given, batched):
    """The factors of a mask (rows, columns), (batch, rows, columns) or (batch, heads, rows, columns), or of ones."""
    if not 2 <= given.ndim <= 4:
        raise ValueError(f"mask {place} {given.shape} has not 2 to 4 dims")
    outer = ("b" if batched else "1", "g*r")[: given.ndim - 2]
    outer = ["1" if size == 1 else names for names, size in zip(outer, given.shape)]
    return " ".join([*outer, f"rows{place}", f"columns{place}"])


def key_length(args):
    """The length of the keys of a call of `FlashAttentionScore`, whose sequences are whole."""
    layout = word("input_layout", args[16] if len(args) > 16 else 0)
    return args[1].shape[layout.index("T" if layout == "TND" else "S")]


@register_operator("FlashAttentionScore", operations=attention_operations, algorithms=("attention_dropout",))
def flash_attention(*args):
    """Softmax's maxima and sums, an unused output, and the attention. Dropped scores are those of one card."""
    found = _attention(args, 10, 16, (3, 4, 6), (7, 8, 9), before=("eight", "eight", "none"))
    keep_prob, length = args[11] if len(args) > 11 else 1.0, found.sizes["t"]
    if keep_prob == 1 or args[4] is not None:
        return found
    if "b" not in found.sizes or length % 8:
        raise ValueError(
            f"keep_prob={keep_prob} needs a drop_mask where keys are of {length} tokens, or of several examples in one "
            "dim (TND): eight of them share a byte of the mask"
        )
    return replace(found, run="attention_dropout")


@register_operator("RingAttentionUpdate", operations=6)
def ring_attention_update(*args):
    """The attention over two parts of the keys, from those of each with softmax's maxima and sums (layout SBH)."""
    part = "s b h*D, b h s E, b h s E"
    return equation(f"{part}, {part} -> {part}", *tensors_in(args))


@register_operator("SpeedFusionAttention", operations=attention_operations)
def speed_fusion_attention(*args):
    """Attention, softmax's maxima and sums, and a seed. Where the device draws which scores it drops, all is whole."""
    after = ("eight", "eight", "empty", "scalar", "scalar", "scalar")
    found = _attention(args, 3, 4, (7, 9), (15, 16, 17), after=after)
    is_drawn = len(args) > 11 and args[11] != 1
    return replace(found, whole=frozenset(found.sizes)) if is_drawn else found


_INFERENCE = ("PromptFlashAttention", 12, 16, (3, 6), (4, 5), 17), ("IncreFlashAttention", 15, 16, (3, 5), (4,), 18)
for _name, *_places in _INFERENCE:  # of prompts, and of one more token of each example
    _rule = partial(lambda places, *args: _attention(args, *places), tuple(_places))
    register_operator(_name, gradient=NO_GRADIENT, operations=attention_operations)(_rule)


@register_operator("FusedInferAttentionScore", gradient=NO_GRADIENT, operations=attention_operations)
def fused_infer_attention(*args):
    """The attention of prompts or of one more token, for inference, and the logarithm of softmax's sums."""
    return _attention(args, 24, 28, (3, 4), (5, 6), 29, after=("one" if args[34] else "none",))


_RING, _SEEN = {("s", "t"): "attention_ring"}, {("s", "t"): "attention_seen"}
_GATHER, _MERGE = {"s": "attention_gather"}, {"t": "attention_merge"}
_PLACES = 2**24  # that float32 tells apart, in which masks are computed
_ANY = {"offers": (("g",),), "distributed": _GATHER | _MERGE}
_WAYS = {  # of attention to a cut sequence -> attributes of its `Signature`, and further factors that are whole
    "gather": ({"distributed": _GATHER}, ("t",)),
    "ring": ({"joint": _RING}, ("s", "t")),
    "all_to_all": ({"offers": (("g",), ("r",))}, ("s", "t")),
    "auto": (_ANY | {"joint": _RING}, ()),
}
# where it is known before a call that some keys aren't seen: what a ring costs, without sending keys a second time
_WAYS_OF_PARTS = _WAYS | {"gather": ({"joint": _SEEN}, ("s", "t")), "auto": (_ANY | {"joint": _SEEN}, ())}


def check_attention(query, key, value, ranges, order, algorithm):
    """Raise `ValueError` where arguments of `attention` don't fit each other.

    Args:
        query, key, value: their shapes.
        ranges: the shapes of `first`, `last`, `own` and `places`.
        order, algorithm: as of `attention`.
    """
    heads, groups = query[2], key[2]
    if heads % groups:
        raise ValueError(f"{heads} heads of query {query} don't divide by the {groups} of key {key}")
    if value[:3] != key[:3] or key[0] != query[0]:
        raise ValueError(f"value {value} should have rows, length and heads of key {key}, and both the rows of {query}")
    lengths = (query[1],) * 3 + (key[1],)
    for name, shape, length in zip(("first", "last", "own", "places"), ranges, lengths):
        if tuple(shape) not in ((1, length), (query[0], length)):
            raise ValueError(
                f"{name} {shape} of attention should be (1, {length}) or ({query[0]}, {length}): query {query}, "
                f"key {key}"
            )
    if key[1] > _PLACES:
        raise ValueError(f"key {key} has {key[1]:,} places: masks tell {_PLACES:,} apart, in float32")
    if algorithm not in _WAYS:
        raise ValueError(
            f"unknown algorithm {algorithm!r}: choose one of {', '.join(_WAYS)}{nearest(algorithm, _WAYS)}"
        )
    if order is not None and sorted(order) != list(range(len(order))):
        raise ValueError(f"order {order} of attention should have each of 0 … {len(order) - 1} once")
    if order is not None and query[1] != key[1]:
        raise ValueError(
            f"attention with order {order} takes queries and keys of one length, not query {query} and key {key}: "
            "leave out order"
        )


def ranged_attention(
    query, key, value, first, last, places, scale, order=None, reach=(None, None), exact=False, algorithm="auto",
    drop=0.0, own=None, draws=None,
):  # fmt: skip
    """The `Signature` of the operator `Attention`.

    Batch and heads are parallel. Where queries are cut, keys are gathered, or all go round in a ring, or an axis cuts
    heads in their place; where keys alone are, outputs are merged.
    """
    row = {1: "1"}
    texts = [f"{row.get(x.shape[0], 'b')} {dim}" for x, dim in ((first, "s"), (last, "s"), (places, "t"))]
    ranges = first.shape, last.shape, own.shape if drop else first.shape, places.shape
    check_attention(query.shape, key.shape, value.shape, ranges, order, algorithm)
    heads, groups = query.shape[2], key.shape[2]
    tensors = query, key, value, first, last, places
    if drop:
        texts += [f"{row.get(own.shape[0], 'b')} s", "b g*r N"]
        tensors = *tensors, own, draws
    inputs = f"b s g*r d, b t g d, b t g v, {', '.join(texts)}"
    sizes, part = {"g": groups, "r": heads // groups}, 1.0
    if order is not None:
        chunk_length(order, query.shape[1])
        part = visible_part(query.shape[1], reach)
    ways, whole = (_WAYS_OF_PARTS if part < 1 else _WAYS)[algorithm]
    plain = equation(f"{inputs} -> b s g*r v, b g*r s", *tensors, sizes=sizes, whole=("d", "v", *whole), reduced={})
    if algorithm == "all_to_all":
        text = (
            "attention by all_to_all exchanges the sequence for heads, but the axis divides neither the "
            f"{groups} of key {key.shape} nor, where a rank has one of these, the {heads // groups} of query "
            f"{query.shape} for it: use gather, ring or auto, or copies of the heads of key and value"
        )
        ways = ways | {"undivided": dict.fromkeys(("s", "t"), text)}
    return replace(plain, yielding=tuple(range(1, len(tensors))), part=part, **ways)


def attention_part(output, sums, query, both, *others):
    """The `Signature` of an inner operator of its algorithms, `add_part`: all is whole, and is one rank's."""
    chunks, batch, length, heads, size = query.shape
    shapes = (chunks, batch, length, heads, both.shape[4] - size), (chunks, batch, heads, length)
    return whole_signature(tensors_in((output, sums, query, both, *others)), shapes)


def attention_part_gradient(query, both, *others):
    """Likewise of `part_gradient`."""
    return whole_signature(tensors_in((query, both, *others)), (query.shape, both.shape))


def attention_to_chunks(query, both, table, *others):
    """Likewise of `attend_chunks`."""
    batch, length, heads, size = query.shape
    shapes = (batch, length, heads, both.shape[4] - size), (batch, heads, length)
    return whole_signature(tensors_in((query, both, table, *others)), shapes)
