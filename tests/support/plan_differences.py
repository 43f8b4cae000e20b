"""The first difference between the plans of a model at two sizes. The independent check of `resized`."""

import re
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest

from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import tree_leaves

__all__ = ["first_difference"]

_RULE = ("inputs", "outputs", "reduced", "whole", "linear", "added", "distributed", "run", "made")


def first_difference(large, small):
    """The first instruction in which two plans differ, besides sizes.

    Two instructions are equal if they have the same operator, rule, layouts, shardings, steps, algorithm and keeper, if
    they take and give the same Values, and if the same local dims have one element. Where `small` has fewer calls of
    layers, Values may have other numbers, and each call or redistribution that `small` lacks has to be equal to one
    that it has.

    Args:
        large, small: `CellPlan`s of roots.

    Returns:
        None, or a sentence with the Cell and both instructions.
    """

    @cache
    def found(large, small):
        if large is small:
            return None
        named, place = len(small.graph.nodes) == len(large.graph.nodes), 0
        theirs, ours = (_entries(plan, named) for plan in (large, small))
        if named:
            return next(filter(None, (differing(large, *pair) for pair in zip_longest(theirs, ours))), None)
        for entry in theirs:
            why = differing(large, entry, ours[place] if place < len(ours) else None)
            place += why is None
            alike = [differing(large, entry, other) for other in ours if other == entry]
            if why is not None and (not entry.is_of_layers or all(alike)):
                return next(filter(None, alike), why)
        return differing(large, None, ours[place]) if place < len(ours) else None

    def differing(large, entry, other):
        if entry is None or other is None or entry != other:
            shown = [each.text if each is not None else "nothing more" for each in (entry, other)]
            rules = ", by another rule or with one local element of a dim" if shown[0] == shown[1] else ""
            return f"{large.graph.label} has '{shown[0]}' at the recipe's sizes, and '{shown[1]}' at small sizes{rules}"
        return None if entry.plan is None else found(entry.plan, other.plan)

    return found(large, small)


@dataclass(frozen=True)
class _Entry:
    """What has to be equal of an instruction: its text, and its rule.

    Attributes:
        text, rule: see `_entries`.
        plan: the `CellPlan` that it calls.
        is_of_layers: whether it may be the call of a layer, or before one.
    """

    text: str
    rule: tuple = ()
    plan: object = field(default=None, compare=False)
    is_of_layers: bool = False


def _entries(plan, named):
    """An `_Entry` for the tensors that a plan takes, for each instruction, and for the results.

    Args:
        plan: the `CellPlan`.
        named: whether the numbers of Values are compared.
    """

    def shown(pairs):
        return ", ".join(f"%{value.id} {layout}" if named else str(layout) for value, layout in pairs)

    graph = plan.graph
    taken = [*tree_leaves(graph.arguments), *(use.value for use in (*graph.parameters, *graph.constants) if named)]
    text = f"({shown((value, plan.layouts[value.id]) for value in taken)}; {shown(plan.lifted)})"
    text += f", trained: {sorted(plan.gradients) if named else 'as before'}"
    found = [_Entry(f"{text}, takes weights: {plan.takes_weights}, compiled: {plan.compiled}")]
    for entry in plan.instructions:
        keeper = plan.keepers.get(entry)
        kept = "" if keeper is None else f", kept by {keeper.name}{'' if keeper.takes_collectives else ' alone'}"
        if isinstance(entry, Redistribution):
            steps = [f"{at.kind} {at.op} {at.dim} {at.to_dim} over {', '.join(at.axes)}" for at in entry.steps]
            text = f"{shown(entry.consumed)} -> {entry.target} by {steps}, trained: {entry.gradient}{kept}"
            found.append(_Entry(text, is_of_layers=True))
            continue
        text = f"{shown(entry.produced)} = {{}}({shown(entry.consumed)})"
        if isinstance(entry, CallPlan):
            name = re.sub(r"\d+", "*", entry.node.child or entry.node.graph.path)
            whole = ", whole" if entry.plan is None else ""
            found.append(
                _Entry(f"{text.format(name)} with ({shown(entry.lifted)}){whole}{kept}", (), entry.plan, "*" in name)
            )
        else:
            runs = f" by {entry.algorithm} over {', '.join(entry.cut_axes)}" if entry.algorithm else ""
            rule = [getattr(entry.signature, name) for name in _RULE]
            rule += [tuple(count > 1 for count in shape) for shape in entry.local_shapes]
            found.append(_Entry(f"{text.format(entry.node.operator)}, {entry.axes_of}{runs}{kept}", tuple(rule)))
    return [*found, _Entry(f"return {shown(plan.returned)}")]
