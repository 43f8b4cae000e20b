"""`list_operators()`: names that patterns can select, with saved bytes; `write_curve()`: the choice of a budget."""

from collections import Counter
from dataclasses import dataclass

from mindformers_core.analysis.prediction import Prediction
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.files import write_whole
from mindformers_core.program.operator_names import operator_names, operator_texts
from mindformers_core.program.plan import called_cells, joined_path
from mindformers_core.recompute.budget import described
from mindformers_core.recompute.curve import curve_picture
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.sharding.plan_passes import planned_call
from mindformers_core.sharding.sharded_cells import tree_and_path, tree_of_root


@dataclass(frozen=True)
class ListedOperator:
    """One operator of a program, or all of a Cell.

    Attributes:
        name: a pattern that selects it: `"model.layers.0.self_attn.core_attention.weights"`.
        operator: its name in MindSpore; for a Cell its class.
        saved_bytes: bytes of its results that PyNative saves for the backward pass on one rank, including copies of
            views that it produces.
        others: alternatives to the last part of the name: `("Softmax[0]",)`.
    """

    name: str
    operator: str
    saved_bytes: int
    others: tuple = ()


class OperatorList(list):
    """`ListedOperator`s in the order of execution; two tables as text.

    Attributes:
        cells: a `ListedOperator` for each called Cell, with the sums of its contents.
    """

    cells = ()

    def __str__(self):
        cells = [(entry.name, entry.operator, f"{entry.saved_bytes:,}") for entry in self.cells]
        operators = [(entry.name, ", ".join(entry.others), f"{entry.saved_bytes:,}") for entry in self]
        rows = [("Cell", "class", "saved bytes"), *cells, ("operator", "also called", "saved bytes"), *operators]
        rows.append(("together", "", f"{sum(entry.saved_bytes for entry in self):,}"))
        first, second, third = (max(map(len, column)) for column in zip(*rows))
        return "\n".join(f"{name:{first}}  {other:{second}}  {nbytes:>{third}}" for name, other, nbytes in rows)


def list_operators(cell, *inputs, **named_inputs):
    """All operators of a call of a sharded Cell by the names that patterns of `recompute()` know, with saved bytes.

    Args:
        cell: root of a sharded tree; bytes are those without recompute, and unmatched patterns of earlier settings
            raise no error.
        inputs, named_inputs: arguments of the call, this rank's parts; see `prepare`.

    Returns:
        An `OperatorList`; print it.

    Raises:
        TypeError: `cell` isn't sharded.
    """
    plan = _plan(cell, inputs, named_inputs)
    saved, cells, names = Counter(), Counter(), operator_names(plan)
    for tensor in Prediction(plan, algorithm_of).saved():
        saved[tensor.owner] += tensor.nbytes
    listed = OperatorList(ListedOperator(e.text, e.operator, saved[e.place.key], _others(e)) for e in names)
    for key, path in called_cells(plan):
        cells[path] += sum(nbytes for other, nbytes in saved.items() if other[: len(key)] == key)
    tree, root = tree_and_path(cell)
    paths = {path: joined_path(root, path) for path in cells if path}
    listed.cells = [ListedOperator(p, tree.classes[whole].__name__, cells[p]) for p, whole in paths.items()]
    return listed


def _others(name):
    """Alternative names of an operator for the last part of its text."""
    used = name.text.rpartition(".")[2]
    shown = [f"{label.name}[{label.number}]" if label.count > 1 else label.name for label in name.labels]
    return tuple(dict.fromkeys(text for text in shown if text != used))


def _plan(cell, inputs, named_inputs):
    """The `CellPlan` of a call; without a program, one that needs no match of patterns, which may be wrong."""
    tree, path = tree_and_path(cell)
    if not tree.activations.is_active:
        return prepare(cell, *inputs, **named_inputs).plan
    program = tree.known_program(path, inputs, named_inputs)
    return planned_call(tree, path, inputs, named_inputs, passes=())[1] if program is None else program.plan


def write_curve(cell, path):
    """Write the Pareto curve of a Cell under a budget: saved bytes against recomputed time, and the choice.

    The curve is that of the last program of the Cell: from a call, `value_and_grad`, or `prepare()`.

    Args:
        cell: the root of a sharded tree, after `recompute(cell, budget=…)`.
        path: path of the file, an SVG picture.

    Returns:
        The choice as a table in text: recomputed instructions, the bytes that each saves and the seconds that each
        takes by the device model.

    Raises:
        TypeError: `cell` isn't sharded. ValueError: `cell` is no root, has no budget, or no program yet; no
            choice fits the budget.
    """
    tree = tree_of_root(cell, "write_curve")
    policy = tree.activations
    if not policy.is_active or policy.settings.budget is None:
        raise ValueError(f"{tree.label('')} has no budget: call recompute(cell, budget=0.5) with it before")
    plan = next((each.plan for each in reversed(tree.programs.values()) if each.plan in policy.choices), None)
    if plan is None:
        raise ValueError(f"{tree.label('')} has no program yet: call it, or prepare(cell, *inputs), before")
    choice = policy.choices[plan]
    if choice.problem:
        raise ValueError(choice.problem)
    write_whole(path, curve_picture(choice))
    head, *table = described(choice, operator_texts(plan))
    return "\n".join([f"recompute, budget {policy.settings.budget:g}: {head}", *(f"  {line}" for line in table)])
