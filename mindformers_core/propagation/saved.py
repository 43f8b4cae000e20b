"""Plans as JSON files: `save_plan` and `load_plan`. Pure Python.

A file holds every distinct `CellPlan` once, with the structure key and a listing of its graph, and in it every move,
operator and call with all layouts. What follows from these and the captured graph (signatures, local shapes, bytes) is
not in it. A layout is written dim by dim: `["dp", null, ["cp", "tp"]]` is `[dp, -, (cp, tp)]`; one with marks is
`{"dims": […], "partial": {"tp": "sum"}, "varying": ["dp"]}`.
"""

import json
from dataclasses import replace

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.files import write_whole
from mindformers_core.program.free_variables import lambda_lift
from mindformers_core.program.plan import CallPlan, Move
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.checking import PlanError, check_plan
from mindformers_core.propagation.restoring import graph_lines, restored

__all__ = ["load_plan", "save_plan"]

_FORMAT = "mindformers_core plan"
_VERSION = 1


def save_plan(frame, path):
    """Write a plan to the file `path`, in one go: a reader finds the old file or the whole new one.

    Equal plans give equal files.

    Args:
        frame: the `CellPlan` of the root.
        path: of a JSON file, as readable as `explain`'s text.
    """
    frames = {}  # identity of a CellPlan -> (its place, the CellPlan), in the order in which they are first called
    for _, found in frame.walk():
        frames.setdefault(id(found), (len(frames), found))
    places = {key: place for key, (place, _) in frames.items()}
    mesh = {"shape": list(frame.mesh.shape), "axis_names": list(frame.mesh.axis_names)}
    head = {"format": _FORMAT, "version": _VERSION, "mesh": mesh}
    whole = head | {"frames": [_frame_data(found, places) for _, found in frames.values()]}
    write_whole(path, _written(whole, 0) + "\n")


def load_plan(path, graph, mesh, final=False):
    """The plan in a file that `save_plan` wrote; nothing is searched.

    Args:
        path: of the file.
        graph: the captured `CellGraph` of the same Cell, with inputs of the same shapes.
        mesh: a mesh of the shape and axis names of the plan's.
        final: see `check_plan`.

    Returns:
        A `CellPlan` like the one saved; its graphs are those of `graph`.

    Raises:
        ValueError: the file is no plan, or of another version; the mesh is another one; the graph is another one than
            the plan was made for (says what differs); or a layout or move in the file doesn't fit.
    """
    with open(path, encoding="utf-8") as file:
        try:
            data = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no plan: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f'{path} is no plan: save_plan() writes one, with "format": "{_FORMAT}"')
    if data["version"] != _VERSION:
        raise ValueError(f"{path} is a plan of version {data['version']}; this is for version {_VERSION}: make it anew")
    planned = dict(zip(data["mesh"]["axis_names"], data["mesh"]["shape"]))
    if list(planned.items()) != list(zip(mesh.axis_names, mesh.shape)):
        found = ", ".join(f"{name}={size}" for name, size in planned.items())
        raise ValueError(f"{path} is a plan for the mesh ({found}), not for {mesh}: plan anew for this one")
    frame = restored(path, data["frames"], lambda_lift(graph), mesh)
    try:
        check_plan(frame, final)
    except PlanError as error:
        raise ValueError(f"{path}: {error}; the file was changed: plan anew") from error
    return frame


def _frame_data(frame, places):
    """A `CellPlan` as JSON-able data; `places`: identity of a CellPlan -> its place in the file."""
    graph, added = _as_planned(frame.graph)
    numbers = {id(node): number for number, node in enumerate(graph.nodes)}
    return {
        "cell": graph.path,
        "call": graph.call,
        "structure": graph.key,
        "graph": graph_lines(graph),
        "taken_for_others": added,
        "layouts": {str(number): _layout_data(layout) for number, layout in sorted(frame.layouts.items())},
        "instructions": [_instruction_data(entry, numbers, places) for entry in frame.instructions],
        "results": [_layout_data(layout) for layout in frame.results],
        "lifted": [[value.id, _layout_data(layout)] for value, layout in frame.lifted],
        "gradients": sorted(frame.gradients),
    }


