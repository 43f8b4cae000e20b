"""Rules of a mixture of experts: values count the tokens of a group, which are whole; rows and columns may be cut."""

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import dim_names, dim_sizes
from mindformers_core.operators.rules.indexing import check_indices
from mindformers_core.operators.saved import UNMEASURED
from mindformers_core.operators.signature import Signature, TensorMeta


@register_operator("Gmm", "GmmV2", saves=UNMEASURED)
def grouped_product(x, weight, bias=None, group_list=None, group_type=0, group_list_type=0, *, partial=True):
    """The product of each group's rows and its own matrix; where dims that are summed have groups, a matrix for each.

    A cut inner dim gives terms of a sum, unless they aren't `partial`, since something follows that isn't linear.
    """
    tensors = [entry for given in (x, weight, bias or ()) for entry in given]
    places = {0: (("m", "k"), ("e", "k", "n"), ("e", "n")), 2: (("k", "m"), ("m", "n"), ("e", "n"))}.get(group_type)
    if places is None or len(x) != 1 or len(weight) != 1 or len(tensors) > 3:
        raise ValueError("a grouped matmul takes one tensor of tokens, one of weights, and group_type 0 or 2")
    count = group_list.shape[0] if isinstance(group_list, TensorMeta) else len(group_list)
    sizes, inputs = {"e": count}, [tuple((name,) for name in names) for names in places[: len(tensors)]]
    for tensor, names in zip(tensors, places):
        if tensor.ndim != len(names) or any(
            sizes.setdefault(name, size) != size for name, size in zip(names, tensor.shape)
        ):
            raise ValueError(f"a grouped matmul of {', '.join(str(one.shape) for one in tensors)} and {count} groups")
    if isinstance(group_list, TensorMeta):
        inputs.append((("e",),))
    if group_type == 2:
        return Signature(tuple(inputs), ((("e",), ("k",), ("n",)),), sizes, whole=frozenset("em"))
    added = (2,) if len(tensors) > 2 else ()
    more = {"reduced": {"k": "sum"}, "added": added, "linear": () if added else ({0}, {1})} if partial else {}
    return Signature(tuple(inputs), ((("m",), ("n",)),), sizes, whole=frozenset("em" if partial else "emk"), **more)


@register_operator("GroupedMatmulV4", saves=UNMEASURED)
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


@register_operator("MoeTokenPermute", saves=UNMEASURED)
def permute_tokens(tokens, indices, num_out_tokens=None, padded_mode=False):
    """Tokens in the order of their experts, once for each, and the places that they come from."""
    check_indices(indices)
    if padded_mode or tokens.ndim != 2 or indices.shape[:1] != tokens.shape[:1]:
        raise ValueError(f"tokens {tokens.shape} of experts {indices.shape}, padded_mode={padded_mode}")
    chosen, sizes = dim_names(indices, "i"), dim_sizes(tokens) | dim_sizes(indices, "i")
    count = tokens.shape[0] * (indices.shape[1] if indices.ndim > 1 else 1)
    sizes |= {"rows": num_out_tokens or count, "places": count}
    whole, outputs = frozenset(sizes) - {"d1"}, ((("rows",), ("d1",)), (("places",),))
    return Signature((dim_names(tokens), (("d0",), *chosen[1:])), outputs, sizes, whole=whole)


@register_operator("MoeTokenUnpermute", "InnerMoeTokenUnpermute", saves=UNMEASURED)
def unpermute_tokens(permuted, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    """Tokens in their own order: the sum over each token's experts, weighted by `probs`."""
    check_indices(sorted_indices)
    if padded_mode or permuted.ndim != 2:
        raise ValueError(f"permuted tokens {permuted.shape}, padded_mode={padded_mode}")
    sizes = dim_sizes(permuted) | {"places": sorted_indices.shape[0]}
    weights = dim_names(probs, "p") if isinstance(probs, TensorMeta) else ()
    sizes |= dim_sizes(probs, "p") if weights else {"p0": sorted_indices.shape[0]}
    inputs = (dim_names(permuted), (("places",),), *((weights,) if weights else ()))
    return Signature(inputs, ((("p0",), ("d1",)),), sizes, whole=frozenset(sizes) - {"d1"}, linear=({0},))


@register_operator("MoeInitRoutingV2", saves=UNMEASURED)
def init_routing(x, expert_idx, active_num=0, expert_capacity=0, expert_num=0, drop_pad_mode=0, counts=0, before=False):
    """Tokens in the order of their experts, their places, and (`counts`, for experts without a capacity) how many."""
    check_indices(expert_idx)
    if drop_pad_mode or before:
        raise ValueError("MoeInitRoutingV2 with a capacity of experts is not available for distributed tensors")
    total = expert_idx.shape[0] * expert_idx.shape[1]
    sizes = dim_sizes(x) | {"k": expert_idx.shape[1], "rows": min(active_num or total, total), "places": total}
    sizes |= {"experts": expert_num, "before": expert_num}
    outputs = ((("rows",), ("d1",)), (("places",),), (("experts",),), (("before",),))
    return Signature((dim_names(x), (("d0",), ("k",))), outputs, sizes, whole=frozenset(sizes) - {"d1"})
