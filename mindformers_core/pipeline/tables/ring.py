"""The messages of attention over a cut sequence as a table: each chunk that goes is a chain of two stages. Pure Python.

Stage 2 n is the n-th message's giver, stage 2 n + 1 its taker. FWD of the giver has the chunk of keys and values, FWD
of the taker multiplies it. In the backward pass BWD of the taker makes the chunk's gradient, BWD of the giver adds it.
"""

from itertools import chain

from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType as Kind
from mindformers_core.pipeline.tables.table import ScheduleTable
from mindformers_core.redistribution.steps import receives_first, ring


class RingTable(ScheduleTable):
    """A table of chains of two stages, of one micro-batch."""

    def neighbour(self, stage, distance):
        """The other stage of a chain."""
        return stage + distance if stage % 2 == (distance < 0) else None


def ring_table(exchanges, ranks, is_backward=False):
    """The `RingTable` of all messages, in the order in which every rank's program has them.

    Args:
        exchanges: of `sequence_exchange.exchanges`.
        ranks: number of ranks of the ring.
        is_backward: of the pass that sends keys and values again, and their gradients home.
    """
    orders, stage_ranks = [[] for _ in range(ranks)], []
    for exchange in exchanges:
        messages = []  # (giver, taker, stage of the giver)
        for givers in exchange.givers if exchange.distance else ():
            ends = [(giver, (giver + exchange.distance) % ranks) for giver in givers]
            shift = [(*pair, len(stage_ranks) + 2 * number) for number, pair in enumerate(ends)]
            stage_ranks += chain(*ends)
            sent = {giver: [(Kind.FWD, stage), (Kind.FWD_SEND, stage)] for giver, _, stage in shift}
            _add_shift(orders, exchange.distance, sent, {each[0]: [(Kind.FWD_RECV, each[2] + 1)] for each in shift})
            messages.append(shift)
        for _, taker, stage in chain(*messages):
            kinds = (Kind.FWD, Kind.BWD) if is_backward else (Kind.FWD,)
            orders[taker] += [MetaStep(0, kind, stage + 1) for kind in kinds]
        for shift in messages if is_backward else ():
            sent = {taker: [(Kind.BWD_SEND, stage + 1)] for _, taker, stage in shift}
            received = {taker: [(Kind.BWD_RECV, stage), (Kind.BWD, stage)] for _, taker, stage in shift}
            _add_shift(orders, -exchange.distance, sent, received)
    return RingTable(tuple(map(tuple, orders)), tuple(stage_ranks), 1)


def _add_shift(orders, distance, sent, received):
    """Add the (type, stage) of some messages: by their sender those that it has, and those of its receiver."""
    _, origins = ring(len(orders), distance, sent)
    for rank, order in enumerate(orders):
        steps = sent.get(rank, ()), received.get(origins[rank], ())
        steps = reversed(steps) if receives_first(origins, rank) else steps
        order += [MetaStep(0, *step) for step in chain(*steps)]
