"""The walk over a plan that keeps what stands for each tensor: what an analysis knows of it. Pure Python.

An *environment* is a dict, (number of a Value, Layout) -> anything. A tensor of which nothing is known stands for None.
"""


def follow(plan, held, instruction):
    """What stands for the results of a plan, a list.

    Args:
        held: the environment of arguments, parameters, constants and `lifted` tensors; extended in place.
        instruction: function of the index of an instruction, the instruction, and what stands for the tensors that it
            takes, a list; of a call of a Cell with a plan, the environment with which that begins. Returns what stands
            for the tensors that the instruction produces, in order.
    """
    for index, entry in enumerate(plan.instructions):
        if entry.plan is None:
            taken = _standing(held, entry.consumed)
        else:
            taken = {(inner.id, layout): held.get((outer.id, layout)) for inner, outer, layout in entry.passed}
        made = instruction(index, entry, taken)
        held.update(((value.id, layout), each) for (value, layout), each in zip(entry.produced, made))
    return _standing(held, plan.returned)


def _standing(held, pairs):
    return [held.get((value.id, layout)) for value, layout in pairs]
