"""Plans as JSON files: `save_plan` and `load_plan`. Pure Python.

A file contains the choices of the search: for every distinct `CellPlan` the mesh axes that shard each operator, and the
layouts of the results. Loading replays these choices with the device model of the file; the rest of the plan follows
from them and from the captured graph. The result must equal the listing of the plan in the file.
"""

import json
import re
from dataclasses import asdict
from itertools import zip_longest

from mindformers_core.files import write_whole
from mindformers_core.layout import Layout
from mindformers_core.operators.choice import Choice
from mindformers_core.program.free_variables import lambda_lift
from mindformers_core.program.plan import CallPlan, Redistribution, captured_graph
from mindformers_core.propagation.decide import decide_plan
from mindformers_core.propagation.propagate import Propagation
from mindformers_core.redistribution.device_model import DeviceModel, Link
from mindformers_core.scopes import errors_at

_FORMAT = "mindformers_core plan"
_VERSION = 3


def save_plan(plan, path):
    """Write a plan to the file `path` atomically: a reader finds the old file or the whole new one.

    Equal plans give equal files.

    Args:
        plan: the `CellPlan` of the root.
        path: of a JSON file, which contains every distinct `CellPlan` once: the listing of its graph, the choices, and
            the listing of the plan, with all layouts and redistributions.
    """
    mesh = {"shape": plan.mesh.shape, "axis_names": plan.mesh.axis_names}
    head = {"format": _FORMAT, "version": _VERSION, "mesh": mesh, "device_model": asdict(plan.device_model)}
    places = _places(plan)
    paths = {places[found]: path for path, found in reversed([*plan.walk()])}  # of first calls
    cells = [_cell_data(paths[place], found, places) for place, found in enumerate(_distinct(places))]
    write_whole(path, json.dumps(head | {"cells": cells}, indent=1, ensure_ascii=False) + "\n")


def load_plan(path, graph, mesh, arguments, parameters, declarations=None, final=True, algorithm=None):
    """Read a plan from a file of `save_plan`: the choices in the file are replayed without a search.

    Args:
        path: of the file.
        graph: the captured `CellGraph` of the same Cell, with inputs of the same shapes.
        mesh: a mesh with the plan's shape and axis names.
        arguments, parameters, declarations, final, algorithm: those of `propagate` when the plan was made.

    Returns:
        A `CellPlan` equal to the saved one, with the graphs of `graph`.

    Raises:
        ValueError: the file is no plan, or has another version; mesh or graph differ from those of the plan, or
            another plan follows from the choices; the message names the first difference.
    """
    with open(path, encoding="utf-8") as file, errors_at(f"{path} is no plan: ", kinds=ValueError):
        data = json.load(file)
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f'{path} is no plan: save_plan() writes one, with "format": "{_FORMAT}"')
    if data["version"] != _VERSION:
        raise ValueError(f"{path} is a plan of version {data['version']}; this is for version {_VERSION}: make it anew")
    planned = dict(zip(data["mesh"]["axis_names"], data["mesh"]["shape"]))
    if list(planned.items()) != list(zip(mesh.axis_names, mesh.shape)):
        found = ", ".join(f"{name}={size}" for name, size in planned.items())
        raise ValueError(f"{path} is a plan for the mesh ({found}), not for {mesh}: plan anew for this one")
    try:
        graph = lambda_lift(graph)
        plan = _Replay(data, graph, mesh, parameters, declarations or {}, algorithm).plan(graph, arguments, final)
        places = _places(plan)
        for saved, found in zip_longest(data["cells"], _distinct(places)):
            _compare(found.graph, *map(_without_reasons, (saved["plan"], _plan_lines(found, places))))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        what = error if isinstance(error, ValueError) else f"an entry is missing or malformed: {error!r}"
        raise ValueError(f"{path} is the plan of another model, or for other inputs: {what}; plan anew") from error
    return plan


