"""What becomes of a sample: captured, its layouts derived for each dim of each input cut, its programs made."""

import re
from dataclasses import asdict, dataclass, field

import mindspore as ms
import numpy as np

from mindformers_core.capture.capture import capture
from mindformers_core.communication.world import rank_of
from mindformers_core.generation.load import load_module
from mindformers_core.generation.module_source import ModuleOptions, write_module
from mindformers_core.layout import bind_layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators.registry import facts_of, rewritten
from mindformers_core.program.graph import OperatorNode
from mindformers_core.program.plan import OperatorPlan, Redistribution
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.checking import check_plan
from mindformers_core.propagation.propagate import propagate
from mindformers_core.sharding.declare import collect_declarations
from operator_samples.calls import build, parameter_shapes, plain_call

__all__ = ["AXIS", "OUTCOMES", "UNDEFINED", "Outcome", "layout_with", "measure", "one_line", "placements", "runs"]

AXIS = "tp"
UNDEFINED = ("mint.empty", "mint.empty_like", "Tensor.new_empty")  # tensors with whatever numbers the memory holds
OUTCOMES = (
    "covered", "no rule", "in place", "values", "meta", "capture", "rejected", "program", "unavailable", "no sample",
    "crashed",
)  # fmt: skip
_CAPTURE = (  # words of an error of `capture` -> the outcome
    ("depends on the values", "values"),
    ("needs the values of a tensor", "values"),
    ("changes a tensor in place", "in place"),
    ("draws into a plain tensor", "in place"),
    ("can't be run on shapes alone", "meta"),
    ("gives no shape on the meta device", "meta"),
)


@dataclass
class Outcome:
    """Of one sample.

    Attributes:
        target, sample: what was called.
        outcome: one of `OUTCOMES`.
        detail: the error, in a line.
        missing: operators without a rule.
        operators: all that the capture met, in order.
        cpu: whether it runs on plain CPU tensors.
        dims: `"0.1"` (input.dim) -> `""` where the dim stays cut; else, joined by commas, `"gathered"`, `"all-to-all"`,
            and the names of distributed algorithms.
        numbers: `""` not compared; "equal"; or what differs.
    """

    target: str
    sample: str
    outcome: str = "covered"
    detail: str = ""
    missing: list = field(default_factory=list)
    operators: list = field(default_factory=list)
    cpu: bool = False
    dims: dict = field(default_factory=dict)
    numbers: str = ""

    as_dict = asdict


def one_line(error, limit=300):
    """An error in one line."""
    text = next((part for part in re.split(r"\n?\s*-{20,}\s*", str(error)) if part.strip()), "")
    return f"{type(error).__name__}: {' '.join(text.split())}"[:limit]


def runs(sample, device):
    """Whether a sample runs on plain tensors; an empty text, or the error."""
    try:
        plain_call(sample, device)
        ms.runtime.synchronize()
    except Exception as error:
        return one_line(error)
    return ""


def placements(values, parameters):
    """What an axis of 2 can cut: `(number of the input, dim)`, and `(name, dim)` of the Cell's own Parameters.

    Args:
        values: the inputs, which have shapes.
        parameters: name -> shape.
    """
    shapes = {**{number: value.shape for number, value in enumerate(values)}, **parameters}
    return [(key, dim) for key, shape in shapes.items() for dim, size in enumerate(shape) if size and size % 2 == 0]


def layout_with(rank, dim):
    """The layout of a tensor of `rank` dims of which one is cut."""
    return layout(*(AXIS if each == dim else "None" for each in range(rank)))


def measure(sample):
    """The `Outcome` of a sample that is known to fit; nothing is computed."""
    outcome = Outcome(sample.target, sample.text)
    cell, inputs = build(sample)
    try:
        graph = capture(cell, *inputs)
    except Exception as error:
        outcome.detail = one_line(error)
        found = (kind for words, kind in _CAPTURE if words in outcome.detail)
        outcome.outcome = next(found, "capture")
        name = re.search(r"operator '?(\w+)'?", outcome.detail)
        outcome.operators = [name[1]] if name and outcome.outcome in ("in place", "meta") else []
        return outcome
    if sample.target not in UNDEFINED and _has_drawn_constants(graph, sample):
        outcome.outcome, outcome.detail = "capture", "numbers that it draws become constants, which differ by rank"
        return outcome
    nodes = [node for call in graph.calls() for node in call.nodes if isinstance(node, OperatorNode)]
    outcome.operators = list(dict.fromkeys(node.operator for node in nodes))
    for place in (None, *placements(tree_leaves(graph.arguments), parameter_shapes(cell))):
        kind, detail, how = _placed(graph, cell, place)
        if kind != "covered":
            outcome.missing = [name for name in outcome.operators if _has_no_rule(name)]
            outcome.outcome = "no rule" if outcome.missing and kind == "rejected" else kind
            where = "whole" if place is None else "cut {}.{}".format(*place)
            outcome.detail = f"{where}: {detail}"
            break
        if place is not None:
            outcome.dims["{}.{}".format(*place)] = how
    return outcome


