"""Counting of collectives and messages: calls and bytes by kind and mesh axes."""

from contextlib import contextmanager

from mindformers_core.communication.world import process_state


class CollectiveCounts(dict):
    """`{(kind, axes): (calls, bytes)}`, e.g. `{("all_reduce", ("tp",)): (2, 8192)}`.

    Bytes are those that one rank sends by the ring algorithms, whatever the backend's algorithm: of a whole tensor of
    S bytes (the larger of a rank's input and output) and n ranks, `2 (n - 1) / n * S` for all_reduce,
    `(n - 1) / n * S` for all_gather, reduce_scatter and all_to_all, and S for permute. A message from one
    rank to another (`Channel.send`) counts as "send", with S bytes of all its tensors.
    """

    def add(self, kind, axes, nbytes):
        """Count one more call."""
        calls, total = self.get((kind, axes), (0, 0))
        self[kind, axes] = (calls + 1, total + nbytes)


@contextmanager
def count_collectives():
    """Count this rank's collectives, forward and backward, inside a `with` block, which gets a `CollectiveCounts`.

    Counts collectives that run in PyNative (also in dry runs with the fake backend). A graph of `@ms.jit` runs without
    Python, so its collectives aren't counted; the same program in PyNative has the same collectives.
    """
    counters = process_state().counters
    counts = CollectiveCounts()
    counters.append(counts)
    try:
        yield counts
    finally:
        counters[:] = [other for other in counters if other is not counts]


def record(kind, axes, nbytes):
    """Count a call in every open block."""
    for counts in process_state().counters:
        counts.add(kind, axes, nbytes)
