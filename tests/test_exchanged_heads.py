"""Attention by `all_to_all` where key and value have few heads, and no recipe makes copies of them."""

import pytest
from support.verified_calls import MESH, MESH_OF_4, Sample, check_of, eager, numbers
from test_cut_attention import PLACES, attentions, causal

from mindformers_core.layout import layout


@pytest.mark.parametrize("groups, mesh", [(1, MESH), (2, MESH_OF_4), (1, MESH_OF_4)])
def test_few_heads_of_keys_are_whole_where_those_of_queries_are_cut(groups, mesh):
    """`all_to_all` without copies: axis a cuts, in the sequence's place, what axis b leaves of the query's heads."""
    heads = "b" if "b" in mesh.axis_names else None
    cuts = [layout(None, "a", heads), *[layout(None, "a", heads if groups > 1 else None)] * 2, layout(None, "a")]
    sample = Sample("", causal("all_to_all"), (*of_heads(4, groups), PLACES), cuts=(cuts,))
    (plan,) = attentions(check_of(sample, mesh))
    cut = [plan.inputs[place].cut_axes for place in (0, 1)]
    assert cut == [set(mesh.axis_names), set(mesh.axis_names[1:] if groups > 1 else ())]
    eager(sample, mesh)


@pytest.mark.parametrize("groups", [3, 1])
def test_heads_that_the_axis_does_not_divide(groups):
    cuts = [layout(None, "a")] * 4
    sample = Sample("", causal("all_to_all"), (*of_heads(3, groups), PLACES), cuts=(cuts,))
    message = (
        rf"axis 'a' of size 2: attention by all_to_all .* divides neither the {groups} of key \(4, 4, {groups}, 4\) "
        rf"nor, where a rank has one of these, the {3 // groups} of query \(4, 4, 3, 4\) for it: use gather, ring or"
    )
    for run in (check_of, eager):
        with pytest.raises(ValueError, match=message):
            run(sample)


def of_heads(heads, groups):
    """Query, key and value."""
    return numbers(4, 4, heads, 4, low=-1), *(numbers(4, 4, groups, 4, low=-1) for _ in range(2))