class _Replay(Propagation):
    """A propagation that replays the choices of a file; every call has the place of its `CellPlan` in the file."""

    def __init__(self, data, graph, mesh, parameters, declarations, algorithm):
        model = data["device_model"]
        pairs = {name: tuple((each, Link(**link)) for each, link in model[name]) for name in ("axis_links", "levels")}
        links = {name: model[name] and Link(**model[name]) for name in ("link", "host")}
        model = DeviceModel(**model | pairs | links)
        super().__init__(mesh, parameters, declarations, model, algorithm=algorithm)
        self._cells, self._places = data["cells"], {}
        self._locate(graph, 0)

    def _locate(self, graph, place):
        """Record the places of a call and of all below; raise `ValueError` if the graph differs from the saved one."""
        self._places[graph.call], saved = place, self._cells[place]
        if graph.key != saved["structure"]:
            _compare(graph, saved["graph"], _graph_lines(graph))
        for number, choice in saved["choices"].items():
            if isinstance(choice, int):
                self._locate(graph.nodes[int(number)].graph, choice)
        if graph.key != saved["structure"]:
            raise ValueError(f"{graph.label} differs in contents of constants or of a Cell with a bprop")

    def decide(self, graph, arguments, final=False, wanted=None):
        """The `Decision` for a call, shared by identical calls that share a `CellPlan` in the file."""
        place = self._places[graph.call]
        key = place, self._key(graph, arguments, final, None)
        if key not in self._decisions:
            saved = self._cells[place]
            operators = [pair for pair in saved["choices"].items() if isinstance(pair[1], dict)]
            choices = {int(number): _choice_of(**choice) for number, choice in operators}
            results = [Layout.on(self.mesh, **layout) for layout in saved["results"]] if place else None
            self._decisions[key] = decide_plan(self, graph, arguments, final, results, choices)
        return self._decisions[key]

    improved = decide


def _places(plan):
    """Every `CellPlan` -> its place in the file, in the order of first calls; one for copies that `annotate` made."""
    places, known = {}, {}
    for _, found in plan.walk():
        places[found] = known.setdefault(id(found.layouts), len(known))
    return places


def _distinct(places):
    """One `CellPlan` for each place, in order."""
    firsts = {place: found for found, place in reversed(places.items())}
    return [firsts[place] for place in sorted(firsts)]


def _cell_data(path, plan, places):
    """A `CellPlan` that the Cell at `path` is the first to have, as JSON-able data."""
    graph = captured_graph(plan.graph)
    numbers = {id(node): number for number, node in enumerate(graph.nodes)}
    entries = [entry for entry in plan.instructions if not isinstance(entry, Redistribution)]
    return {
        "cell": path,
        "structure": graph.key,
        "graph": _graph_lines(graph),
        "choices": {
            numbers[id(each.node)]: places.get(each.plan) if isinstance(each, CallPlan) else _choice_data(each.choice)
            for each in entries
        },
        "results": [{name: getattr(at, name) for name in ("dims", "partial", "varying")} for at in plan.results],
        "plan": _plan_lines(plan, places),
    }


def _choice_of(cuts, carried, marked):
    """The `Choice` of its fields in a file."""
    cuts = tuple((factor, tuple(axes)) for factor, axes in cuts)
    return Choice(cuts, tuple((axis, tuple(inputs), op) for axis, inputs, op in carried), frozenset(marked))


def _choice_data(choice):
    """The fields of a `Choice` as JSON-able data."""
    return {"cuts": choice.cuts, "carried": choice.carried, "marked": sorted(choice.marked)}


def _graph_lines(graph):
    """A graph's listing, without source lines."""
    mode = "training" if graph.training else "evaluation"
    return [f"{graph.class_name}, {mode}", *(re.sub(r"  # \S*:\d+$", "", line) for line in graph.lines())]


def _plan_lines(plan, places):
    """A `CellPlan` as readable lines, without the contents of the graph and of called Cells."""
    lines = [f"%{number}: {layout}" for number, layout in sorted(plan.layouts.items())]
    lines += [f"handed down {value}: {layout}" for value, layout in plan.lifted]
    for entry in plan.instructions:
        if isinstance(entry, Redistribution):
            lines.append(f"{entry.value}: {entry.source} -> {entry.target} for {entry.reason}")
            lines += [f"  by {step}" for step in entry.steps]
            continue
        outputs, inputs = (", ".join(map(str, layouts)) for layouts in (entry.outputs, entry.inputs))
        if isinstance(entry, CallPlan):
            called = entry.node.child or entry.node.graph.path
            lifted = "".join(f", {value}: {layout}" for value, layout in entry.lifted)
            lines.append(f"{outputs} = call {called} ({inputs}{lifted}), plan {places.get(entry.plan)}")
        else:
            runs = f" by {entry.algorithm} over {', '.join(entry.cut_axes)}" if entry.algorithm else ""
            lines.append(f"{outputs} = {entry.node.operator} ({inputs}), {entry.axes_of}{runs}")
    trained = ", ".join(f"%{number}" for number in sorted(plan.gradients))
    return [*lines, f"return {', '.join(map(str, plan.results))}", f"trained: {trained}"]


def _without_reasons(lines):
    """Lines of a plan without what redistributions are for, which names the Cells of one of the calls that share it."""
    return [line.partition(" for ")[0] for line in lines]


def _compare(graph, saved, found):
    """Raise `ValueError` with the first line of `found` that differs from the file."""
    for old, new in zip_longest(saved, found, fillvalue="nothing more"):
        if old != new:
            raise ValueError(f"{graph.label} has '{new}' where the plan has '{old}'")
