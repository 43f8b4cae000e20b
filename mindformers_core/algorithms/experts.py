"""The experts of a layer: the computation of one rank on its tokens, of those choices that its experts have.

Rows of tokens are put in the order of their experts, so that each expert multiplies its own at once (Gale et al.,
"MegaBlocks", arXiv 2211.15841): in PyNative and in graphs on CPU as many as there are, in graphs of other devices,
whose shapes are static, in blocks of rows, each of one expert.
"""

from math import prod

import numpy as np
from mindspore import Tensor, dtype as mstype, mint, ops

from mindformers_core.algorithms.compiled import has_values, in_graph, on_cpu
from mindformers_core.communication.local import filled, first_numbers

ACTIVATIONS = {"silu": ops.silu, "gelu": ops.gelu, "relu": ops.relu}
_product = ops.BatchMatMul()
_by_rows = ops.BatchMatMul(False, True)
_TWICE = "has chosen an expert twice: its choices have to differ"
_dense = ops.MatMul(False, True)  # in a graph of dynamic shapes twice as fast as `ops.dense`


def apply_experts(
    x, ids, weights, gate_up, down, gate_up_bias=None, down_bias=None, activation="silu", capacity=None
):  # fmt: skip
    """The operator `Experts`, whose arguments its function for models describes."""
    if capacity is not None:
        ids = within_capacity(ids, gate_up.shape[0], capacity)
    rows, choices = ops.reshape(x, (-1, x.shape[-1])), ops.reshape(ids, (-1, ids.shape[-1]))
    found = expert_rows(rows, choices, gate_up, down, gate_up_bias, down_bias, activation)
    return ops.reshape(combined(found, weights), x.shape)


def combined(found, weights):
    """The sums (rows, H) of each token's outputs (rows, K, H), in the order of its choices, with their weights."""
    weights = ops.cast(ops.reshape(weights, (-1, 1, found.shape[1])), found.dtype)
    return ops.reshape(_product(weights, found), (-1, found.shape[2]))


def within_capacity(ids, count, capacity):
    """Ids (…, K) of `count` experts, -1 in the place of each that is one too many for its expert in its group.

    First choices of a group's tokens come before second ones (Lepikhin et al., "GShard", arXiv 2006.16668).

    Args:
        ids, count: the choices, -1 for none, and the number of experts.
        capacity: (most choices of an expert in a group, number of tokens of a group).
    """
    most, size = capacity
    if on_cpu() and has_values(ids):
        _check_ids(ids.asnumpy(), count)
    grouped = ops.reshape(ids, (-1, size, ids.shape[-1]))
    groups, _, each = grouped.shape
    ordered = ops.reshape(ops.transpose(grouped, (0, 2, 1)), (groups, -1))
    first = ops.reshape(first_numbers(groups) * count, (-1, 1))
    keys = ops.where(ops.less(ordered, 0), groups * count, ordered + first)
    places, _ = ranked(ops.reshape(keys, (-1,)), groups * count + 1)
    places = ops.transpose(ops.reshape(places, (groups, each, size)), (0, 2, 1))
    return ops.where(ops.less(ops.reshape(places, ids.shape), most), ids, -1)


