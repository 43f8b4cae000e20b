"""The datasets of a recipe: streams of its files, and those of users."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

import numpy as np

from mindformers_core.data.mixture import Mixture
from mindformers_core.data.sources import open_tokens
from mindformers_core.data.streams import Sequences, Stream, check_facts
from mindformers_core.data.tokenizing import Tokenizer
from mindformers_core.hints import first_of
from mindformers_core.lazy_exports import import_object
from mindformers_core.recipe.sections import Source
from mindformers_core.scopes import errors_at

_OF_TOKENS = "input_ids", "labels"  # inputs of a model
_ANY = Exception, SystemExit  # the second would end a thread, and then the job, as if it were over


class DataError(ValueError):
    """A dataset of the user's gave something else than samples."""


def dataset_of(recipe):
    """The dataset of a recipe: an object with `batch(first, count)`, see `Stream`.

    The function `train_dataset.factory`, or that of an entry of `train_dataset.sources`, takes the recipe's section
    `train_dataset`, the model's config and the seed, and returns one of

    - an object with `len()` and an index, whose samples are tuples of arrays: it becomes a source of a `Stream`;
    - an object with a method `batch(first, count)`, which returns a tuple of arrays, each with samples `first` to
      `first + count - 1` of an endless stream along its first dim, the same on all ranks (in `sources`: not possible);
    - a `mindspore.dataset`, see `InOrder` (in `sources`: not possible).

    Raises:
        ValueError: a factory that can't be imported. TypeError: an object that is none of these. More: `open_dataset`.
    """
    section, seed = recipe.train_dataset, recipe.data_seed
    if section.factory:
        dataset = _opened(section.factory, "train_dataset.factory", section, recipe.model, seed)
        with errors_at("train_dataset.factory: ", kinds=TypeError):
            return given_dataset(dataset, section.factory, seed, id_limits(recipe))
    return open_dataset(section, recipe.model, seed, id_limits(recipe))


def id_limits(recipe):
    """Which arrays of a sample have token ids of the model's vocabulary, by the names of the model's inputs.

    Returns:
        A dict, place of the array -> `(vocab_size, a further value that it may have)`.
    """
    size, spec = getattr(recipe.model, "vocab_size", None), recipe.spec
    names = {place: name for place, name in enumerate(spec.inputs) if name in _OF_TOKENS and size}
    return {place: (size, spec.ignored.get(name, 0)) for place, name in names.items()}


def given_dataset(dataset, name, seed, limits):
    """A dataset of an object of the user's, see `dataset_of`; one that is a dataset stays as it is.

    Args:
        dataset: the object. name: of it in errors. seed: of the order of samples. limits: see `id_limits`.

    Raises:
        TypeError: an object of no such kind.
    """
    if hasattr(dataset, "resumed"):
        return dataset
    if hasattr(dataset, "create_tuple_iterator"):
        return OwnDataset(InOrder(dataset), name, seed, limits)
    if _is_indexed(dataset):
        return Stream((Samples(dataset, name, limits),), Mixture((1,)), seed)
    if hasattr(dataset, "batch"):
        return OwnDataset(dataset, name, seed, limits)
    raise TypeError(
        f"{name}: {dataset!r} has neither len() and an index, nor a method batch(first, count): docs/data.md"
    )


def open_dataset(section, model, seed, limits):
    """The `Stream` of a `train_dataset` section; `model` is the config of the model, with `vocab_size`;
    `limits`: see `id_limits`.

    Raises:
        FileNotFoundError: a path that doesn't exist, or a folder without files.
        ValueError: files that aren't what their names say, or several kinds in a source; too few tokens.
        ModuleNotFoundError: an extra that a file needs is not installed.
    """
    with errors_at("train_dataset.tokenizer: "):
        tokenizer = Tokenizer(os.path.expanduser(section.tokenizer)) if section.tokenizer else None
    opened, sources = [], section.sources or (Source(section.data_path),)
    for number, source in enumerate(sources):
        where = f"train_dataset.sources[{number}]" if section.sources else "train_dataset"
        if source.factory:
            own = _opened(source.factory, f"{where}.factory", section, model, seed)
            with errors_at(f"{where}.factory: ", kinds=TypeError):
                opened.append(Samples(own, source.factory, limits))
            continue
        with errors_at(f"{where}.data_path: ", kinds=(OSError, ValueError)):
            tokens = open_tokens(source.data_path, os.path.expanduser(section.cache_dir), tokenizer, section.max_bytes)
            opened.append(Sequences(tokens, section.seq_length, model.vocab_size, section.packing == "documents"))
    with errors_at("train_dataset.sources: "):
        return Stream(tuple(opened), Mixture(tuple(source.weight for source in sources)), seed)


def _opened(path, key, section, model, seed):
    """What the function at an import path returns."""
    with errors_at(f"{key}: ", kinds=ValueError):
        factory = import_object(path, "dataset")
    return factory(section, model, seed)


def _check_ids(arrays, limits, where):
    """Raise `DataError` for a token id that isn't in `limits`, see `id_limits`; `where(place)` names its sample."""
    for number in limits.keys() & range(len(arrays)):
        found, (size, other) = arrays[number], limits[number]
        odd = np.argwhere(((found < 0) | (found >= size)) & (found != other))
        if len(odd):
            place = tuple(odd[0].tolist())
            raise DataError(f"{where(place)}: token {found[place]} in array {number}, but model.vocab_size is {size}")


def _is_indexed(dataset):
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


