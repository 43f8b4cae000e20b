"""Sources of tokens: rows of token ids in mapped files, and where their documents begin.

Text, and rows of JSON lines, Parquet and MindRecord, become such files once, in a cache; one process of a machine
writes them while others wait.
"""

import fcntl
import glob
import hashlib
import os
import re
import shutil
import sysconfig
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from mindformers_core.data.mapped import intact
from mindformers_core.data.megatron import open_megatron
from mindformers_core.data.rows import READERS, documents_of
from mindformers_core.hints import first_of
from mindformers_core.scopes import errors_at

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_SAMPLE = 2**16  # tokens of a checksum
_BESIDE = re.compile(r"\.mindrecord(\d*\.db|0*[1-9]\d*)$")  # what a reader of a file, or of the first of several, reads


@dataclass(frozen=True)
class Tokens:
    """Token ids in a row, in documents.

    Attributes:
        ids: one-dimensional array of integers, usually memory-mapped.
        starts: a sequence of the places where documents begin, increasing, the first of them 0.
        name: of the files, for errors.
        labels: a uint8 array of the length of `ids`: 0 where a token isn't to be predicted. None: all are.
    """

    ids: np.ndarray
    starts: object
    name: str
    labels: np.ndarray | None = None

    def read(self, first, end, vocab_size):
        """The tokens `first` … `end - 1`, int32.

        Raises:
            ValueError: a token id that the model doesn't have; names file and place. A file that has been cut off.
        """
        found = np.asarray(intact(self.ids)[first:end], np.int64)
        odd = np.flatnonzero((found < 0) | (found >= vocab_size))
        if len(odd):
            token, place = found[odd[0]], first + odd[0]
            limit = "negative: token ids start at 0" if token < 0 else f"not below model.vocab_size {vocab_size}"
            raise ValueError(f"{self.name}: token {token} at place {place} is {limit}")
        return found.astype(np.int32)

    def about(self):
        """What has to be the same in a resumed run: sizes, and a checksum of the first and the last tokens."""
        name = os.path.basename(self.name)
        found = {"name": name, "tokens": len(self.ids), "documents": len(self.starts)}
        for key, array in {"checksum": self.ids, "checksum of labels": self.labels}.items():
            if array is not None:
                found[key] = zlib.crc32(np.concatenate([array[:_SAMPLE], array[-_SAMPLE:]]).tobytes())
        return found


def open_tokens(paths, cache, tokenizer=None, max_bytes=None):
    """The `Tokens` of files.

    Args:
        paths: files of one kind, folders, or patterns: `.npy`, one row of token ids, which stands alone; `.bin` beside
            an `.idx`, Megatron's; `.jsonl`, `.parquet`, `.mindrecord`, rows as of `documents_of`; others are text, a
            document each, read as bytes where there is no tokenizer. Default: the sources of Python's standard library.
        cache: folder for what isn't token ids yet.
        tokenizer: a `Tokenizer` for text and conversations. Default: None, bytes.
        max_bytes: further text is ignored. Default: None, all of it.

    Raises:
        FileNotFoundError: a path that doesn't exist, or a folder without files.
        ValueError: files of several kinds; a file that isn't what its name says.
        OSError: a file can't be read, or the cache can't be written.
    """
    files = text_files(paths)
    files = [name for name in files if not _BESIDE.search(name)] or files
    suffixes = {suffix if (suffix := _suffix(name)) in {*_OPENERS, *READERS} else "" for name in files}
    if len(suffixes) > 1:
        kinds = ", ".join(sorted(suffix or "text" for suffix in suffixes))
        raise ValueError(f"{first_of(files)}: files of several kinds ({kinds}): give each a source of its own")
    (suffix,) = suffixes
    if suffix in _OPENERS:
        if len(files) > 1:
            raise ValueError(f"{files[0]} stands alone, not beside {files[1]}: give each a source of its own")
        return Tokens(*_OPENERS[suffix](files[0]), files[0])
    folder, name = _cached(files, suffix, tokenizer, max_bytes, cache), first_of(files, 1)
    with errors_at(f"{folder} can't be read, so remove it: "):
        ids = np.memmap(os.path.join(folder, "ids"), np.int32 if suffix or tokenizer else np.uint8, "r")
        starts, labels = np.memmap(os.path.join(folder, "starts"), np.int64, "r"), os.path.join(folder, "labels")
        labels = np.memmap(labels, bool, "r", shape=ids.shape) if os.path.exists(labels) else None
    return Tokens(ids, starts, name, labels)


