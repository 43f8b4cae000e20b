"""From a choice of instructions to a plan in which they have their keepers. Pure Python.

Calls that are alike share a `CellPlan`; where the choice differs between them, they get plans of their own.
"""

from dataclasses import replace

from mindformers_core.program.plan import CallPlan

__all__ = ["marked"]


def marked(frame, choice):
    """A copy of a plan in which chosen instructions have a `Keeper`; calls for which all is alike share one still.

    Args:
        frame: the `CellPlan` of a whole program.
        choice: key of an instruction (see `Instruction`) -> its `Keeper`.

    Returns:
        A `CellPlan`; `frame` itself where nothing is chosen.
    """
    return _marked(frame, frozenset(choice.items()), {})


def _marked(frame, choice, known):
    if not choice:
        return frame
    memo = id(frame), choice
    if memo not in known:
        own, below = {}, {}
        for key, keeper in choice:
            if len(key) == 1:
                own[key[0]] = keeper
            else:
                below.setdefault(key[0], set()).add((key[1:], keeper))
        instructions = list(frame.instructions)
        for index, inner in below.items():
            call = instructions[index]
            assert isinstance(call, CallPlan), (frame.graph.path, index)
            instructions[index] = replace(call, frame=_marked(call.frame, frozenset(inner), known))
        keepers = {instructions[index]: keeper for index, keeper in own.items()}
        known[memo] = replace(frame, instructions=tuple(instructions), keepers=keepers)
    return known[memo]
