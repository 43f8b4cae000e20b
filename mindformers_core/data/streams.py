"""Endless streams of samples: sample g is a function of the sources, the seed and g.

It depends neither on the number of ranks, nor on micro-batches, nor on the step at which a run was resumed, so loss
curves agree, and a position is one number a source.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from mindformers_core.data.mixture import Mixture
from mindformers_core.data.order import shuffled
from mindformers_core.data.packing import Piece, packed_row, packed_rows
from mindformers_core.data.sources import Tokens
from mindformers_core.hints import first_of
from mindformers_core.splitmix import GOLDEN

IGNORED = -100  # a label that isn't counted


def whole(shapes):
    """For each array of a shape the slices of its dims that are all of it, see `Stream.batch`."""
    return tuple(tuple(slice(0, size) for size in shape) for shape in shapes)


@dataclass(frozen=True)
class Sequences:
    """The tokens of a source as samples: `(input_ids, labels)`, int32 arrays of `seq_length`; labels are next tokens.

    Sequences follow each other in the tokens, whatever documents they are of. With `packs`, whole documents are packed
    into sequences instead (see `packed_row`), and a sample has a third array, `positions`: of each token in its
    document, so that position 0 begins one, which attention doesn't look beyond. A label is -100 where no next token is
    to be predicted: at a document's end, in padding, and where the source says so. Padding is of token 0 at position 0.

    Attributes:
        source: `Tokens`. seq_length: positions of a sequence. vocab_size: of the model.
        packs: whether sequences hold whole documents.
    """

    source: Tokens
    seq_length: int
    vocab_size: int
    packs: bool = False

    def __post_init__(self):
        count = len(self.source.ids)
        if count < 2 or len(self) < 1:
            raise ValueError(
                f"{self.source.name}: {count} tokens are too few for one sequence of train_dataset.seq_length "
                f"{self.seq_length} and the token after it: give more text"
                + (f", or train_dataset.seq_length={count - 1}" if count > 1 else "")
            )

    def __len__(self):
        """Samples of one epoch."""
        count = len(self.source.ids)
        return packed_rows(count, self.seq_length) if self.packs else (count - 1) // self.seq_length

    @property
    def kinds(self):
        """Shape and dtype of each array of a sample."""
        return (((self.seq_length,), np.dtype(np.int32)),) * (3 if self.packs else 2)

    def __getitem__(self, row):
        return self.part(row, whole)

    def part(self, row, cut):
        """The parts of a sample's arrays that `cut` names, see `Stream.batch`; other tokens aren't read."""
        parts = [run for (run,) in cut(tuple(shape for shape, _ in self.kinds))]
        first, end = min(run.start for run in parts), max(run.stop for run in parts)
        pieces, found, place = [Piece(row * self.seq_length, self.seq_length, True)], [], 0
        if self.packs:
            pieces = packed_row(row, len(self.source.ids), self.source.starts, self.seq_length)
        for piece in pieces:
            skipped = max(0, first - place)
            length = min(piece.length, end - place) - skipped
            if length > 0:
                found.append(self._piece(piece, skipped, length))
            place += piece.length
        padding = np.zeros(max(0, end - max(first, place)), np.int32)
        arrays = map(np.concatenate, zip(*found, (padding, padding + IGNORED, padding)))
        return tuple(array[run.start - first : run.stop - first] for run, array in zip(parts, arrays))

    def about(self):
        """What has to be the same in a resumed run."""
        return self.source.about() | {"seq_length": self.seq_length, "packs": self.packs}

    def _piece(self, piece, skipped, length):
        """Ids, labels and positions of so many tokens of a `Piece`, without the first ones."""
        first, goes_on = piece.first + skipped, piece.goes_on or skipped + length < piece.length
        ids, masks = self.source.read(first, first + length + goes_on, self.vocab_size), self.source.labels
        labels = np.full(length, IGNORED, np.int32)
        labels[: len(ids) - 1] = ids[1:]
        if masks is not None:
            labels[: len(ids) - 1][~masks[first + 1 : first + len(ids)]] = IGNORED
        return ids[:length], labels, np.arange(skipped, skipped + length, dtype=np.int32)


@dataclass(frozen=True)
class Stream:
    """An endless stream of samples from several sources, each in another order in each of its epochs.

    Attributes:
        sources: objects with `len(source)`, the samples of an epoch; `source.part(n, cut)`, a tuple of arrays, see
            `batch`; and `source.kinds`, shape and dtype of each array of a whole sample.
        mixture: the `Mixture` of their weights.
        seed: of the orders.
    """

    sources: tuple
    mixture: Mixture
    seed: int

    @property
    def kinds(self):
        """Shape and dtype of each array of a sample."""
        return self.sources[0].kinds

    def batch(self, first, count, cut=whole):
        """Samples `first` … `first + count - 1`: a tuple of arrays with a first dim of `count`.

        `cut` is a function of the shapes of a sample's arrays that returns, for each array, the slice of each of its
        dims that is wanted, of step 1: tuples. Sources that can, read nothing else. Default: whole samples.
        """
        sources, numbers = self.mixture.places(first, count)
        rows = np.empty(count, np.int64)
        for source in set(sources.tolist()):
            rows[sources == source] = self.rows(source, numbers[sources == source])
        samples = [self.sources[source].part(row, cut) for source, row in zip(sources.tolist(), rows.tolist())]
        _check_alike(samples, sources, first)
        return tuple(map(np.stack, zip(*samples)))

    def rows(self, source, numbers):
        """The rows of a source that its samples of these numbers are, which count over all its epochs: arrays."""
        count, rows = len(self.sources[source]), np.empty(len(numbers), np.int64)
        epochs, places = np.divmod(numbers, count)
        seed = (self.seed + source * GOLDEN) % 2**64  # sources of one length have orders of their own
        for epoch in set(epochs.tolist()):
            rows[epochs == epoch] = shuffled(places[epochs == epoch], count, seed, epoch)
        return rows

    def epochs(self, end):
        """Of each source, how many of its epochs the samples before `end` are, as a fraction."""
        counts = self.mixture.counts(end)
        return tuple(count / len(source) for count, source in zip(counts, self.sources, strict=True))

    def begun(self, first, end):
        """A clause about the epochs after their first one that sources begin in samples `first` … `end - 1`; or ""."""
        said = []
        counts = zip(self.sources, self.mixture.counts(first), self.mixture.counts(end), strict=True)
        for number, (source, before, after) in enumerate(counts):
            epoch, last = max(1, -(-before // len(source))), (after - 1) // len(source)  # counted from 0
            if epoch <= last:
                sources, numbers = self.mixture.places(first, end - first)
                place = first + np.flatnonzero((sources == number) & (numbers == epoch * len(source)))[0]
                more = f", and epochs up to {last + 1} after it" if last > epoch else ""
                said.append(f"source {number} begins epoch {epoch + 1} with sample {place}{more}")
        return ", ".join(said)

    def state(self):
        """What a checkpoint keeps of the data, as JSON: `facts`, which tell other data, and the `mixture` so far."""
        facts = {"seed": self.seed, "weights": list(self.mixture.weights)}
        for number, source in enumerate(self.sources):
            facts |= {f"source {number}: {name}": value for name, value in source.about().items()}
        return {"facts": facts, "mixture": [self.mixture.weights, self.mixture.start, self.mixture.taken]}

    def resumed(self, state, end, goes_on=False):
        """The stream that goes on at sample `end` of the one with this `state`.

        With other data that is an error, unless `goes_on`: then sources that were there before, the first ones, go on
        where they were, new ones begin, and weights are those of now.

        Raises:
            ValueError: other data; lists the differences.
        """
        check_facts(state["facts"], self.state()["facts"], goes_on)
        weights, start, taken = state.get("mixture") or self.state()["mixture"]
        mixture = Mixture(tuple(weights), start, tuple(taken))
        return replace(
            self,
            mixture=mixture if mixture.weights == self.mixture.weights else mixture.changed(self.mixture.weights, end),
        )


def _check_alike(samples, sources, first):
    """Raise `ValueError` for samples, the first of this number, that have not the same arrays."""
    kinds = [[(array.dtype, array.shape) for array in sample] for sample in samples]
    for place, kind in enumerate(kinds):
        if kind != kinds[0]:
            one, other = (", ".join(f"{dtype} {list(shape)}" for dtype, shape in each) for each in (kinds[0], kind))
            raise ValueError(
                f"sample {first} (of source {sources[0]}) has the arrays {one}, sample {first + place} (of source "
                f"{sources[place]}) {other}: all samples need as many, of the same shapes and dtypes"
            )


def check_facts(saved, own, goes_on):
    """Raise `ValueError` for facts about data that differ from saved ones, unless a run `goes_on` with them."""
    pairs = {name: (own.get(name), saved.get(name)) for name in {**saved, **own}}
    found = [f"{name} is {now!r}, was {before!r}" for name, (now, before) in pairs.items() if now != before]
    if found and not goes_on:
        raise ValueError(
            f"the data aren't those of the run that goes on: {first_of(found, 5)}: take those, or "
            "train_dataset.on_change=go_on"
        )


class Ahead:
    """Computes the next batch in a thread, while a step runs; an error of the thread is raised where its batch is due.

    Args:
        read: function of a position that returns a batch.
    """

    def __init__(self, read):
        self._read, self._pool, self._next = read, None, None

    def get(self, position, following):
        """The batch at a position; that at `following` is begun, unless that is None."""
        known, self._next = self._next, None
        batch = known[1].result() if known and known[0] == position else self._read(position)
        if following is not None:
            self._pool = self._pool or ThreadPoolExecutor(1, "data")
            self._next = following, self._pool.submit(self._read, following)
        return batch

    def close(self):
        """End the thread, when it has read what it has begun; a later `get` starts another one."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = self._next = None
