"""The first difference between the plans of one Cell at two sizes. Pure Python."""

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

    Two instructions are equal if they have the same operator, rule, layouts, shardings, steps, algorithm and keeper,
    and if they take and give the same Values. Where `small` has fewer calls of layers, Values may have other numbers,
    and each instruction of `large` that `small` lacks has to be equal to one that it has.

    Args:
        large, small: `CellPlan`s of roots.

    Returns:
        None, or a sentence with the Cell and both instructions.
    """

    @cache
    def found(large, small):
        if large is small:
            return None
        has_fewer, place = len(small.graph.nodes) < len(large.graph.nodes), 0
        theirs, ours = (_entries(frame, not has_fewer) for frame in (large, small))
        if not has_fewer:
            return next(filter(None, (differing(large, *pair) for pair in zip_longest(theirs, ours))), None)
        for entry in theirs:
            why = differing(large, entry, ours[place] if place < len(ours) else None)
            place += why is None
            if why is not None and all(differing(large, entry, other) for other in ours):
                return why
        return differing(large, None, ours[place]) if place < len(ours) else None

    def differing(large, entry, other):
        if entry is None or other is None or entry != other:
            shown = [each.text if each is not None else "nothing more" for each in (entry, other)]
            rules = ", by another rule" if shown[0] == shown[1] else ""
            return f"{large.graph.label} has '{shown[0]}' at the recipe's sizes, and '{shown[1]}' at small sizes{rules}"
        return None if entry.frame is None or other.frame is None else found(entry.frame, other.frame)

    return found(large, small)


@dataclass(frozen=True)
class _Entry:
    """What has to be equal of an instruction: its text, and its rule; `frame` is the `CellPlan` that it calls."""

    text: str
    rule: tuple = ()
    frame: object = field(default=None, compare=False)


def _entries(frame, named):
    """An `_Entry` for the tensors that a plan takes, for each instruction, and for the results.

    Args:
        frame: the `CellPlan`.
        named: whether the numbers of Values are compared.
    """

    def shown(pairs):
        return ", ".join(f"%{value.id} {layout}" if named else str(layout) for value, layout in pairs)

    graph = frame.graph
    taken = [*tree_leaves(graph.arguments), *(use.value for use in (*graph.parameters, *graph.constants) if named)]
    text = f"({shown((value, frame.layouts[value.id]) for value in taken)}; {shown(frame.lifted)})"
    if named:
        text += f", trained: {sorted(frame.gradients)}"
    found = [_Entry(f"{text}, takes weights: {frame.takes_weights}, compiled: {frame.compiled}")]
    for entry in frame.instructions:
        keeper = frame.keepers.get(entry)
        kept = "" if keeper is None else f", kept by {keeper.name}{'' if keeper.takes_collectives else ' alone'}"
        if isinstance(entry, Redistribution):
            steps = [f"{at.kind} {at.op} {at.dim} {at.to_dim} over {', '.join(at.axes)}" for at in entry.steps]
            text = f"{shown(entry.consumed)} -> {entry.target} by {steps}, trained: {entry.gradient}{kept}"
            found.append(_Entry(text))
            continue
        text = f"{shown(entry.produced)} = {{}}({shown(entry.consumed)})"
        if isinstance(entry, CallPlan):
            name = re.sub(r"\d+", "*", entry.node.child or entry.node.graph.path)
            planned = "" if entry.frame is not None else ", whole"
            text = f"{text.format(name)} with ({shown(entry.lifted)}){planned}{kept}"
            found.append(_Entry(text, frame=entry.frame))
        else:
            runs = f" by {entry.algorithm} over {', '.join(entry.cut_axes)}" if entry.algorithm else ""
            text = f"{text.format(entry.node.operator)}, {entry.axes_of}{runs}{kept}"
            found.append(_Entry(text, tuple(getattr(entry.signature, name) for name in _RULE)))
    return [*found, _Entry(f"return {shown(frame.returned)}")]