def _suffix(name):
    """That of a file; also of one of several files that MindSpore has written together, `.mindrecord0`."""
    return re.sub(r"^(\.mindrecord)\d+$", r"\1", os.path.splitext(name)[1])


def _row_of_ids(path):
    """The ids of a `.npy` file, one document."""
    with errors_at(f"{path} can't be read as .npy: ", kinds=(OSError, ValueError, EOFError)):
        ids = np.load(path, mmap_mode="r")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{path} holds {ids.dtype} of shape {ids.shape}, not one row of token ids")
    if os.path.getsize(path) != ids.offset + ids.nbytes:
        raise ValueError(f"{path} has {os.path.getsize(path)} bytes, not {ids.offset + ids.nbytes} of {len(ids)} ids")
    return ids, (0,)


_OPENERS = MappingProxyType({".npy": _row_of_ids, ".bin": open_megatron})


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
            raise FileNotFoundError(f"there is no file or folder '{path}'")
    return files


def _files_below(folder, suffix, name):
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(entry for entry in folders if entry not in _SKIPPED_FOLDERS and not entry.startswith("."))
        files += [os.path.join(place, entry) for entry in sorted(names) if entry.endswith(suffix)]
    if not files:
        raise FileNotFoundError(f"{name} holds no {suffix or 'text'} files: give others")
    return files


def _cached(files, suffix, tokenizer, max_bytes, cache):
    """A folder of `cache` with the files `ids`, `starts` and perhaps `labels`, for `Tokens`; made where missing."""
    with errors_at(f"train_dataset.cache_dir {cache} can't get the tokens: ", kinds=OSError):
        if cache.startswith("~"):
            raise FileNotFoundError("there is no home folder")
        os.makedirs(cache, exist_ok=True)
    stamps = [(os.path.abspath(path), os.path.getsize(path), os.stat(path).st_mtime_ns) for path in files]
    settings = stamps, suffix, tokenizer and tokenizer.key, max_bytes
    target = os.path.join(cache, f"tokens_{hashlib.sha256(repr(settings).encode()).hexdigest()[:16]}")
    with open(target + ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank of a machine writes, the others wait; released if it dies
        if not os.path.exists(target):
            unfinished = target + ".unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            os.makedirs(unfinished)
            try:
                if not _write(unfinished, _documents(files, suffix, tokenizer, max_bytes), suffix or tokenizer):
                    raise ValueError(f"{first_of(files, 1)}: all documents are empty")
                os.rename(unfinished, target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _write(folder, documents, is_wide):
    """Write documents, pairs as of `documents_of`, without those that have no tokens; returns the number of tokens."""
    with ExitStack() as stack:
        ids, starts, labels = (
            stack.enter_context(open(os.path.join(folder, name), "wb")) for name in ("ids", "starts", "labels")
        )
        place, is_masked = 0, False
        for tokens, own in documents:
            if len(tokens):
                starts.write(np.int64(place).tobytes())
                ids.write(np.asarray(tokens, np.int32 if is_wide else np.uint8).tobytes())
                labels.write((np.ones(len(tokens), bool) if own is None else own).tobytes())
                place, is_masked = place + len(tokens), is_masked or own is not None
    if not is_masked:
        os.unlink(os.path.join(folder, "labels"))
    return place


def _documents(files, suffix, tokenizer, max_bytes):
    """The documents of files, one by one: of text a document each, whose bytes end with a zero byte."""
    room = max_bytes
    for path in files:
        if suffix:
            yield from documents_of(path, suffix, tokenizer)
            continue
        if room is not None and room <= 0:
            return
        with errors_at(f"{path} can't be read: ", kinds=OSError), open(path, "rb") as file:
            text = file.read(room)
        if b"\0" in text:
            raise ValueError(f"{path} is no text, it has zero bytes: docs/data.md says what can be read")
        if tokenizer is None:
            text = (text + b"\0")[:room]
        room = None if room is None else room - len(text)
        yield (
            np.frombuffer(text, np.uint8) if tokenizer is None else tokenizer.text(text.decode(errors="replace")),
            None,
        )
