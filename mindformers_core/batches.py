"""Who computes which samples of a step, and which of their tokens: a step is cut into runs, a run into micro-batches.

Pure Python.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from mindformers_core.hints import near_multiples

BLOCK = 128  # queries, at least, for which attention takes or skips keys


@dataclass(frozen=True)
class BatchPlan:
    """The samples of a step in order, cut into runs, these into micro-batches, and these over data-parallel ranks.

    All micro-batches have as many rows, so that all ranks run one program, equally often. Where the samples of a step
    don't fill them, the last rows are *empty*: they repeat the last sample, and none of their labels counts.

    Attributes:
        samples: of a step, of all ranks together: the global batch.
        ranks: number of data-parallel ranks.
        size: rows of a micro-batch on a rank.
        micro_batches: of a run: a forward and backward pass, or with several a run of a pipeline's schedule.
    """

    samples: int
    ranks: int = 1
    size: int = 1
    micro_batches: int = 1

    @property
    def rows(self):
        """Rows of a micro-batch, of all ranks together."""
        return self.size * self.ranks

    @property
    def runs(self):
        """Runs of a step: as few as have room for its samples."""
        return -(-self.samples // (self.rows * self.micro_batches))

    @property
    def passes(self):
        """The micro-batches of a step, of all its runs: for each the range of its samples, empty where none is left."""
        starts = range(0, self.runs * self.micro_batches * self.rows, self.rows)
        return [range(min(start, self.samples), min(start + self.rows, self.samples)) for start in starts]

    @property
    def empty(self):
        """Number of the empty rows of a step."""
        return self.runs * self.micro_batches * self.rows - self.samples


def batch_slices(layouts, shapes, rank):
    """What `rank` reads of the arrays of a batch.

    Args:
        layouts: of each array the `Layout`.
        shapes: of each array the shape of the whole one.
        rank: number of the rank.

    Returns:
        For every array and each of its dims the slices of the whole one, one if the dim isn't strided.

    Raises:
        ValueError: a dim that its axes don't divide.
    """
    return [layout.local_runs(shape, rank) for layout, shape in zip(layouts, shapes, strict=True)]


def static_order(balance, ranks):
    """The order of equal chunks of every sequence, `parallelism.context_parallel_balance`; None where rows differ.

    Of 2 * ranks chunks `zigzag` gives rank r numbers r and 2 * ranks - 1 - r: then all ranks have the same work under a
    causal mask (Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2).

    >>> static_order("zigzag", 2)
    (0, 3, 1, 2)
    """
    if balance == "area" and ranks > 1:
        return None
    if balance == "contiguous" or ranks == 1:
        return (0,)
    return tuple(chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank))


def area_order(areas, ranks):
    """The order of the equal chunks of one row in which ranks have equally many, and about the same area each.

    A greedy choice: the largest chunk first, to the rank with the least so far that has room (MagiAttention's dispatch,
    2025; Graham, "Bounds on multiprocessing timing anomalies", 1969). A rank's chunks ascend.

    Args:
        areas: of each chunk, the number of pairs of a query and a key that are computed.
        ranks: divides the number of chunks.
    """
    heap, taken = [(0, rank) for rank in range(ranks)], [[] for _ in range(ranks)]
    heapify(heap)
    for chunk in sorted(range(len(areas)), key=lambda chunk: -areas[chunk]):
        area, rank = heappop(heap)
        taken[rank].append(chunk)
        if len(taken[rank]) < len(areas) // ranks:
            heappush(heap, (area + int(areas[chunk]), rank))
    return tuple(chunk for of_rank in taken for chunk in sorted(of_rank))


def places_of(order, length):
    """The places of the tokens of a row whose chunks lie in this order: int32 (length,)."""
    chunks = np.arange(length, dtype=np.int32).reshape(len(order), chunk_length(order, length))
    return chunks[list(order)].reshape(-1)


def chunk_length(order, length):
    """Tokens of each of the chunks of a sequence; `ValueError` where they aren't equal."""
    count = len(order)
    if length % count:
        raise ValueError(
            f"a sequence of {length} tokens can't be cut into the {count} equal chunks of order {order}: choose a "
            f"length that {count} divides, {near_multiples(length, count)}, or another order"
        )
    return length // count
