"""Rows of JSON lines, Parquet and MindRecord as documents: token ids, and which of them are labels."""

import json
from types import MappingProxyType

import numpy as np

from mindformers_core.hints import first_of, install_hint
from mindformers_core.scopes import errors_at

_FIELDS = ("input_ids", "messages", "text")


def documents_of(path, suffix, tokenizer):
    """The documents of a file, one by one: pairs of an array of token ids, and one of whether each is a label, or None.

    A row has `input_ids`, a list of whole numbers, and may have `labels`, of the same length, -100 where a token isn't
    to be predicted; or `text`; or `messages`, a conversation, of which what the assistant says is to be predicted.

    Args:
        path: of the file. suffix: a key of `READERS`.
        tokenizer: a `Tokenizer`, which texts and conversations need; or None.

    Raises:
        ValueError: a row of other fields or kinds; names file and row. ModuleNotFoundError: a missing extra.
    """
    for number, row in enumerate(READERS[suffix](path)):
        where = f"{path}: row {number}"
        field = next((name for name in _FIELDS if isinstance(row, dict) and name in row), None)
        if field is None:
            shown = first_of([*row]) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{where} has {shown}, but none of {', '.join(_FIELDS)}")
        if field == "input_ids":
            yield _ids(row, where)
            continue
        if tokenizer is None:
            raise ValueError(f"{where} has {field}, which needs a tokenizer: train_dataset.tokenizer=FOLDER")
        try:
            yield tokenizer.conversation(row[field]) if field == "messages" else (tokenizer.text(row[field]), None)
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"{where}: {field} can't be tokenized: {error}") from error


def _ids(row, where):
    with errors_at(f"{where}: "):  # lists of different lengths
        ids = np.asarray(row["input_ids"])
        labels = None if row.get("labels") is None else np.asarray(row["labels"])
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{where}: input_ids of {ids.dtype} {list(ids.shape)} should be whole numbers in a row")
    if labels is not None and (labels.shape != ids.shape or ((labels != -100) & (labels != ids)).any()):
        raise ValueError(f"{where}: labels should be those of input_ids, or -100, as many")
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise ValueError(f"{where}: input_ids from {ids.min()} to {ids.max()}: token ids are 0 to 2**31 - 1")
    return ids, None if labels is None else labels != -100


def _json_lines(path):
    unread = errors_at(f"{path} can't be read as JSON lines: ", kinds=(OSError, UnicodeDecodeError))
    with unread, open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}: line {number + 1} isn't JSON: {error}") from error


def _parquet(path):
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} needs pyarrow: {install_hint('parquet')}", name="pyarrow") from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches(1024):
            yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise ValueError(f"{path} can't be read as Parquet: {error}") from error


def _mindrecord(path):
    from mindspore.mindrecord import FileReader

    try:
        reader = FileReader(path)
        yield from reader.get_next()
        reader.close()
    except RuntimeError as error:
        raise ValueError(f"{path} can't be read as MindRecord: {str(error).splitlines()[0]}") from error


READERS = MappingProxyType({".jsonl": _json_lines, ".parquet": _parquet, ".mindrecord": _mindrecord})
