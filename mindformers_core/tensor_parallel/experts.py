"""The experts of a layer as one operator with a rule of its own, and their algorithm: tokens go to experts and back.

Expert parallelism is that of GShard (Lepikhin et al., arXiv 2006.16668): where mesh axes cut tokens and experts
together, each rank sends a row for each choice to the rank that has the expert, and gets it back. In graphs shapes are
static: a rank may choose the experts of one other rank for all its tokens, unless experts have a capacity.
"""

from dataclasses import replace

import numpy as np
from mindspore import Tensor, ops

from mindformers_core.algorithms import experts as parts
from mindformers_core.algorithms.custom import custom_operator
from mindformers_core.hints import nearest
from mindformers_core.layout import Layout
from mindformers_core.operators import Algorithm, register_algorithm, register_operator
from mindformers_core.operators.registry import NO_GRADIENT
from mindformers_core.operators.rules import experts as rules

_SOURCE = "mindformers_core.algorithms.experts"
_MOST = 2**30 - 1  # rows of what ranks send, so that their numbers, filled up to blocks, are int32
_COUNTED = 2**24  # rows for one rank, up to which float32 counts
_places = custom_operator("ExpertPlaces", parts.places_of_choices)
_sizes = custom_operator("ExpertSizes", parts.sizes_of_rows)
_rows = custom_operator("ExpertRows", parts.expert_rows)
_combined = custom_operator("ExpertSum", parts.combined)
_kept = custom_operator("ExpertCapacity", parts.within_capacity)


def experts(x, ids, weights, gate_up, down, gate_up_bias=None, down_bias=None, activation="silu", capacity=None):
    """The sum of what its chosen experts make of each token, with the weights of the choice.

    An expert e gives `down[e] @ (activation(gate_up[e, 0] @ x) * (gate_up[e, 1] @ x))`, with biases where there are.
    An expert that nobody chose has a gradient of zeros.

    Args:
        x: tokens (…, H).
        ids: int32 (…, K), the experts that each token has chosen, 0 … E - 1, no one twice; -1: none.
        weights: (…, K), of the choices.
        gate_up: (E, 2, I, H), of the gate and of what it multiplies.
        down: (E, H, I).
        gate_up_bias, down_bias: (E, 2, I) and (E, H). Default: none.
        activation: `"silu"` (default), `"gelu"` or `"relu"`.
        capacity: (most, size): of each group of `size` consecutive tokens of a row, an expert takes `most` choices at
            most, first choices before second ones; others give nothing. Groups are never cut, so that it is the same
            on every mesh. Default: none, and nothing is dropped.

    Returns:
        (…, H), of the dtype of `x`.

    Raises:
        ValueError: shapes that don't fit, another activation, or, where the host reads them, an id that no expert has,
            or that a token has twice.
    """
    rules.check_groups(x.shape, capacity)
    if activation not in parts.ACTIVATIONS:
        known = ", ".join(parts.ACTIVATIONS)
        hint = nearest(activation, parts.ACTIVATIONS)
        raise ValueError(f"unknown activation {activation!r} of experts: choose one of {known}{hint}")
    return _experts(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation, capacity)


def within_capacity(ids, count, capacity):
    """The choices (…, K) of `count` experts that `experts` keeps with a capacity, -1 in the place of others."""
    rules.check_groups(ids.shape, capacity)
    return _kept(ids, count, capacity)


