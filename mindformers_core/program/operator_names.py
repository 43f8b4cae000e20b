"""Names by which users select operators: the operator's name, or the variable of its result. Pure Python.

In `layers.3.core_attention.weights` and `layers.3.core_attention.MatMul[1]`, the path of the Cell is followed by a
`Label`. An operator has several labels; equal labels in one call of a Cell are numbered from 0 in execution order.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import count

from mindformers_core.grouping import grouped
from mindformers_core.program.naming import assigned_names, snake_case
from mindformers_core.program.plan import CallPlan, Redistribution, called_cells, joined_path, operators_in_order

_SUFFIX = re.compile(r"(?<=.)(ExtView|Ext|View)$")
_CASTS = ("ToDtype", "TypeAs")
_ALSO_CALLED = {"Dense": "MatMul"}  # in a call without another operator of this name
_UNTYPABLE = re.compile(r"[\s\[\],/*?]")  # characters that a pattern can't contain literally
_LIKE_A_RANGE = re.compile(r"[0-9-]*-[0-9-]*")


@dataclass(frozen=True)
class Label:
    """One name of an operator, within the call of a Cell.

    Attributes:
        name: as in the code: `"weights"`, `"MatMul"`, `"all_gather"`.
        variable: whether it is a variable's name; else an operator's or a collective's.
        number, count: place among the operators of the same call with the same label, from 0, and their number.
    """

    name: str
    variable: bool
    number: int = 0
    count: int = 1

    @property
    def plain(self):
        """The name as patterns compare names: that of an operator without case and underscores."""
        return self.name if self.variable else plain_name(self.name)


@dataclass(frozen=True, eq=False)
class OperatorName:
    """One operator or redistribution of a program, with all its names.

    Attributes:
        place: its `Instruction`.
        path: of the Cell whose `construct` contains the operator, from the root of the model; "" for the root.
        operator: as captured: `"MatMulExt"`; of a redistribution its steps on a rank: `"all_gather"`, or
            `"slice+all_gather"`.
        labels: its `Label`s: the operator without suffix, the operator as captured, each step of a redistribution, the
            variables to which its results are assigned, and last a second name: a product with a linear layer's weight
            is `Dense`, and also `MatMul` if the call of the Cell has no other `MatMul`.
        text: the pattern that selects this operator and no other: the path of its Cell, then an unambiguous variable,
            or else the operator. A leading dot stands for the root, where the same name also exists in an inner Cell.
            In a Cell with several calls the pattern selects at most one operator of each call.
    """

    place: object
    path: str
    operator: str
    labels: tuple
    text: str = ""

    @property
    def variables(self):
        """The names to which `construct` assigns the results."""
        return tuple(label.name for label in self.labels if label.variable)


def operator_names(plan, path=""):
    """The names of all operators and redistributions of a program.

    Redistributions without work on a rank have none, nor has a Cell with a `bprop` of its own, which is selected as a
    Cell.

    Args:
        plan: the `CellPlan` of the program.
        path: of the program's Cell, from the root of the model.

    Returns:
        A list of `OperatorName`s in the order of execution.
    """
    named = [replace(name, path=joined_path(path, name.path)) for name in _named(plan)]
    named = _numbered(_with_second_names(named))
    texts = _texts(named, {joined_path(path, inner) for _, inner in called_cells(plan)})
    return [replace(name, text=text) for name, text in zip(named, texts)]


def operator_texts(plan, path=""):
    """Key of every instruction with an `OperatorName` -> its `text`; arguments as of `operator_names`."""
    return {name.place.key: name.text for name in operator_names(plan, path)}


def friendly_name(operator):
    """An operator's name without suffix: `MatMulExt` is `MatMul`, `TransposeExtView` `Transpose`, `x.astype` `Cast`."""
    return "Cast" if operator in _CASTS else _SUFFIX.sub("", operator)


def plain_name(operator):
    """An operator's name for comparison, without case and inner underscores: `mat_mul` and `MatMul` are `matmul`."""
    bare = operator.lstrip("_")
    return "_" * (len(operator) - len(bare)) + bare.replace("_", "").lower()


