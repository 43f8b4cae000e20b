"""Counting what is communicated: calls and bytes by kind of collective and axes."""

from contextlib import contextmanager
from math import prod

from mindformers_core.communication.world import process_state
from mindformers_core.redistribution.steps import wire_bytes

__all__ = ["CollectiveCounts", "count_collectives", "record", "record_send"]


class CollectiveCounts(dict):
    """`{(kind, axes): (calls, bytes)}`, e.g. `{("all_reduce", ("tp",)): (2, 8192)}`.

    Bytes are those that one rank sends by the ring algorithms, whatever the backend really does: of a whole tensor of
    S bytes (the larger of a rank's input and output) and n ranks, `2 (n - 1) / n * S` for all_reduce,
    `(n - 1) / n * S` for all_gather, reduce_scatter, all_to_all and broadcast, and S for permute. A message from one
    rank to another (`Channel.send`) counts as "send", with S bytes of all its tensors.
    """

    def add(self, kind, axes, nbytes):
        """Count one more call."""
        calls, total = self.get((kind, axes), (0, 0))
        self[kind, axes] = (calls + 1, total + nbytes)


@contextmanager
def count_collectives():
    """Count this rank's collectives, forward and backward, inside a `with` block: gives a `CollectiveCounts`.

    Counts what runs in PyNative (dry runs with the fake backend too). A graph of `@ms.jit` runs without returning to
    Python, so what it communicates can't be seen from here; the same program in PyNative has the same collectives.
    """
    counters = process_state().counters
    counts = CollectiveCounts()
    counters.append(counts)
    try:
        yield counts
    finally:
        counters[:] = [other for other in counters if other is not counts]


def record(kind, group, x):
    """Count collective `kind` of tensor `x` over `group` in every open block."""
    whole = prod(x.shape) * x.itemsize * (group.size if kind == "all_gather" else 1)
    # a broadcast's pipeline along the ring: all ranks but one send the whole, which is what an all-gather costs
    nbytes = wire_bytes("all_gather" if kind == "broadcast" else kind, group.size, whole)
    _count(kind, group.axes, nbytes)


def record_send(axes, nbytes):
    """Count a message to another rank in every open block."""
    _count("send", tuple(axes), nbytes)


def _count(kind, axes, nbytes):
    for counts in process_state().counters:
        counts.add(kind, axes, nbytes)
