"""The ring of attention as a table that the pipeline's validator accepts, and finds faults in; programs follow it."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from mindspore import Tensor
from support.nightly import daily
from test_attention_bytes import planned

from mindformers_core.algorithms.shard_context import ShardContext
from mindformers_core.batches import static_order
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators.registry import algorithm_named
from mindformers_core.operators.sequence_exchange import chunk_blocks, chunk_order, exchanges
from mindformers_core.operators.visible_blocks import visible_blocks
from mindformers_core.pipeline import validate
from mindformers_core.pipeline.tables.ring import ring_table
from mindformers_core.pipeline.tables.step import OTHER_ENDS, SENDS
from mindformers_core.redistribution.steps import receives_first, ring
from mindformers_core.tensor_parallel.attention import attention

MASKS = {"causal": ((None, 0), True), "full": ((None, None), True), "window": ((5, 0), True)}
BALANCES, LENGTH = ("contiguous", "zigzag"), 4


def order_of(balance, ranks):
    return chunk_order(static_order(balance, ranks), ranks)


def table_of(ranks, balance, mask, is_backward):
    order, (reach, is_exact) = order_of(balance, ranks), MASKS[mask]
    return ring_table(exchanges(order, ranks, chunk_blocks(LENGTH, order, reach, is_exact, 16)), ranks, is_backward)


CASES = [*product(range(2, 9), BALANCES, MASKS, (False, True))]


def test_the_validator_accepts_it_where_no_send_is_buffered():
    for case in CASES:
        validate(table_of(*case), buffered=False, training=case[-1])


def test_the_validator_finds_faults():
    """Of each table: each message that lacks an end; two sends of a rank in another order; no rank receives first."""
    faults = 0
    for ranks, balance, mask, is_backward in CASES:
        if ranks not in (2, 3, 5) or mask == "full" and ranks == 5:
            continue
        table = table_of(ranks, balance, mask, is_backward)
        order = table.orders[0]
        sends = [place for place, step in enumerate(order) if step.type in SENDS]
        wrong = [(*order[:place], *order[place + 1 :]) for place, step in enumerate(order) if step.type in OTHER_ENDS]
        for one, other in zip(sends, sends[1:]):
            swapped = list(order)
            swapped[one], swapped[other] = order[other], order[one]
            wrong.append(tuple(swapped))
        for each in wrong:
            with pytest.raises(ValueError):
                validate(replace(table, orders=(each, *table.orders[1:])), buffered=False, training=is_backward)
        faults += len(wrong)
    assert faults > 150, faults


def test_a_send_that_waits_would_block_a_ring_without_an_order(monkeypatch):
    monkeypatch.setattr("mindformers_core.pipeline.tables.ring.receives_first", lambda *_: False)
    with pytest.raises(ValueError, match="deadlock: rank 0 is stuck at step 1, SF0@0, waiting for RF0@1 of rank 1"):
        validate(table_of(3, "zigzag", "causal", False), buffered=False, training=False)


def multiplied(algorithm, balance, ranks, is_exact):
    """Pairs of query and key in the blocks of all ranks' programs over those that a causal mask has."""
    length, mesh, order = 8192, DeviceMesh((ranks,), ("cp",)), static_order(balance, ranks)

    def attend(query, key, value, places):
        known = order, (None, 0), is_exact, algorithm
        return attention(query, key, value, places * 0, places + 1, places, 0.5, *known)

    heads, places = np.zeros((1, length, 8, 64), np.float32), np.arange(length, dtype=np.int32)[None]
    (plan,) = planned(attend, mesh, heads, heads, heads, places)
    products = []  # what is known of each, its slots
    for node in algorithm_of(plan)[0].nodes:
        if node.operator == "AttentionPart":
            products.append((node.args[9], node.args[7].shape[1]))
        elif node.operator == "AttentionToChunks":
            products += [(known, stop - start) for start, stop, known in node.args[7]]
    pairs = 0
    for known, slots in products:
        for start, stop, ranges in visible_blocks(*known):
            pairs += slots * (stop - start) * sum(high - low for low, high, _ in ranges)
    return pairs * ranks * 2 / (length * (length + 1))


@pytest.mark.parametrize("ranks", daily([2, 8], [2, 4, 8]))
def test_all_ranks_together_multiply_no_more_than_one_card(ranks):
    """Zigzag: pairs of a causal mask, and of documents in one; what the page says of other orders."""
    for algorithm, is_exact in product(("ring", "gather"), (True, False)):
        assert 1 < multiplied(algorithm, "zigzag", ranks, is_exact) <= 1.02
    assert multiplied("ring", "contiguous", ranks, True) == pytest.approx(2 - 1 / ranks, 0.02)
    assert multiplied("ring", "area", ranks, False) == pytest.approx(2, 0.02)


class Recording(ShardContext):
    """A context that notes shifts."""

    def shift(self, local, distance, givers=None):
        self.noted += [(distance, givers)] * (distance != 0)
        return super().shift(local, distance, givers)


@pytest.mark.parametrize("ranks, balance, mask", [(2, "zigzag", "causal"), (4, "contiguous", "window")])
def test_programs_have_its_messages(ranks, balance, mask):
    order, (reach, is_exact), found = order_of(balance, ranks), MASKS[mask], algorithm_named("attention_ring")
    part = LENGTH * len(order) // ranks

    def work(rank):
        context = Recording(DeviceMesh((ranks,), ("cp",)), ("cp",), (), (), rank)
        one, places = Tensor(np.ones((1, part, 1, 2), np.float32)), Tensor(np.zeros((1, part), np.int32))
        object.__setattr__(context, "noted", [])
        args = one, one, one, places, places + 1, places, 1.0, order, reach, is_exact, "ring"
        forward = found.function(None, args, context), context.noted.copy()
        context.noted.clear()
        found.gradient(args, forward[0], (one, forward[0][1]), context)
        return forward[1], context.noted

    for rank, passes in enumerate(SimulatedRanks(ranks).run(work)):
        for noted, is_backward in zip(passes, (False, True)):
            expected = []
            for distance, givers in noted:
                to, origins = (each[rank] for each in ring(ranks, distance, givers))
                both = [(True, to)] * (to is not None) + [(False, origins)] * (origins is not None)
                is_first = receives_first(ring(ranks, distance, givers)[1], rank)
                expected += both[::-1] if is_first else both
            table = table_of(ranks, balance, mask, is_backward)
            steps = [step for step in table.orders[rank] if step.type in OTHER_ENDS]
            peers = [(step.type in SENDS, table.stage_ranks[step.other_end.stage_index]) for step in steps]
            assert peers == expected and peers