def _named(plan):
    """All `OperatorName`s, still without `text` and numbers of labels."""
    callers = grouped((call.plan, call.node.source) for _, each in plan.walk() for call in each.calls)
    variables = {}  # `CellPlan` -> id of a node -> names
    for place in operators_in_order(plan):
        entry = place.entry
        if isinstance(entry, Redistribution):
            steps = [step.forward[0] for step in entry.steps if step.forward[0] not in ("identity", "view")]
            if steps:
                yield OperatorName(place, place.path, "+".join(steps), _labels(["+".join(steps), *steps]))
        elif not isinstance(entry, CallPlan):
            if place.plan not in variables:
                variables[place.plan] = _variables(place.plan.graph, callers.get(place.plan, ()))
            operator = entry.node.operator
            assigned = variables[place.plan][id(entry.node)]
            yield OperatorName(place, place.path, operator, _labels([friendly_name(operator), operator], assigned))


def _variables(graph, callers):
    """id of every node -> the names of its results.

    Operators of a MindSpore Cell are captured with the line of its call, which assigns the Cell's result.
    """
    found, assigned = {}, assigned_names(graph)
    for index, node in enumerate(graph.nodes):
        own = assigned.get(index, ()) if node.source not in callers else ()
        found[id(node)] = tuple(name for names in own for name in names or () if name)
    return found


def _labels(operators, variables=()):
    labels = [Label(name, False) for name in operators] + [Label(name, True) for name in variables]
    return tuple({(label.variable, label.plain): label for label in reversed(labels)}.values())[::-1]


def _with_second_names(named):
    """The names, with labels of `_ALSO_CALLED` added."""
    taken = {(name.place.key[:-1], plain_name(label.name)) for name in named for label in name.labels}
    found = []
    for name in named:
        also = _ALSO_CALLED.get(name.operator)
        if also is not None and (name.place.key[:-1], plain_name(also)) not in taken:
            name = replace(name, labels=(*name.labels, Label(also, False)))
        found.append(name)
    return found


def _numbered(named):
    """The names, with the numbers of all labels."""
    totals = Counter(key for name in named for key in _label_keys(name))
    seen, numbered = Counter(), []
    for name in named:
        keys = _label_keys(name)
        labels = (replace(each, number=seen[key], count=totals[key]) for each, key in zip(name.labels, keys))
        numbered.append(replace(name, labels=tuple(labels)))
        seen.update(keys)
    return numbered


def _label_keys(name):
    """For every label a key that operators with the same label in the same call share."""
    return [(name.place.key[:-1], label.variable, label.plain) for label in name.labels]


def _texts(named, cells):
    """The text of every `OperatorName`; `cells`: the paths of all called Cells."""
    pairs = [(name, label) for name in named for label in name.labels]
    labels = grouped(((name.path, each.variable, each.plain), (each.number, name.place.key)) for name, each in pairs)
    below = grouped((ending, path) for path in dict.fromkeys(name.path for name in named) for ending in _endings(path))
    endings = {ending for path in cells for ending in _endings(path)}

    @cache  # the calls of a Cell ask the same
    def selects_one(path, spelling, number, anchored):
        """Whether a text selects one operator in each call of a Cell at most, and nothing elsewhere."""
        if number is None and joined_path(path, spelling) in (cells if anchored else endings):
            return False  # a pattern that matches a Cell selects Cells
        found = set()
        for each in [path] if anchored else below[path]:
            alike = labels.get((each, False, plain_name(spelling)), []) + labels.get((each, True, spelling), [])
            found |= {(each, key) for place, key in alike if number in (None, place)}
        return {each for each, _ in found} == {path} and len({key[:-1] for _, key in found}) == len(found)

    texts = []
    for name in named:
        path = name.path
        asked = ((path, *spelling, anchored) for spelling in _spellings(name) for anchored in (False, True))
        _, spelling, number, anchored = next(each for each in asked if selects_one(*each))
        segments = [*(path.split(".") if path else ()), spelling]
        index = "" if number is None else f"[{number}]"
        texts.append("." * anchored + ".".join(map(_typable, segments)) + index)
    return texts


def _endings(path):
    """The endings of a path: `a.b.c`, `b.c`, `c` and the empty one, by which patterns also find a Cell's operators."""
    parts = path.split(".") if path else []
    return [".".join(parts[start:]) for start in range(len(parts) + 1)]


def _spellings(name):
    """`(label, index or None)` for an operator, best first; endless, since a variable may have any operator's name."""
    variables, operator = name.variables, name.labels[0]
    yield from ((variable, None) for variable in variables)
    yield operator.name, None
    yield operator.name, operator.number
    yield snake_case(operator.name), operator.number
    yield from ((operator.name + "_" * extra, operator.number) for extra in count(1))


def _typable(segment):
    """A segment of a path as a pattern, with wildcards for characters that a pattern can't contain."""
    if _LIKE_A_RANGE.fullmatch(segment):
        return segment.replace("-", "?")
    return _UNTYPABLE.sub("?", segment)
