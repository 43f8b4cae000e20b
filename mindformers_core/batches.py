"""Who computes which samples of a step: a step is cut into runs, a run into micro-batches. Pure Python."""

from dataclasses import dataclass


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