def places_of_choices(ids, owners, ranks, own, most, capacity):
    """Where the choices (rows, K) of a rank's tokens are among what it sends to experts of all `ranks`.

    Args:
        ids, capacity: as of the operator `Experts`.
        owners: int32 (experts + 1,): for -1 and every expert, `own` times the number of the rank that has it, plus its
            own number there; `ranks * own` where no rank that gets tokens has it.
        ranks, own: how many there are, and how many experts each has.
        most: so many choices at most go to one rank.

    Returns:
        int32 (places,), the number of the choice in each place, or 0 in that of none; int32 (rows, K), the place of
        each choice, or, of those that go to no rank, how many there are; int32 (ranks, own), how many choices go to
        each expert. Places are as many as choices, first those of the first rank's first expert; with a capacity
        `most` for each rank.

    Raises:
        ValueError: on CPU, in graphs without a capacity only: an id that no expert has, or a token that has chosen an
            expert twice, for whose rank there is then no room.
    """
    if capacity is not None:
        ids = within_capacity(ids, owners.shape[0] - 1, capacity)
    if on_cpu() and has_values(ids):
        found = _places_by_host(ids.asnumpy(), owners.asnumpy(), ranks, own, most, capacity is None)
        return tuple([Tensor(each) for each in found])
    if in_graph() and on_cpu() and capacity is None:
        return _places_in_graph()(ops.stop_gradient(ids), owners, filled((ranks, own), 0), most)
    total, none = ids.shape[0] * ids.shape[1], ranks * own
    keys = ops.gather(owners, ops.reshape(ids, (-1,)) + 1, 0)
    places, counts = ranked(keys, none + 1)
    sent = ops.reshape(counts[:none], (ranks, own))
    if capacity is None:
        room, first = total, ops.cumsum(counts, 0) - counts
    else:
        room = ranks * most
        first = ops.cumsum(sent, 1) - sent + ops.reshape(first_numbers(ranks) * most, (-1, 1))
        first = ops.cat((ops.reshape(first, (-1,)), filled(1, room)), 0)
    numbered = ops.minimum(places + ops.gather(first, keys, 0), room)
    taken = ops.tensor_scatter_elements(filled(room + 1, 0), numbered, first_numbers(total), 0)[:-1]
    return taken, ops.reshape(ops.where(ops.less(keys, none), numbered, room), ids.shape), sent


def _check_ids(ids, count):
    if ids.size and ids.max() >= count:
        raise ValueError(f"experts: ids {ids.shape} have {ids.max()}, but experts are 0 … {count - 1}, and -1 is none")


def _places_by_host(ids, owners, ranks, own, most, in_turn):
    """`places_of_choices` where the host's reads cost nothing, in a tenth of the operators' time."""
    _check_ids(ids, owners.size - 1)
    keys = owners[ids.reshape(-1) + 1]
    order, counts = np.argsort(keys, kind="stable"), np.bincount(keys, minlength=ranks * own + 1)
    sent = counts[:-1].reshape(ranks, own)
    of_ranks = sent.sum(1)
    if of_ranks.max() > most:
        raise ValueError(f"experts: a token of ids {ids.shape} {_TWICE}")
    chosen = order[: of_ranks.sum()]
    if in_turn:
        taken, numbered = order.astype(np.int32), np.arange(chosen.size)
    else:
        taken = np.zeros(ranks * most, np.int32)
        numbered = np.arange(chosen.size) + np.repeat(np.arange(ranks) * most - of_ranks.cumsum() + of_ranks, of_ranks)
        taken[numbered] = chosen
    places = np.full(keys.size, taken.size, np.int32)
    places[chosen] = numbered
    return taken, places.reshape(ids.shape), sent.astype(np.int32)


@ops.constexpr
def _places_in_graph():
    """The operator of `_places_by_host`, whose third argument has the shape of what is sent."""
    return ops.Custom(
        lambda ids, owners, sent, most: _places_by_host(ids, owners, *sent.shape, most, True),
        lambda ids, owners, sent, most: ([prod(ids)], ids, sent),
        lambda *_: (mstype.int32,) * 3,
        "pyfunc",
    )


def sizes_of_rows(sent, received, most, in_turn):
    """What the host has to know of the experts of a layer, in PyNative by the only read of a device in both passes.

    Args:
        sent, received: int32 (ranks, own), how many rows go to each expert of each rank, and come from each rank for
            each own expert, in this order.
        most: rows at most that come from a rank.
        in_turn: whether in PyNative those rows alone come, not room for all.

    Returns:
        int32 (2, ranks), how many rows go to each rank, and come from each; the same of their way back; and the numbers
        of own experts as ids (rows, 1) of the rows that come, or -1; of none one -1.

    Raises:
        ValueError: in PyNative and on CPU, more rows than `most`, as of a token that has chosen an expert twice.
    """
    both, own = ops.stack((sent, received)), received.shape[1]
    if has_values(both):
        *sizes, ids = _sizes_by_host(both.asnumpy(), most)
        if in_turn:
            ids = ids[ids >= 0] if sizes[0][1].any() else ids[0]
        return tuple([Tensor(each) for each in (*sizes, ids.reshape(-1, 1))])
    if in_graph() and on_cpu():
        return _sizes_in_graph()(both, filled((both.shape[1] * most, 1), 0))
    sizes = ops.cast(ops.sum(ops.cast(both, mstype.float32), 2), mstype.int32)
    ends, places = ops.expand_dims(ops.cumsum(received, 1), 1), ops.reshape(first_numbers(most), (1, -1, 1))
    ids = ops.sum(ops.cast(ops.greater_equal(places, ends), mstype.float32), 2)
    ids = ops.cast(ops.where(ops.less(ids, own), ids, -1.0), mstype.int32)
    return sizes, ops.cat((sizes[1:], sizes[:1]), 0), ops.reshape(ids, (-1, 1))


