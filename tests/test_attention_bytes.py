"""What attention over a cut sequence sends and keeps, to the byte, and which algorithm is chosen for it."""

import re
from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.launch import ROOT
from support.nightly import daily
from support.saved_tensors import measured
from support.verified_calls import numbers
from test_attention import Largest
from test_cut_attention import HEADS, ROWS, on_parts

from mindformers_core.algorithms.distributed_operators import run_locally
from mindformers_core.algorithms.shard_context import shard_context
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication import count_collectives
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.plan import OperatorPlan, Redistribution
from mindformers_core.propagation.algorithms import algorithm_steps, own_gradient_steps
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.tensor_parallel import shard
from mindformers_core.tensor_parallel.attention import attention

SHARES = [  # algorithm, order, part of a whole ring's rows, bytes backward for those forward
    ("ring", (0, 7, 1, 6, 2, 5, 3, 4), 3 / 4, 2), ("gather", (0, 7, 1, 6, 2, 5, 3, 4), 3 / 4, 1),
    ("ring", None, 1, 2), ("ring", (0, 1, 2, 3), 1 / 2, 2), ("gather", (0, 1, 2, 3), 1 / 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("algorithm, order, share, back", daily(SHARES[:3], SHARES))
def test_rows_that_nobody_needs_are_not_sent(algorithm, order, share, back):
    """Of causal masks: of the 2 b (s / P) h_kv e (P - 1) bytes of a rank in a whole ring; as is foretold."""
    ranks, length, groups = 4, 16, 2
    places = np.arange(length, dtype=np.int32)[None]
    given = numbers(1, length, 4, 3), numbers(1, length, groups, 3), numbers(1, length, groups, 3)
    slopes = numbers(1, length, 4, 3), numbers(1, 4, length)
    known = order, (None, 0), True, algorithm
    name = "attention_ring" if algorithm == "ring" else "attention_seen"
    _, sent = on_parts(name, ranks, (*given, places * 0, places + 1, places), 0.5, known, *slopes)
    ring = 2 * (length // ranks) * (groups * 3) * 4 * (ranks - 1) * ranks
    of_places = 0 if order else (length // ranks) * 4 * (ranks - 1) * ranks
    assert list(sent) == [share * ring + of_places, back * share * ring + of_places]

    def attend(query, key, value, where):
        return attention(query, key, value, where * 0, where + 1, where, 0.5, *known)

    (plan,) = planned(attend, DeviceMesh((ranks,), ("cp",)), *given, places)
    steps, own = algorithm_steps(plan, algorithm_of), own_gradient_steps(plan, algorithm_of)
    backward = [step.backward[1] for step, flows in steps if flows] + [step.forward[1] for step in own]
    assert plan.algorithm == name
    assert [sum(step.forward[1] for step, _ in steps) * ranks, sum(backward) * ranks] == list(sent)


class Called(nn.Cell):
    """A function of four tensors."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, query, key, value, where):
        return self.function(query * 2, key * 2, value * 2, where)


def planned(function, mesh, *arrays):
    """The `OperatorPlan`s of attentions: see `instructions`."""
    found = instructions(function, mesh, *arrays)
    return [each for each in found if isinstance(each, OperatorPlan) and each.node.operator == "Attention"]


def instructions(function, mesh, *arrays):
    """Those of a plan where all arrays are cut along dim 1, and so is the result."""
    with rank_of(mesh.size, 0):
        cell, parts = sharded(function, mesh, arrays)
        return prepare(cell, *[tensor_meta(each.shape, str(each.dtype)) for each in parts]).plan.instructions


def sharded(function, mesh, arrays, outputs=2):
    """The Cell of a rank, and the arrays' parts; output alone, or sums, too, are cut along the sequence."""
    cut = layout(None, mesh.axis_names[0], ...)
    results = [cut, layout(None, None, mesh.axis_names[0])]
    given = {"input": dict.fromkeys(("query", "key", "value", "where"), cut), "output": results[:outputs]}
    cell = shard(Called(function).set_train(), mesh, plan={"": given})
    return cell, [each[:, : each.shape[1] // mesh.size] for each in arrays]


WAYS = [("gather", 4), ("all_to_all", 4), ("all_to_all", 1)]  # and heads of keys


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("algorithm", "groups"), WAYS)
def test_bytes_are_those_of_the_page(algorithm, groups, dtype):
    """The formula of docs/long_sequences.md, that of anchors, for queries, keys, values and output; backward, too.

    Of a gather where no order says what isn't seen; of one head of keys as of its copies, one for each rank. Planned,
    and counted as a rank runs. Of all keys and values nothing is made in another dtype.
    """
    sizes = {"b": 2, "s": 16, "P": 4, "e": dtype().itemsize, "h": 8 * 3, "h_kv": 4 * 3}
    page = (ROOT / "docs" / "long_sequences.md").read_text(encoding="utf-8")
    formula = re.search(rf"^\|[^|]*\| `{algorithm}`[^|]*\| `([^`]*)` \|", page, re.MULTILINE)[1]
    nbytes = eval(re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula), sizes)
    given, where = [np.zeros((2, 16, heads, 3), dtype) for heads in (8, groups, groups)], np.arange(16)[None]
    given, mesh = (*given, where.astype(np.int32)), DeviceMesh((4,), ("cp",))

    def attend(query, key, value, where):
        return attention(query, key, value, where * 0, where + 1, where, 0.5, order, (None, 0), True, algorithm)

    order = None if algorithm == "gather" else (0,)
    found = instructions(attend, mesh, *given)
    moves = [each for each in found if isinstance(each, Redistribution) and len(each.value.shape) == 4]
    steps = [step for each in moves for step in each.steps]
    assert [sum(step.forward[1] for step in steps), sum(step.backward[1] for step in steps)] == [nbytes, nbytes]
    for plan in [each for each in found if getattr(each, "algorithm", None)]:
        made = [value for node in algorithm_of(plan)[0].nodes for value in node.made]
        assert {value.dtype for value in made if np.prod(value.shape) >= given[1].size} == {np.dtype(dtype).name}
    of_places = (16 // 4) * 4 * (4 - 1) * (1 if order is None else 3)  # ranges of queries, too, where they are whole
    assert sent_by(lambda *given: attend(*given)[0], mesh, given) == (nbytes + of_places, nbytes)


def sent_by(function, mesh, arrays):
    """The bytes that rank 0 sends, forward and backward."""
    with rank_of(mesh.size, 0):
        cell, parts = sharded(function, mesh, arrays, 1)
        parts = list(map(Tensor, parts))
        with count_collectives() as forward:
            cell(*parts)
        with count_collectives() as both:
            both_passes(cell, parts)
    forward, both = (sum(nbytes for _, nbytes in counts.values()) for counts in (forward, both))
    return forward, both - forward


def both_passes(cell, parts):
    """Run the rank's program, and its gradient."""
    ms.grad(lambda *given: cell(*given).to_local().sum(), (0, 1, 2))(*parts)


CUT = [(algorithm, order) for order in ((0, 3, 1, 2), (0,), None) for algorithm in ("gather", "ring", "all_to_all")]


@pytest.mark.parametrize(("algorithm", "order"), daily(CUT[:3], CUT))
def test_no_rank_has_all_scores(algorithm, order):
    """Of the programs of two ranks no operator takes more than a block: 32 queries of a chunk, or 128, and all keys."""
    most = 2 * 128 * 512 if algorithm == "all_to_all" else 4 * 32 * 256  # heads, queries, keys
    where, mesh = np.arange(512, dtype=np.int32)[None], DeviceMesh((2,), ("cp",))
    given = *(numbers(1, 512, heads, 4) for heads in (4, 2, 2)), where

    def attend(query, key, value, where):
        return attention(query, key, value, where * 0, where + 1, where, 0.5, order, (None, 0), True, algorithm)[0]

    for rank in range(2):
        with rank_of(2, rank), Largest() as largest:
            cell, parts = sharded(attend, mesh, given, 1)
            both_passes(cell, list(map(Tensor, parts)))
        assert 4 * 128 * 16 <= largest.count <= most


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("algorithm", ["ring", "gather"])
def test_what_is_kept_for_the_backward_pass(ranks, algorithm):
    """A rank's part of what one card keeps; the gather also the others' keys, values and places, and a table."""
    length, order = 64, (0, 7, 1, 6, 2, 5, 3, 4)
    given = numbers(2, length, 4, 8), *(numbers(2, length, 2, 8) for _ in range(2)), np.arange(length, dtype=np.int32)

    def attend(query, key, value, where):
        return attention(query, key, value, where * 0, where + 1, where, 0.5, order, (None, 0), True, algorithm)

    (plan,) = planned(attend, DeviceMesh((ranks,), ("cp",)), *given[:3], given[3][None])
    context = replace(shard_context(plan, 0), run_step=lambda local, _: local)

    def kept(function, tensors):
        return measured(lambda *given: function(*(each + 0 for each in given)), *tensors)

    shapes = [(value, layout.local_shape(value.shape)) for value, layout in plan.consumed]
    parts = [Tensor(np.zeros(shape, value.dtype)) for value, shape in shapes]
    whole = kept(attend, list(map(Tensor, (*given[:3], given[3][None]))))
    others = sum(part.nbytes for part in (parts[1], parts[2], parts[5])) * (ranks - 1)
    others += sum(
        4 * np.prod(node.args[2].shape) for node in algorithm_of(plan)[0].nodes if node.operator == "AttentionToChunks"
    )
    found = kept(lambda *given: run_locally(plan, given, None, context), parts)
    assert found == whole / ranks + (others if algorithm == "gather" else 0)


@pytest.mark.parametrize("copies, dims", [(1, HEADS), (2, HEADS), (4, ROWS), (8, ROWS)])
def test_the_choice_is_the_cheaper_one(copies, dims):
    """Heads are exchanged where ranks are more than h / h_kv + 1: anchors.md, C; here 4, against 2, 3, 5 and 9."""
    mesh, length = DeviceMesh((4,), ("a",)), 4096
    given = np.zeros((1, length, 4 * copies, 64), np.float32), *[np.zeros((1, length, 4, 64), np.float32)] * 2
    places = np.arange(length, dtype=np.int32)[None]
    (plan,) = planned(lambda *args: attention(*args[:3], args[3] * 0, args[3] + 1, args[3], 0.5), mesh, *given, places)
    assert plan.inputs[0].dims == dims