def _has_drawn_constants(graph, sample):
    """Whether constants of a graph change from one capture to the next."""
    before = _constants(graph)
    if not before:
        return False
    ms.ops.standard_normal((2,))  # a capture restores the state of the generators
    cell, inputs = build(sample)
    after = _constants(capture(cell, *inputs))
    return any(not np.allclose(one, other, equal_nan=True) for one, other in zip(before, after, strict=True))


def _constants(graph):
    return [constant.array for call in graph.calls() for constant in call.constants]


def _has_no_rule(name):
    try:
        return facts_of(rewritten(name, (), {})[0]).rule is None
    except Exception:
        return facts_of(name).rule is None


def _placed(graph, cell, place):
    """`(outcome, error, how the dim is treated)` with one dim of one input cut."""
    with rank_of(2, 0):
        mesh = init_device_mesh((2,), (AXIS,))
        try:
            plan = _plan(graph, cell, mesh, place)
        except Exception as error:
            return "rejected", one_line(error), ""
        try:
            classes = {path: type(each) for path, each in cell.cells_and_names()}
            source = write_module(plan, classes, ModuleOptions(("A sample.",)))
            load_module("sample", source)
        except Exception as error:
            return "program", one_line(error), ""
        how = _by_rule(plan, place)
        return "covered", "", _by_plan(plan) if how is None else how


def _plan(graph, cell, mesh, place):
    values = tree_leaves(graph.arguments)
    arriving = {value.id: bind_layout(layout(), mesh, len(value.shape)) for value in values}
    stored = {use.path: len(use.value.shape) for call in graph.calls() for use in call.parameters}
    parameters = {path: bind_layout(layout(), mesh, dims) for path, dims in stored.items()}
    if place is not None:
        where, dim = place
        if isinstance(where, str):
            parameters[where] = bind_layout(layout_with(stored[where], dim), mesh, stored[where])
        else:
            value = values[where]
            arriving[value.id] = bind_layout(layout_with(len(value.shape), dim), mesh, len(value.shape))
    plan = propagate(graph, mesh, arriving, parameters, collect_declarations(cell))
    check_plan(plan)
    return plan


def _by_rule(plan, place):
    """How the rule of a program's only operator treats a cut dim of an input; None for longer programs."""
    operators = [entry for _, inner in plan.walk() for entry in inner.instructions if isinstance(entry, OperatorPlan)]
    if place is None or len(operators) != 1 or isinstance(place[0], str):
        return None
    node, rule = operators[0].node, operators[0].signature
    value = tree_leaves(plan.graph.arguments)[place[0]]
    values = tree_leaves((node.args, node.kwargs))
    if value not in values:
        return None
    factors = rule.inputs[values.index(value)][place[1]][:1]
    if any(factor in rule.whole for factor in factors):
        return "gathered"
    return rule.run or ", ".join(rule.distributed[factor] for factor in factors if factor in rule.distributed)


def _by_plan(plan):
    """The algorithms that run, and whether something is gathered first; empty: the dim simply stays cut."""
    entries = [entry for _, inner in plan.walk() for entry in inner.instructions]
    algorithms = [entry.algorithm for entry in entries if getattr(entry, "algorithm", None)]
    moves = [entry for entry in entries if isinstance(entry, Redistribution)]
    steps = [step.kind for move in moves for step in move.steps if not move.source.partial]
    how = [*dict.fromkeys(algorithms)]
    if any("gather" in kind for kind in steps):
        how.append("gathered")
    if any("all_to_all" in kind or "all-to-all" in kind for kind in steps):
        how.append("all-to-all")
    return ", ".join(how)
