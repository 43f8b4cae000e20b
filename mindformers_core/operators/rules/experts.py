"""Rules of a mixture of experts: values count the tokens of a group, which are whole; rows and columns may be cut."""

from dataclasses import replace
from math import prod

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import equation
from mindformers_core.operators.rules.indexing import check_indices
from mindformers_core.operators.signature import TensorMeta, tensors_in, whole_signature


@register_operator("Gmm", "GmmV2")
def grouped_product(x, weight, bias=None, group_list=None, group_type=0, group_list_type=0, *, partial=True):
    """The product of each group's rows and its own matrix; where dims that are summed have groups, a matrix for each.

    A cut inner dim gives terms of a sum, unless they aren't `partial`, since something follows that isn't linear.
    """
    texts = {0: ("M k", "E k n", "E n"), 2: ("k M", "M n", "E n")}.get(group_type)
    if texts is None or len(x) != 1 or len(weight) != 1 or len(bias or ()) > 1:
        raise ValueError("a grouped matmul takes one tensor of tokens, one of weights, and group_type 0 or 2")
    tensors, added = tensors_in((x, weight, bias or (), group_list)), (2,) * bool(bias)
    inputs = (*texts[: 2 + len(added)], *(("E",) if isinstance(group_list, TensorMeta) else ()))
    sizes, text = {} if isinstance(group_list, TensorMeta) else {"E": len(group_list)}, ", ".join(inputs)
    if group_type == 2:
        return equation(f"{text} -> E k n", *tensors, sizes=sizes)
    more = {"added": added, "linear": () if added else ({0}, {1})} if partial else {"reduced": {}, "whole": ("k",)}
    return equation(f"{text} -> M n", *tensors, sizes=sizes, **more)


@register_operator("GroupedMatmulV4")
def grouped_matmul(x, weight, bias=None, scale=None, offset=None, antiquant_scale=None, antiquant_offset=None,
                   pre_token_scale=None, group_list=None, activation_input=None, activation_quant_scale=None,
                   activation_quant_offset=None, split_item=0, group_type=-1, group_list_type=0, act_type=0,
                   output_dtype=None):  # fmt: skip
    """As `grouped_product`, followed by an activation; without quantisation."""
    others = (scale, offset, antiquant_scale, antiquant_offset, pre_token_scale, activation_input)
    if any(given is not None for given in (*others, activation_quant_scale, activation_quant_offset)):
        raise ValueError("a grouped matmul with scales or offsets is not available for distributed tensors")
    if split_item not in (2, 3) or group_list is None:
        raise ValueError("a grouped matmul needs a group_list, and split_item 2 or 3, for one result")
    return grouped_product(x, weight, bias, group_list, group_type, group_list_type, partial=not act_type)


@register_operator("MoeTokenPermute")
def permute_tokens(tokens, indices, num_out_tokens=None, padded_mode=False):
    """Tokens in the order of their experts, once for each, and the places that they come from."""
    check_indices(indices)
    if padded_mode or tokens.ndim != 2 or indices.shape[:1] != tokens.shape[:1]:
        raise ValueError(f"tokens {tokens.shape} of experts {indices.shape}, padded_mode={padded_mode}")
    count = prod(indices.shape)
    sizes = {"R": num_out_tokens or count, "P": count}
    return equation(f"T h, T {'K' * (indices.ndim - 1)} -> R h, P", tokens, indices, sizes=sizes)


