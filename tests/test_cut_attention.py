"""Attention over a cut sequence: each algorithm, chosen or declared, against one card."""

import numpy as np
import pytest
from support.verified_calls import MESH, Sample, check_of, eager, numbers

from mindformers_core.layout import Layout, layout
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.tensor_parallel.attention import attention

PLACES = np.arange(4, dtype=np.int32)[None]
ROWS, HEADS, WHOLE = (Layout.on(MESH, dims).dims for dims in (((), "a", (), ()), ((), (), "a", ()), ((),) * 4))


def causal(algorithm):
    """Attention to keys up to one's own, by an algorithm."""

    def attend(query, key, value, places):
        own, order = (places, (0,)) if query.shape[1] > 1 else (places[:, -1:], None)
        return attention(query, key, value, own * 0, own + 1, places, 0.5, order, (None, 0), True, algorithm)

    return attend


def attentions(check):
    """The `OperatorPlan`s of all attentions of a rank's program."""
    entries = [entry for _, plan in check.plans.values() for found in plan.walk() for entry in found[1].instructions]
    return [each for each in entries if isinstance(each, OperatorPlan) and each.node.operator == "Attention"]


@pytest.mark.parametrize(
    "algorithm, cut, found",
    [
        ("gather", (1, 1), ("attention_gather", ROWS, WHOLE)),
        ("ring", (1, 1), ("attention_ring", ROWS, ROWS)),
        ("all_to_all", (1, 1), (None, HEADS, HEADS)),
        ("auto", (2, 1), (None, HEADS, HEADS)),
        ("auto", (None, 1), ("attention_merge", WHOLE, ROWS)),
    ],
)
def test_each_algorithm(algorithm, cut, found):
    """Forward and all gradients, both engines; all dims have one size, so that a wrong one would fit."""
    length, groups = (4, 4) if cut[0] else (1, 1)
    given = numbers(4, length, 4, 4, low=-1), *(numbers(4, 4, groups, 4, low=-1) for _ in range(2)), PLACES
    declared = [layout(*["a" if dim == each else None for dim in range(4)]) for each in (cut[0], cut[1], cut[1])]
    sample = Sample("", causal(algorithm), given, cuts=([*declared, layout(None, "a" if cut[0] == 1 else None)],))
    (plan,) = attentions(check_of(sample))
    assert (plan.algorithm, *(each.dims for each in plan.inputs[:2])) == found
    eager(sample)
