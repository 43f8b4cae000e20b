"""Memory-mapped tokens, and the sequences of any step: a pure function of the seed and an index.

A job has one stream of sequences. Its sequence of index g doesn't depend on the number of ranks, the micro-batch size
and the step at which a run was resumed, so loss curves agree. Tokens are the bytes of text files (vocabulary 256), or
the entries of a `.npy` file.
"""

import fcntl
import glob
import hashlib
import os
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mindformers_core.hints import first_of
from mindformers_core.lazy_exports import import_object
from mindformers_core.scopes import errors_at

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class TokenDataset:
    """Sequences of `seq_length` tokens, shuffled anew by `seed` in every epoch."""

    tokens: np.ndarray  # one-dimensional, integers, usually memory-mapped
    seq_length: int
    seed: int
    name: str = "train_dataset.data_path"  # of the data, for errors

    def __post_init__(self):
        if len(self) < 1:
            raise ValueError(
                f"{self.name}: {len(self.tokens)} tokens are too few for one sequence of train_dataset.seq_length "
                f"{self.seq_length} and the token after it: give more text, or "
                f"train_dataset.seq_length={len(self.tokens) - 1}"
            )

    def __len__(self):
        """Sequences of one epoch."""
        return (len(self.tokens) - 1) // self.seq_length

    def batch(self, first, count):
        """Sequences `first` to `first + count - 1` of the endless stream.

        Returns:
            `(input_ids, labels)`, int32 arrays of shape (count, seq_length); labels are the next tokens.
        """
        rows = np.stack([self._sequence(index) for index in range(first, first + count)])
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])

    def _sequence(self, index):
        epoch, place = divmod(index, len(self))
        start = int(_shuffled(self.seed, epoch, len(self))[place]) * self.seq_length
        return np.asarray(self.tokens[start : start + self.seq_length + 1], dtype=np.int32)


class DataError(ValueError):
    """A dataset of the user's gave something else than a batch."""


@dataclass(frozen=True)
class OwnDataset:
    """A user's dataset, `source`, that the function `factory` has opened; what it gives is checked."""

    source: object
    factory: str

    def batch(self, first, count):
        """A tuple of NumPy arrays of `count` rows. Raises `DataError` for anything else."""
        found = "it raised StopIteration"
        with suppress(StopIteration):
            arrays = self.source.batch(first, count)
            kinds = {type(each).__name__ for each in arrays} if isinstance(arrays, (tuple, list)) else {}
            found = f"it returned a {type(arrays).__name__}{f' of {first_of(sorted(kinds))}' if kinds else ''}"
            if kinds == {"ndarray"}:
                found = f"it returned arrays of {first_of([*map(len, map(np.atleast_1d, arrays))])} rows"
                if all(array.shape[:1] == (count,) for array in arrays):
                    return tuple(arrays)
        raise DataError(
            f"train_dataset.factory: {self.factory}: batch({first}, {count}) should return a tuple of NumPy arrays of "
            f"{count} rows, from a stream that doesn't end: {found}: docs/models.md"
        )


def dataset_of(recipe):
    """The dataset of a recipe: a `TokenDataset`, or the object that the function `train_dataset.factory` returns.

    The function takes the recipe's section `train_dataset`, the model's config and the data's seed. The object has a
    method `batch(first, count)`, which returns a tuple of arrays, each with samples `first` to `first + count - 1` of
    an endless stream along its first dim. The stream is the same on all ranks; each rank requests its own samples.

    Raises:
        ValueError: a factory that can't be imported. TypeError: an object without such a `batch`, as MindSpore's
            datasets. More: `open_dataset`.
    """
    section, seed = recipe.train_dataset, recipe.data_seed
    if not section.factory:
        return open_dataset(section, recipe.model.vocab_size, seed)
    with errors_at("train_dataset.factory: ", kinds=ValueError):
        factory = import_object(section.factory, "dataset")
    dataset = factory(section, recipe.model, seed)
    if not callable(getattr(dataset, "batch", None)) or hasattr(dataset, "create_dict_iterator"):  # MindSpore's
        raise TypeError(
            f"train_dataset.factory: {section.factory} returned {dataset!r}, which has no method batch(first, count): "
            "docs/models.md"
        )
    return OwnDataset(dataset, section.factory)


