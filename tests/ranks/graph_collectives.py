"""What a graph of `@ms.jit` communicates, read from the graph that MindSpore runs.

On CPU every collective is one `AllReduce` operator there, and the lines of source that it comes from tell its kind.
"""

import inspect
import re
import shutil
import tempfile
from contextlib import contextmanager
from itertools import combinations
from math import prod
from pathlib import Path

import mindspore as ms

from mindformers_core.communication import CollectiveCounts, backend_cpu
from mindformers_core.communication.backend_cpu import CpuCollective
from mindformers_core.communication.groups import make_group
from mindformers_core.redistribution.steps import wire_bytes

__all__ = ["count_in_graph"]

_NODE = re.compile(r"^ +%\d+\(\w+\) = AllReduce\(.*group: \"(\w+)\"")
_TYPE = re.compile(r"-> \(<Tensor\[(\w+)\], \(([\d, ]*)\)[,>]")
_CALLED = re.compile(r"\b(\w+)\(")
_BY_NAME = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")  # how generated modules call them
_LINE = re.compile(r"# In file (\S+):(\d+)")


@contextmanager
def count_in_graph(mesh):
    """Count the collectives of the one graph that is compiled inside a `with` block, as `count_collectives()` would.

    Gives a `CollectiveCounts`, which is filled at the end. Axes come in the mesh's order.
    """
    counts, folder = CollectiveCounts(), Path(tempfile.mkdtemp(prefix="graphs_"))
    ms.set_context(save_graphs=1, save_graphs_path=str(folder))
    try:
        yield counts
        files = [path for path in folder.rglob("*.ir") if re.fullmatch(r"\d+_execute_\d+\.ir", path.name)]
        assert len(files) == 1, f"{len(files)} graphs were compiled: {files}"
        _count(files[0].read_text(), mesh, counts)
    finally:
        ms.set_context(save_graphs=0)
        shutil.rmtree(folder)


def _count(text, mesh, counts):
    groups, kinds, lines = _groups(mesh), list(_kinds()), text.splitlines()
    for number, line in enumerate(lines):
        node = _NODE.match(line)
        if node is None:
            continue
        group, below = groups[node[1]], _below(lines[number + 1 :])
        dtype, shape = _TYPE.search(below[0]).groups()
        size = prod(int(length) for length in shape.split(",") if length.strip()) * _bytes_of(dtype)
        if any("_limbs(" in line for line in below):  # integers travel as twice as many bytes of floats
            size //= 2
        kind, gathers = _kind(below, kinds)
        size = size // group.size if gathers and kind != "all_gather" else size
        counts.add(kind, group.axes, wire_bytes(kind, group.size, size))


def _below(lines):
    """The lines that describe a node: all up to the next one."""
    end = next((place for place, line in enumerate(lines) if re.match(r" +%\d+\(", line)), len(lines))
    return lines[:end]


def _groups(mesh):
    """Name of a group -> the group, for all of the mesh's axes."""
    found = {}
    for count in range(1, len(mesh.axis_names) + 1):
        for axes in combinations(mesh.axis_names, count):
            group = make_group(mesh, axes)
            found.setdefault(group.name, group)
    return found


def _kinds():
    """(first line, last line, kind) of the backend's collectives in a graph."""
    for kind in _BY_NAME:
        lines, first = inspect.getsourcelines(getattr(CpuCollective, kind))
        yield first, first + len(lines) - 1, kind


def _kind(lines, kinds):
    """The kind of a node, and whether it gathers, from the lines of source below it, outermost first."""
    places = [place for place in map(_LINE.search, lines) if place and place[1] == backend_cpu.__file__]
    found = [kind for place in places for first, last, kind in kinds if first <= int(place[2]) <= last]
    if not found:  # MindSpore may drop the lines of functions that only call another one, as that of an all-reduce does
        called = [name for line in lines for name in _CALLED.findall(line) if name.startswith((*_BY_NAME, "shift_"))]
        called = ["permute" if name.startswith("shift_") else name for name in called]
        kind = next((kind for kind in _BY_NAME if called and called[0].startswith(kind)), "all_reduce")
        return kind, kind in ("all_to_all", "permute")
    return found[0], "all_gather" in found


def _bytes_of(dtype):
    return int(re.search(r"\d+", dtype)[0]) // 8