def _sizes_by_host(both, most):
    """`sizes_of_rows` of what is sent and received, with all ids, as a column."""
    sizes, (_, ranks, own) = both.sum(2, dtype=np.int32), both.shape
    if sizes.max() > most:
        raise ValueError(f"experts: a token {_TWICE}")
    numbers, counts = np.tile([*range(own), -1], ranks), np.hstack((both[1], most - sizes[1:].T))
    return sizes, sizes[::-1].copy(), np.repeat(numbers, counts.reshape(-1)).astype(np.int32).reshape(-1, 1)


@ops.constexpr
def _sizes_in_graph():
    """The operator of `_sizes_by_host`, whose second argument has the shape of the ids."""
    return ops.Custom(
        lambda both, ids: _sizes_by_host(both, len(ids) // both.shape[1]),
        lambda both, ids: (both[:2], both[:2], ids),
        lambda *_: (mstype.int32,) * 3,
        "pyfunc",
    )


def ranked(keys, count):
    """Of each of the int32 `keys` (n,) in 0 … count - 1 its place among equal ones; and how many each key has."""
    order = ops.argsort(keys)
    counts = ops.unsorted_segment_sum(ops.ones_like(keys), keys, count)
    first = ops.cumsum(counts, 0) - counts
    places = first_numbers(keys.shape[0]) - ops.gather(first, ops.gather(keys, order, 0), 0)
    return ops.tensor_scatter_elements(places, order, places, 0), counts


def expert_rows(x, ids, gate_up, down, gate_up_bias, down_bias, activation):
    """What each chosen expert makes of a token: rows (n, H) and ids (n, K) → (n, K, H); zeros where an id is -1."""
    if has_values(ids):
        return _exactly(x, ids, gate_up, down, gate_up_bias, down_bias, activation)
    compiled = _by_sizes if in_graph() and on_cpu() else _by_blocks
    return compiled(x, ops.stop_gradient(ids), gate_up, down, gate_up_bias, down_bias, activation)


def _exactly(x, ids, gate_up, down, gate_up_bias, down_bias, activation):
    """`expert_rows` of known ids: a product for every expert that has any, of its own rows."""
    values = ids.asnumpy()
    _check_ids(values, gate_up.shape[0])
    values = values.reshape(-1)
    order = np.argsort(values, kind="stable")[np.count_nonzero(values < 0) :]
    experts, counts = np.unique(values[order], return_counts=True)
    if not order.size:  # every tensor has a gradient, of zeros
        nothing = sum(ops.sum(each * 0.0) for each in (gate_up, down, gate_up_bias, down_bias) if each is not None)
        return ops.zeros((*ids.shape, x.shape[1]), x.dtype) + ops.expand_dims(x * 0.0, 1) + nothing
    rows = ops.gather(x, Tensor((order // ids.shape[1]).astype(np.int32)), 0)
    parts = ops.split(rows, counts.tolist())
    found = _each(experts.tolist(), parts, gate_up, down, gate_up_bias, down_bias, activation)
    places = np.full(values.size, order.size, np.int32)
    places[order] = np.arange(order.size)
    found = ops.cat([*found, ops.zeros((1, x.shape[1]), x.dtype)], 0)
    return ops.reshape(ops.gather(found, Tensor(places), 0), (*ids.shape, x.shape[1]))


def _each(experts, parts, gate_up, down, gate_up_bias, down_bias, activation):
    """What the `experts`, by their numbers, make of their rows."""
    own = [None if each is None else ops.unstack(each) for each in (gate_up, down, gate_up_bias, down_bias)]
    return [
        _expert(part, *[None if each is None else each[expert] for each in own], activation)
        for expert, part in zip(experts, parts)
    ]


def _expert(rows, gate_up, down, gate_up_bias, down_bias, activation):
    gate, up = [_dense(rows, each) for each in ops.unstack(gate_up)]  # slices of one product would be copied
    if gate_up_bias is not None:
        gate, up = [x + ops.reshape(bias, (1, -1)) for x, bias in zip((gate, up), ops.unstack(gate_up_bias))]
    found = _dense(ACTIVATIONS[activation](gate) * up, down)
    return found if down_bias is None else found + ops.expand_dims(down_bias, 0)


def _by_sizes(x, ids, gate_up, down, gate_up_bias, down_bias, activation):
    """`expert_rows` in graphs whose sizes are data: every expert's rows, and one that nobody takes, as none have no
    gradient."""
    count, total, nothing = gate_up.shape[0], ids.shape[0] * ids.shape[1], ops.zeros((1, x.shape[1]), x.dtype)
    flat = ops.reshape(ids, (-1,))
    keys = ops.cat((ops.where(ops.less(flat, 0), count, flat), first_numbers(count)), 0)
    order = ops.argsort(keys)
    if x.dtype == mstype.float16:  # a token that an expert didn't choose could overflow there: a row of zeros
        x = ops.cat((x, nothing), 0)
    sizes = ops.cast(ops.unsorted_segment_sum(ops.ones_like(keys), keys, count + 1), mstype.int64)
    sizes = [sizes[key].item() for key in range(count + 1)]
    taken = ops.minimum(order // ids.shape[1], x.shape[0] - 1)[: total + count - sizes[count]]  # -1 are last
    parts = mint.split(ops.gather(x, taken, 0), tuple(sizes[:count]), 0)  # `ops.split` looks at sizes, by graphs
    found = _each(range(count), parts, gate_up, down, gate_up_bias, down_bias, activation)
    places = ops.tensor_scatter_elements(order, order, first_numbers(total + count), 0)[:total]
    places = ops.where(ops.less(flat, 0), 0, places + 1)
    return ops.reshape(ops.gather(ops.cat((nothing, *found), 0), places, 0), (*ids.shape, x.shape[1]))


def _by_blocks(x, ids, gate_up, down, gate_up_bias, down_bias, activation):
    """`expert_rows` with static shapes: every expert's rows are filled up to whole blocks."""
    count, total, hidden = gate_up.shape[0], ids.shape[0] * ids.shape[1], x.shape[1]
    size = max(1, -(-total // (2 * count)))
    blocks = min(total, -(-total // size) + count)
    flat = ops.reshape(ids, (-1,))
    keys = ops.where(ops.less(flat, 0), count, flat)
    places, counts = ranked(keys, count + 1)
    needed = (counts[:count] + (size - 1)) // size
    ends = ops.cumsum(needed, 0)
    first = ops.cat((ends - needed, ops.zeros((1,), mstype.int32)), 0) * size
    places = ops.where(ops.less(flat, 0), blocks * size, ops.gather(first, keys, 0) + places)
    taken = ops.zeros((blocks * size + 1,), mstype.int32) + total
    taken = ops.tensor_scatter_elements(taken, places, first_numbers(total), 0)[: blocks * size]
    owners = ops.expand_dims(first_numbers(blocks), 1)
    owners = ops.sum(ops.cast(ops.greater_equal(owners, ops.expand_dims(ends, 0)), mstype.int32), 1)
    owners = ops.minimum(owners, count - 1)  # of blocks that nobody needs
    nothing = ops.zeros((1, hidden), x.dtype)
    rows = ops.gather(ops.cat((x, nothing), 0), taken // ids.shape[1], 0)
    rows = ops.reshape(rows, (blocks, size, hidden))
    inner = down.shape[2]
    both = _by_rows(rows, ops.gather(ops.reshape(gate_up, (count, 2 * inner, hidden)), owners, 0))
    if gate_up_bias is not None:
        both = both + ops.expand_dims(ops.gather(ops.reshape(gate_up_bias, (count, 2 * inner)), owners, 0), 1)
    found = ACTIVATIONS[activation](both[:, :, :inner]) * both[:, :, inner:]
    found = _by_rows(found, ops.gather(down, owners, 0))
    if down_bias is not None:
        found = found + ops.expand_dims(ops.gather(down_bias, owners, 0), 1)
    found = ops.cat((ops.reshape(found, (-1, hidden)), nothing), 0)
    return ops.reshape(ops.gather(found, places, 0), (*ids.shape, hidden))