def _as_planned(graph):
    """A frame's graph without what it takes from elsewhere for those below it only, and the numbers of that."""
    used = {value.id for node in graph.nodes for value in tree_leaves((node.args, node.kwargs))}
    used |= {value.id for value in tree_leaves(graph.result)}
    kept = {
        part: tuple(use for use in getattr(graph, part) if use.value.id in used) for part in ("parameters", "outer")
    }
    added = {
        "parameters": {str(use.value.id): use.path for use in graph.parameters if use.value.id not in used},
        "outer": {str(use.value.id): [use.call, use.id] for use in graph.outer if use.value.id not in used},
    }
    return (replace(graph, **kept) if any(added.values()) else graph), added


def _instruction_data(entry, numbers, places):
    if isinstance(entry, Move):
        data = {"move": entry.value.id, "from": _layout_data(entry.source), "to": _layout_data(entry.target)}
        data |= {"by": [_step_data(step) for step in entry.steps], "reason": entry.reason, "gradient": entry.gradient}
        itemsize = {step.itemsize for step in entry.steps} - {ITEM_BYTES[entry.value.dtype]}
        return data | ({"itemsize": itemsize.pop()} if itemsize else {})
    inputs, outputs = (list(map(_layout_data, layouts)) for layouts in (entry.inputs, entry.outputs))
    data = {"node": numbers[id(entry.node)], "inputs": inputs, "outputs": outputs}
    if isinstance(entry, CallPlan):
        lifted = [[value.id, _layout_data(layout)] for value, layout in entry.lifted]
        child = entry.node.graph.path if entry.node.child is None else entry.node.child
        return {"call": child, **data, "frame": places.get(id(entry.frame)), "lifted": lifted}
    cuts = {factor: list(axes) for factor, axes in entry.axes_of.items()}
    run = {} if entry.algorithm is None else {"algorithm": entry.algorithm, "cut_axes": list(entry.cut_axes)}
    return {"operator": entry.node.operator, **data, "axes_of": cuts, **run}


def _layout_data(layout):
    """Dims alone where there are no marks, to be read at a glance."""
    dims = [None if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in layout.dims]
    if not layout.partial and not layout.varying:
        return dims
    marks = {"partial": dict(layout.partial), "varying": list(layout.varying)}
    return {"dims": dims, **{name: mark for name, mark in marks.items() if mark}}


def _step_data(step):
    """What tells a step from others that could be taken from the same layout."""
    places = {"dim": step.dim, "to_dim": step.to_dim, "op": step.op}
    after = {"to": _layout_data(step.target)} if step.kind == "permute" else {}  # there are several over the same axes
    return {"step": step.kind, "axes": list(step.axes), **{k: v for k, v in places.items() if v is not None}, **after}


def _written(data, depth):
    """JSON with one entry a line down to the instructions of a frame, which are a line each."""
    if depth == 4 or not data or not isinstance(data, (dict, list)) or _is_flat(data):
        return json.dumps(data, ensure_ascii=False)
    pad = "\n" + " " * (depth + 1)
    if isinstance(data, dict):
        entries = [
            f"{json.dumps(key, ensure_ascii=False)}: {_written(entry, depth + 1)}" for key, entry in data.items()
        ]
        return "{" + pad + ("," + pad).join(entries) + pad[:-1] + "}"
    return "[" + pad + ("," + pad).join(_written(entry, depth + 1) for entry in data) + pad[:-1] + "]"


def _is_flat(data):
    entries = data.values() if isinstance(data, dict) else data
    return not any(isinstance(entry, (dict, list)) or len(str(entry)) > 40 for entry in entries)