def open_dataset(section, vocab_size, seed):
    """The `TokenDataset` of a `train_dataset` section.

    The bytes of text files are cached in one file, which is written once, under a lock, and renamed when it is
    complete. All tokens are checked here, so that no step has to.

    Raises:
        FileNotFoundError: a path that doesn't exist, or a folder without files.
        ValueError: a `.npy` file that isn't one row of whole numbers, or isn't the only file; too few tokens; a token
            outside the model's vocabulary.
    """
    name = next((path for path in section.data_path if path.endswith(".npy")), None)
    if name is None:
        files = text_files(section.data_path)
        folder = os.path.expanduser(section.cache_dir)
        with errors_at(f"train_dataset.cache_dir: {folder} can't get the text's bytes: ", kinds=OSError):
            if folder.startswith("~"):
                raise FileNotFoundError("there is no home folder")
            tokens, name = np.memmap(_cached(files, section.max_bytes, folder), np.uint8, "r"), files[0]
    elif len(section.data_path) > 1:
        raise ValueError(f"train_dataset.data_path: {name} stands alone, not in a list of {section.data_path}")
    elif not os.path.exists(os.path.expanduser(name)):
        raise FileNotFoundError(f"train_dataset.data_path: there is no file '{name}'")
    else:
        tokens = np.load(os.path.expanduser(name), mmap_mode="r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"train_dataset.data_path: {name} holds {tokens.dtype} of shape {tokens.shape}, not one row of token ids"
        )
    dataset = TokenDataset(tokens, section.seq_length, seed, f"train_dataset.data_path ({name} …)")
    place = tokens.argmin() if tokens.min() < 0 else tokens.argmax()
    if not 0 <= tokens[place] < vocab_size:
        limit = "negative: token ids start at 0" if tokens[place] < 0 else f"not below model.vocab_size {vocab_size}"
        raise ValueError(f"{dataset.name}: token {tokens[place]} at place {place} is {limit}")
    return dataset


def text_files(paths):
    """All files of `paths` (files, folders, patterns), in an order that depends on their names only.

    Without paths: the `.py` files of Python's standard library.

    Raises:
        FileNotFoundError: a path that doesn't exist, or a folder without files.
    """
    if not paths:
        library = sysconfig.get_paths()["stdlib"]
        return _files_below(library, ".py", f"the standard library ({library})")
    files = []
    for path in map(os.path.expanduser, paths):
        if os.path.isdir(path):
            files += _files_below(path, "", path)
        elif os.path.isfile(path):
            files.append(path)
        elif glob.has_magic(path) and glob.glob(path):
            files += sorted(found for found in glob.glob(path) if os.path.isfile(found))
        else:
            raise FileNotFoundError(f"train_dataset.data_path: there is no file or folder '{path}'")
    return files


def _files_below(folder, suffix, name):
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(entry for entry in folders if entry not in _SKIPPED_FOLDERS and not entry.startswith("."))
        files += [os.path.join(place, entry) for entry in sorted(names) if entry.endswith(suffix)]
    if not files:
        raise FileNotFoundError(f"train_dataset.data_path: {name} holds no {suffix or 'text'} files: give others")
    return files


def _cached(files, max_bytes, cache_dir):
    """Path of a file with the bytes of `files`, a zero byte after each, at most `max_bytes`; made where missing."""
    os.makedirs(cache_dir, exist_ok=True)
    stamps = [(os.path.abspath(path), os.path.getsize(path), os.stat(path).st_mtime_ns) for path in files]
    key = hashlib.sha256(repr((stamps, max_bytes)).encode()).hexdigest()[:16]
    target = os.path.join(cache_dir, f"bytes_{key}")
    with open(target + ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank of a machine writes, the others wait; released if it dies
        if not os.path.exists(target):
            with open(target + ".unfinished", "wb") as tokens:
                for path, size, _ in stamps:
                    room = max_bytes - tokens.tell()
                    if room <= 0:
                        break
                    with open(path, "rb") as file:
                        tokens.write(file.read(min(size, room)))
                    tokens.write(b"\0"[: max_bytes - tokens.tell()])
            os.replace(target + ".unfinished", target)
    return target


@lru_cache(maxsize=2)
def _shuffled(seed, epoch, count):
    return np.random.default_rng((seed, epoch)).permutation(count)
