"""From a choice of instructions to a plan in which they have their keepers. Pure Python.

Calls that are alike share a `FramePlan`; where the choice differs between them, they get plans of their own.
"""

from dataclasses import replace

from mindformers_core.tensor_parallel.propagation.plan import CallPlan

__all__ = ["apart", "marked", "unshared"]


def marked(frame, choice):
    """A copy of a plan in which chosen instructions have a `Keeper`; calls for which all is alike share one still.

    Args:
        frame: the `FramePlan` of a whole program.
        choice: key of an instruction (see `Place`) -> its `Keeper`.

    Returns:
        A `FramePlan`; `frame` itself where nothing is chosen.
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


def unshared(frame, **changes):
    """A copy of a plan in which every call has a `FramePlan` of its own, and so every Cell a function.

    Args:
        frame: the plan.
        changes: fields of all of these `FramePlan`s that are to be others.
    """
    instructions = [
        replace(entry, frame=unshared(entry.frame, **changes)) if isinstance(entry, CallPlan) and entry.frame else entry
        for entry in frame.instructions
    ]
    return replace(frame, instructions=tuple(instructions), **changes)


def apart(frame, keys):
    """A copy of a plan in which some calls' functions take their weights as arguments, alike ones in one function.

    Args:
        frame: the `FramePlan` of a whole program.
        keys: of calls (see `called_cells`), none of them within another one.
    """
    return _apart(frame, frozenset(keys), {}, {})


def _apart(frame, keys, known, taking):
    if not keys:
        return frame
    if (id(frame), keys) not in known:
        below = {}
        for key in keys:
            below.setdefault(key[0], set()).add(key[1:])
        instructions = list(frame.instructions)
        for index, inner in below.items():
            called = instructions[index].frame
            if called is None:  # a Cell with a bprop
                continue
            if inner == {()}:
                if id(called) not in taking:
                    taking[id(called)] = unshared(called, takes_weights=True)
                called = taking[id(called)]
            else:
                called = _apart(called, frozenset(inner), known, taking)
            instructions[index] = replace(instructions[index], frame=called)
        known[id(frame), keys] = replace(frame, instructions=tuple(instructions))
    return known[id(frame), keys]