def own_experts(operator, args, context):
    """The experts of a rank, for its own tokens, or for the choices of all ranks that have other tokens."""
    x, ids, weights, gate_up, down, *biases, activation, capacity = args
    ids = ops.maximum(ids, -1)  # of any number below 0 nothing is computed on one card
    axes, rows = context.layouts[3].axes[0], context.layouts[0].cut_axes
    joint, own = tuple(axis for axis in axes if axis in rows and context.mesh.axis_size(axis) > 1), gate_up.shape[0]
    owners = _owners(context, axes, joint, own)
    if not joint:
        local = ops.gather(Tensor(np.where(owners < own, owners, -1)), ids + 1, 0)
        return operator(x, local, weights, gate_up, down, *biases, activation, capacity)
    choices, tokens = ops.reshape(ids, (-1, ids.shape[-1])), ops.reshape(x, (-1, x.shape[-1]))
    count, each = choices.shape
    most = count * min(each, own)
    if capacity is not None:
        most = min(most, count // capacity[1] * capacity[0] * own)
    context = replace(context, axes=joint)
    for room, limit, ranks in ((most, _COUNTED, "each of"), (context.count * most, _MOST, "all")):
        if room > limit:
            raise ValueError(
                f"experts: room for {room} rows of {ranks} {context.count} ranks is more than {limit} rows, which are "
                f"counted: give a capacity, or a smaller batch than x {tuple(x.shape)} on a rank"
            )
    taken, back, sent = _places(choices, Tensor(owners), context.count, own, most, capacity)
    there, home, local = _sizes(sent, _exchanged(context, sent), most, capacity is None)
    rows, given = taken.shape[0], ops.gather(tokens, taken // each, 0)  # in the place of no choice, any
    given = context.dispatched(given, most, there) if capacity is None else _exchanged(context, given)
    found = _rows(given, local, gate_up, down, *biases, activation)
    found = ops.reshape(found, (-1, x.shape[-1]))
    if capacity is None:  # where choices were not sent, the last row is of zeros
        found, back = context.combined_rows(found, rows, most, home), ops.minimum(back, rows - 1)
    else:
        found = ops.cat((_exchanged(context, found), ops.zeros((1, x.shape[-1]), x.dtype)), 0)
    found = ops.gather(found, back, 0)
    return ops.reshape(_combined(found, weights), x.shape)


def _owners(context, axes, joint, own):
    """As of `places_of_choices`: who has it, of those ranks that a rank sends tokens to, and as which one."""
    mesh, count = context.mesh, context.shapes[3][0]
    blocks = np.arange(count) // own
    places = dict(zip(axes, np.unravel_index(blocks, [mesh.axis_size(axis) for axis in axes])))
    here = np.ones(count, bool)
    for axis in axes:
        here &= (axis in joint) | (places[axis] == mesh.group_index(context.rank, (axis,)))
    owner = np.zeros(count, int)
    for axis in joint:
        owner = owner * mesh.axis_size(axis) + places[axis]
    none = mesh.axis_size(*joint) * own
    return np.hstack([none, np.where(here, owner * own + np.arange(count) % own, none)]).astype(np.int32)


def _exchanged(context, x):
    """As many rows for every rank, as every rank has sent them."""
    others = [()] * (x.ndim - 1)
    source, target = (Layout.on(context.mesh, [*dims, *others]) for dims in ((context.axes, ()), ((), context.axes)))
    return ops.reshape(context.redistribute(ops.reshape(x, (1, *x.shape)), source, target), x.shape)


register_algorithm(
    Algorithm("experts", "tokens go to their experts' ranks and back; or each rank's own experts", True, own_experts)
)
register_operator(
    "Experts", source=f"{_SOURCE}.apply_experts", operations=rules.expert_operations, algorithms=("experts",)
)(rules.routed_experts)
for _name, _source, _rule, _facts in (  # of the algorithm, and of capacities
    ("ExpertPlaces", "places_of_choices", rules.expert_places, {"gradient": NO_GRADIENT}),
    ("ExpertSizes", "sizes_of_rows", rules.expert_sizes, {"gradient": NO_GRADIENT, "on_host": True}),
    ("ExpertRows", "expert_rows", rules.expert_rows, {}),
    ("ExpertSum", "combined", rules.expert_sum, {}),
    ("ExpertCapacity", "within_capacity", rules.kept_choices, {"gradient": NO_GRADIENT}),
):
    register_operator(_name, source=f"{_SOURCE}.{_source}", **_facts)(_rule)
_experts = custom_operator("Experts", parts.apply_experts)