@dataclass(frozen=True)
class Samples:
    """A user's object with `len()` and an index, as a source: each sample a tuple of NumPy arrays, which is checked.

    Of arrays that are mapped files, only the wanted part is read. An object that reads in another way may have a method
    `part(index, slices)`, too: a tuple of the parts of the arrays of sample `index`, of which `slices` has, for each
    array, a tuple with the slice of each dim, of step 1. All its samples have the shapes of sample 0.

    One thread at a time asks it for samples, as a file needs that is read at a place: a step's are read ahead.
    `limits`: see `id_limits`.
    """

    source: object
    factory: str
    limits: dict = field(default_factory=dict, hash=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def __post_init__(self):
        if not _is_indexed(self.source):
            raise TypeError(f"{self.factory}: {self.source!r} has no len() and no index: docs/data.md")
        if len(self.source) == 0:
            raise DataError(f"{self.factory}: an object without samples: its len() is 0")

    def __len__(self):
        return len(self.source)

    @cached_property
    def kinds(self):
        """Shape and dtype of each array of sample 0."""
        return tuple((array.shape, array.dtype) for array in self[0])

    def __getitem__(self, row):
        return self._in_vocabulary(row, self._asked(row, lambda: self.source[row]))

    def part(self, row, cut):
        """The parts of a sample's arrays that `cut` names, see `Stream.batch`."""
        sample = None if callable(getattr(self.source, "part", None)) else self._asked(row, lambda: self.source[row])
        shapes = tuple(shape for shape, _ in self.kinds) if sample is None else tuple(array.shape for array in sample)
        with errors_at(f"{self.factory}: sample {row}: ", kinds=ValueError):
            parts = cut(shapes)
        if sample is not None:
            return self._in_vocabulary(row, [array[slices] for array, slices in zip(sample, parts, strict=True)])
        sample = self._asked(row, lambda: self.source.part(row, parts))
        found = [array.shape for array in sample]
        wanted = [tuple(each.stop - each.start for each in slices) for slices in parts]
        if found != wanted:
            raise DataError(
                f"{self.factory}: part({row}, …) should return arrays of shapes {wanted}, not {found}: docs/data.md"
            )
        return self._in_vocabulary(row, sample)

    def _in_vocabulary(self, row, arrays):
        _check_ids(arrays, self.limits, lambda _: f"{self.factory}: sample {row}")
        return tuple(arrays)

    def _asked(self, row, read):
        """A sample as a tuple. Raises `DataError` for anything but NumPy arrays, and for any other error."""
        with self._lock, errors_at(f"{self.factory}: sample {row}: ", kinds=_ANY, kind=DataError):
            sample = read()
        arrays = sample if isinstance(sample, (tuple, list)) else ()
        if arrays and all(isinstance(each, (np.ndarray, np.generic)) for each in arrays):
            return tuple(arrays)
        raise DataError(
            f"{self.factory}: sample {row} should be a tuple of NumPy arrays, not {type(sample).__name__}: docs/data.md"
        )

    def about(self):
        """What has to be the same in a resumed run."""
        return {"factory": self.factory, "samples": len(self)}


@dataclass(frozen=True)
class OwnDataset:
    """A user's dataset, `source`, that the function `factory` has opened; what it gives is checked.

    One thread at a time asks it for samples, as of `Samples`, of which `limits` are.
    """

    source: object
    factory: str
    seed: int = 0
    limits: dict = field(default_factory=dict, hash=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def batch(self, first, count):
        """A tuple of NumPy arrays of `count` rows. Raises `DataError` for anything else."""
        found, kinds = "it raised StopIteration", {}
        where = errors_at(f"{self.factory}: samples {first} to {first + count - 1}: ", kinds=_ANY, kind=DataError)
        with self._lock, where, suppress(StopIteration):
            arrays = self.source.batch(first, count)
            kinds = {type(each).__name__ for each in arrays} if isinstance(arrays, (tuple, list)) else {}
            found = f"it returned a {type(arrays).__name__}{f' of {first_of(sorted(kinds))}' if kinds else ''}"
        if kinds == {"ndarray"}:
            found = f"it returned arrays of {first_of([*map(len, map(np.atleast_1d, arrays))])} rows"
            if all(array.shape[:1] == (count,) for array in arrays):
                _check_ids(arrays, self.limits, lambda place: f"{self.factory}: sample {first + place[0]}")
                return tuple(arrays)
        raise DataError(
            f"{self.factory}: batch({first}, {count}) should return a tuple of NumPy arrays of {count} rows, "
            f"from a stream that doesn't end: {found}: docs/models.md"
        )

    def state(self):
        """See `Stream.state`: what a user's dataset holds isn't known."""
        return {"facts": {"factory": self.factory, "seed": self.seed}}

    def resumed(self, state, end, goes_on=False):
        """See `Stream.resumed`; the dataset is asked for samples from `end` on."""
        check_facts(state["facts"], self.state()["facts"], goes_on)
        return self


class InOrder:
    """A `mindspore.dataset` as a stream: its epochs one after the other, in its own order.

    Every rank iterates over all of it up to its own samples, a resumed run from the beginning; whether all ranks, and
    later runs, see the same order is up to the dataset: a shuffling one needs a seed of its own.
    """

    def __init__(self, dataset):
        self._dataset, self._next, self._rows = dataset, 0, self._epochs()

    def _epochs(self):
        while True:
            row = None
            for row in self._dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
                yield row
            if row is None:
                raise DataError("a mindspore.dataset should have rows, this one has none: docs/data.md")

    def batch(self, first, count):
        """Samples `first` … `first + count - 1`: a tuple of arrays."""
        if first < self._next:
            self._next, self._rows = 0, self._epochs()
        for _ in range(first - self._next):
            next(self._rows)
        self._next = first + count
        return tuple(map(np.stack, zip(*(next(self._rows) for _ in range(count)))))
