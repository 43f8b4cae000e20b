"""What a user calls the operators of a program: by operator, or by the variable of their result. Pure Python.

In `layers.3.core_attention.weights` and `layers.3.core_attention.MatMul[1]`, what follows the path of the Cell is a
`Label`. An operator has several; those alike in one call of a Cell are numbered from 0 in the order in which they run.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import count

from mindformers_core.program.instructions import Instruction, operators_in_order
from mindformers_core.program.naming import all_assigned_names, snake_case
from mindformers_core.program.plan import CallPlan, Move, called_cells, joined_path
from mindformers_core.redistribution.steps import STEP_KINDS

__all__ = ["Label", "OperatorName", "friendly_name", "operator_names", "operator_texts", "plain_name"]

_SUFFIXES = ("ExtView", "Ext", "View")
_CASTS = ("ToDtype", "TypeAs")
_ALSO_CALLED = {"Dense": "MatMul"}  # in a call in which nothing else is called so
_UNTYPABLE = re.compile(r"[\s\[\],/*?]")  # what a pattern can't contain, or takes for something else
_LIKE_A_RANGE = re.compile(r"[0-9-]*-[0-9-]*")


@dataclass(frozen=True)
class Label:
    """One name of an operator, within the call of a Cell.

    Attributes:
        name: as in the code: `"weights"`, `"MatMul"`, `"all_gather"`.
        variable: whether it is a variable's name; else an operator's or a collective's.
        number, count: place among the operators of that call that have this label, from 0, and how many those are.
    """

    name: str
    variable: bool
    number: int = 0
    count: int = 1

    @property
    def plain(self):
        """The name as patterns compare it: of an operator without case and underscores."""
        return self.name if self.variable else plain_name(self.name)


@dataclass(frozen=True, eq=False)
class OperatorName:
    """One operator or redistribution of a program, with all that it may be called.

    Attributes:
        place: its `Instruction`.
        path: of the Cell in whose `construct` it stands, from the root of the model; "" for the root.
        operator: as captured: `"MatMulExt"`; of a redistribution what it runs on a rank: `"all_gather"`, or
            `"slice+all_gather"` where that is more than one step.
        labels: its `Label`s: the operator without suffix, as captured, each step of a redistribution, the variables
            that its results are assigned to, and last what it is also called: a product with a linear layer's weight is
            `Dense`, and `MatMul` where nothing else of the call of the Cell is.
        text: the pattern that selects this operator and nothing else: the path of its Cell, then a variable of its own,
            or else the operator. It starts with a dot, which stands for the root, where the same name is also found
            further inside. Of a Cell that is called more than once it selects an operator of each call, at most.
    """

    place: Instruction
    path: str
    operator: str
    labels: tuple
    text: str = ""

    @property
    def variables(self):
        """The names that `construct` assigns the results to."""
        return tuple(label.name for label in self.labels if label.variable)

    @property
    def variable(self):
        """The first of `variables`, or None."""
        return next(iter(self.variables), None)

    @property
    def number(self):
        """Place among the operators of the same name in the same call of the same Cell, from 0."""
        return self.labels[0].number

    @property
    def count(self):
        """How many operators of the same name that call has."""
        return self.labels[0].count


def operator_names(frame, path=""):
    """The names of all that a program computes or communicates.

    Redistributions that do nothing on a rank have none; neither has a Cell with a `bprop` of its own, which is
    selected as a Cell.

    Args:
        frame: the `CellPlan` of a program.
        path: of the Cell that it is the program of, from the root of the model.

    Returns:
        A list of `OperatorName`s in the order of execution.
    """
    named = [replace(name, path=joined_path(path, name.path)) for name in _named(frame)]
    named = _numbered(_with_second_names(named))
    texts = _texts(named, [joined_path(path, inner) for _, inner in called_cells(frame)])
    return [replace(name, text=text) for name, text in zip(named, texts)]


def operator_texts(frame, path=""):
    """Key of an instruction -> `text` of its `OperatorName`, if it has one; arguments as of `operator_names`."""
    return {name.place.key: name.text for name in operator_names(frame, path)}


def friendly_name(operator):
    """An operator as people call it: `MatMulExt` is `MatMul`, `TransposeExtView` `Transpose`, `x.astype()` `Cast`."""
    if operator in _CASTS:
        return "Cast"
    for suffix in _SUFFIXES:
        if operator.endswith(suffix) and operator != suffix:
            return operator.removesuffix(suffix)
    return operator


def plain_name(operator):
    """What operators are compared by, without case and inner underscores: `mat_mul` and `MatMul` are `matmul`."""
    bare = operator.lstrip("_")
    return "_" * (len(operator) - len(bare)) + bare.replace("_", "").lower()


def _named(frame):
    """An `OperatorName` for all that has one, without the numbers of its labels and its text."""
    callers = _callers(frame)
    variables = {}  # of the nodes of a frame, by identity; layers alike share a frame
    for place in operators_in_order(frame):
        entry = place.entry
        if isinstance(entry, Move):
            steps = _work(entry)
            if steps:
                yield OperatorName(place, place.path, "+".join(steps), _labels(["+".join(steps), *steps]))
        elif not isinstance(entry, CallPlan):
            if place.frame not in variables:
                variables[place.frame] = _variables(place.frame.graph, callers.get(place.frame, ()))
            operator = entry.node.operator
            assigned = variables[place.frame][id(entry.node)]
            yield OperatorName(place, place.path, operator, _labels([friendly_name(operator), operator], assigned))


def _work(move):
    """What a redistribution runs on a rank, step by step."""
    runs = [STEP_KINDS[step.kind].runs(step.op)[0] for step in move.steps]
    return [name for name in runs if name != "identity"]


def _callers(frame):
    """`CellPlan` -> the lines from which it is called."""
    callers = {}
    for _, each in frame.walk():
        for call in each.calls:
            callers.setdefault(call.frame, set()).add(call.node.source)
    return callers


def _variables(graph, callers):
    """id of every node -> the names of its results.

    What a MindSpore Cell computes is captured with the line that calls it, which assigns the Cell's result.
    """
    assigned = all_assigned_names(graph)
    own = {index: assigned.get(index, ()) for index, node in enumerate(graph.nodes) if node.source not in callers}
    return {id(node): own.get(index, ()) for index, node in enumerate(graph.nodes)}


def _labels(operators, variables=()):
    labels = [Label(name, False) for name in operators] + [Label(name, True) for name in variables]
    return tuple({(label.variable, label.plain): label for label in reversed(labels)}.values())[::-1]


def _with_second_names(named):
    """With the labels of `_ALSO_CALLED`."""
    taken = {(name.place.key[:-1], plain_name(label.name)) for name in named for label in name.labels}
    found = []
    for name in named:
        also = _ALSO_CALLED.get(name.operator)
        if also is not None and (name.place.key[:-1], plain_name(also)) not in taken:
            name = replace(name, labels=(*name.labels, Label(also, False)))
        found.append(name)
    return found


def _numbered(named):
    """The same with the numbers of all labels."""
    totals = Counter(key for name in named for key in _label_keys(name))
    seen, numbered = Counter(), []
    for name in named:
        keys = _label_keys(name)
        labels = tuple(
            replace(label, number=seen[key], count=totals[key]) for label, key in zip(name.labels, keys, strict=True)
        )
        numbered.append(replace(name, labels=labels))
        seen.update(keys)
    return numbered


def _label_keys(name):
    """What operators with the same label in the same call have in common, for every label."""
    return [(name.place.key[:-1], label.variable, label.plain) for label in name.labels]


@dataclass(frozen=True, eq=False)
class _Names:
    """All names of a program.

    Attributes:
        labels: (path of a Cell, whether a variable, plain name) -> `(number, key)` of every operator called so.
        below: end of a path -> the paths with it in whose Cells operators stand.
        cells, cell_endings: the paths of all called Cells, and all ends of them.
    """

    labels: dict
    below: dict
    cells: frozenset
    cell_endings: frozenset

    def selects_one(self, path, spelling, number, anchored):
        """Whether a text selects one operator in each call of a Cell at most, and nothing elsewhere."""
        full = joined_path(path, spelling)
        if number is None and full in (self.cells if anchored else self.cell_endings):
            return False  # a pattern that matches a Cell selects Cells
        found = set()
        for each in [path] if anchored else self.below[path]:
            alike = self.labels.get((each, False, plain_name(spelling)), [])
            alike = alike + self.labels.get((each, True, spelling), [])
            found |= {(each, key) for place, key in alike if number in (None, place)}
        return {each for each, _ in found} == {path} and len({key[:-1] for _, key in found}) == len(found)


def _all_names(named, cells):
    labels, below = {}, {}
    for name in named:
        for label in name.labels:
            alike = labels.setdefault((name.path, label.variable, label.plain), [])
            alike.append((label.number, name.place.key))
    for path in dict.fromkeys(name.path for name in named):
        for ending in _endings(path):
            below.setdefault(ending, []).append(path)
    return _Names(labels, below, frozenset(cells), frozenset(ending for path in cells for ending in _endings(path)))


def _texts(named, cells):
    """The text of every `OperatorName`; `cells`: the paths of all called Cells."""
    selects_one = cache(_all_names(named, cells).selects_one)  # the calls of a Cell ask the same
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
    """`a.b.c` of a Cell is also reached by `b.c` and `c`; and, for what stands in the Cell, by nothing."""
    parts = path.split(".") if path else []
    return [".".join(parts[start:]) for start in range(len(parts) + 1)]


def _spellings(name):
    """`(label, index or None)` for an operator, best first; endless: a variable may be called like any operator."""
    variables, operator = name.variables, name.labels[0]
    yield from ((variable, None) for variable in variables)
    yield operator.name, None
    yield operator.name, operator.number
    yield snake_case(operator.name), operator.number
    yield from ((operator.name + "_" * extra, operator.number) for extra in count(1))


def _typable(segment):
    """A segment of a path that a pattern can contain: a wildcard for every character that it can't."""
    if _LIKE_A_RANGE.fullmatch(segment):
        return segment.replace("-", "?")
    return _UNTYPABLE.sub("?", segment)
