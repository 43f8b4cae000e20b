"""Reads and writes pipeline tables as CSV or YAML files, which can be edited by hand. Pure Python."""

import csv
import os

import yaml

from mindformers_core.files import write_whole
from mindformers_core.hints import nearest
from mindformers_core.pipeline.tables.step import step_from_text
from mindformers_core.pipeline.tables.table import ScheduleTable
from mindformers_core.pipeline.tables.validating import check_head
from mindformers_core.scopes import errors_at

_KEYS = ("micro_batch_num", "stage_ranks", "orders")
SUFFIXES = ("csv", "yaml", "yml")


def save_table(table, path):
    """Write a table to a file, in the format of its suffix `.csv`, `.yaml` or `.yml`; an existing file is replaced.

    CSV: the row `micro_batch_num` with the number, the row `stage_ranks` with the rank of every stage, and for every
    rank a row `rank 0`, … with the texts of its steps (`F3@1`), one for each cell. YAML: the keys `micro_batch_num`,
    `stage_ranks`, and `orders` with a list of texts for every rank.

    Raises:
        ValueError: another suffix.
    """
    if checked_suffix(path, SUFFIXES) == "csv":
        text = str(table)
    else:
        values = table.micro_batch_num, list(table.stage_ranks), [list(map(str, order)) for order in table.orders]
        content = dict(zip(_KEYS, values))
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=float("inf"))
    write_whole(path, text)


def load_table(path):
    """Read the `ScheduleTable` of a file in a format of `save_table`; the table is neither lowered nor validated.

    Empty cells of a CSV file are skipped: they may stand for bubbles.

    Raises:
        ValueError: another suffix, or a fault in the file: names the file, the row (line of the CSV file, or rank), the
            column (or number of the step, from 0), and the text there.
    """
    read = _read_csv if checked_suffix(path, SUFFIXES) == "csv" else _read_yaml
    kinds = UnicodeDecodeError, csv.Error, yaml.YAMLError
    # spreadsheets write a byte order mark
    with errors_at(f"{path}: ", kinds=kinds), open(path, encoding="utf-8-sig", newline="") as file:
        micro_batch_num, stage_ranks, rank_cells = read(file, path)
    orders = tuple(tuple(_step(text, path, place) for place, text in cells) for cells in rank_cells)
    table = ScheduleTable(orders, tuple(stage_ranks), micro_batch_num)
    with errors_at(f"{path}: "):
        check_head(table)
    return table


def checked_suffix(path, allowed):
    """The suffix of `path`, in lower case, without the dot.

    Raises:
        ValueError: another suffix than the `allowed` ones.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix[1:] not in allowed:
        names = " or ".join(f".{name}" for name in allowed)
        raise ValueError(f"{os.fspath(path)!r}: the name should end with {names}{nearest(suffix, allowed)}")
    return suffix[1:]


def _step(text, path, place):
    with errors_at(f"{path}, {place}: "):
        return step_from_text(text)


def _read_csv(file, path):
    """Number of micro-batches, ranks of the stages, and for every rank [(place, text)]."""
    numbers, rank_cells = {}, []
    for line, row in enumerate(csv.reader(file), start=1):
        cells = [(f"row {line}, column {column}", text.strip()) for column, text in enumerate(row, start=1)]
        cells = [cell for cell in cells if cell[1]]
        if not cells:
            continue
        name = row[0].strip()
        if name in _KEYS[:2] and name not in numbers:
            numbers[name] = [_whole_number(text, path, place) for place, text in cells[1:]]
        elif name == f"rank {len(rank_cells)}":
            rank_cells.append(cells[1:])
        else:
            expected = [key for key in _KEYS[:2] if key not in numbers] + [f"rank {len(rank_cells)}"]
            raise ValueError(f"{path}, row {line}, column 1: {name!r} should be {' or '.join(expected)}")
    for key in _KEYS[:2]:
        if key not in numbers:
            raise ValueError(f"{path}: there is no row {key}")
    if len(numbers["micro_batch_num"]) != 1:
        raise ValueError(f"{path}: the row micro_batch_num has {len(numbers['micro_batch_num'])} numbers, not one")
    return numbers["micro_batch_num"][0], numbers["stage_ranks"], rank_cells


def _whole_number(text, path, place):
    if not text.isdecimal():
        raise ValueError(f"{path}, {place}: {text!r} is no whole number")
    return int(text)


def _read_yaml(file, path):
    """As `_read_csv`."""
    content = yaml.safe_load(file)
    if not isinstance(content, dict) or set(content) != set(_KEYS):
        given = ", ".join(map(str, content)) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise ValueError(f"{path}: should have the keys {', '.join(_KEYS)}, not {given}")
    micro_batch_num, stage_ranks, orders = (content[key] for key in _KEYS)
    for key in _KEYS[1:]:
        if not isinstance(content[key], list):
            raise ValueError(f"{path}: {key}: {content[key]!r} should be a list")
    rank_cells = []
    for rank, texts in enumerate(orders):
        if not isinstance(texts, list):
            raise ValueError(f"{path}: orders, rank {rank}: {texts!r} should be a list of steps")
        rank_cells.append([(f"orders, rank {rank}, step {number}", str(text)) for number, text in enumerate(texts)])
    return micro_batch_num, stage_ranks, rank_cells