@register_operator("MoeTokenUnpermute", "InnerMoeTokenUnpermute")
def unpermute_tokens(permuted, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    """Tokens in their own order: the sum over each token's experts, weighted by `probs`."""
    check_indices(sorted_indices)
    if padded_mode:
        raise ValueError(f"permuted tokens {permuted.shape}, padded_mode={padded_mode}")
    tensors = tensors_in((permuted, sorted_indices, probs))
    sizes = {"T": sorted_indices.shape[0]} if len(tensors) == 2 else {}
    return equation(f"R h, P{', T K' * (len(tensors) - 2)} -> T h", *tensors, sizes=sizes, linear=({0},))


@register_operator("MoeInitRoutingV2")
def init_routing(x, expert_idx, active_num=0, expert_capacity=0, expert_num=0, drop_pad_mode=0, counts=0, before=False):
    """Tokens in the order of their experts, their places, and (`counts`, for experts without a capacity) how many."""
    check_indices(expert_idx)
    if drop_pad_mode or before:
        raise ValueError("MoeInitRoutingV2 with a capacity of experts is not available for distributed tensors")
    total = prod(expert_idx.shape)
    sizes = {"R": min(active_num or total, total), "P": total, "E": expert_num}
    return equation("T h, T K -> R h, P, E, E'", x, expert_idx, sizes=sizes)


def routed_experts(
    x, ids, weights, gate_up, down, gate_up_bias=None, down_bias=None, activation="silu", capacity=None
):  # fmt: skip
    """The `Signature` of the operator `Experts`.

    A cut of the inner dim, or of the experts alone, gives terms of a sum; where an axis cuts tokens and experts
    together, tokens go to their experts' ranks and back.
    """
    check_indices(ids)
    tokens, sizes = _tokens(x, capacity)
    sizes["E"] = gate_up.shape[0]
    biases = [text for text, given in (("e P f", gate_up_bias), ("e H", down_bias)) if given is not None]
    rows, tensors = " ".join(tokens), tensors_in((x, ids, weights, gate_up, down, gate_up_bias, down_bias))
    texts = ", ".join([f"{rows} H", f"{rows} K", f"{rows} K", "e P f H", "e H f", *biases])
    added = () if down_bias is None else (len(tensors) - 1,)
    plain = equation(f"{texts} -> {rows} H", *tensors, sizes=sizes, linear=({2},), added=added)
    together = {(factor.removesuffix("*S"), "e"): "experts" for factor in tokens}
    return replace(plain, sizes=plain.sizes | sizes, joint=together, distributed={"e": "experts"})


def _tokens(x, capacity):
    """The factors of all dims of tokens `x` but the last one, of which groups are whole; and sizes of factors."""
    tokens = [f"t{dim}" for dim in range(x.ndim - 1)]
    if capacity is None:
        return tokens, {}
    check_groups(x.shape, capacity)
    return [*tokens[:-1], "g*S"], {"g": x.shape[-2] // capacity[1], "S": capacity[1]}


def check_groups(shape, capacity):
    """Raise `ValueError` if groups of a capacity, or of none, would go beyond rows of tokens of a shape (…, H)."""
    if capacity is not None and len(shape) > 1 and shape[-2] % capacity[1]:
        raise ValueError(f"groups of {capacity[1]} tokens don't divide x {shape}, which has rows of {shape[-2]}")


def kept_choices(ids, count, capacity):
    """The `Signature` of `within_capacity`: groups of tokens are whole."""
    check_indices(ids)
    tokens, sizes = _tokens(ids, capacity)
    rows = " ".join(tokens)
    return equation(f"{rows} K -> {rows} K", ids, sizes=sizes)


def expert_operations(sizes):
    """Three products of every choice of a rank's own experts, if all have as many."""
    tokens = prod(size for factor, size in sizes.items() if factor[0] in "tgS")
    return 6 * tokens * sizes["K"] * sizes["f"] * sizes["H"] * sizes["e"] // sizes["E"]


def expert_places(ids, owners, ranks, own, most, capacity):
    """The `Signature` of an inner operator of its algorithm, `places_of_choices`: all is whole, and is one rank's."""
    rows = prod(ids.shape) if capacity is None else ranks * most
    return whole_signature(tensors_in((ids, owners)), ((rows,), ids.shape, (ranks, own)))


def expert_sizes(sent, received, most, in_turn):
    """Likewise of `sizes_of_rows`."""
    ranks = sent.shape[0]
    return whole_signature((sent, received), ((2, ranks), (2, ranks), (ranks * most, 1)))


def expert_rows(x, ids, *others):
    """Likewise of `expert_rows`."""
    return whole_signature(tensors_in((x, ids, *others)), ((*ids.shape, x.shape[1]),))


def expert_sum(found, weights):
    """Likewise of `combined`."""
    return whole_signature((found, weights), ((found.shape[0], found.shape[2]),))
