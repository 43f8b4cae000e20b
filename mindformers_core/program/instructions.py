"""Every operator of a program with its place: through which calls of Cells it is reached. Pure Python.

Two equal layers share one `CellPlan`; a place distinguishes what is recomputed in one of them and not in the other.
"""

from dataclasses import dataclass

from mindformers_core.program.plan import CallPlan, called_path

__all__ = ["Instruction", "operators_in_order"]


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a program as it runs.

    Attributes:
        key: the indices of the calls that lead there, among the `instructions` of each frame, and its own.
        path: of the Cell in whose `construct` it stands; "" for the root.
        frame: the `CellPlan` that it stands in.
        entry: an `OperatorPlan`, a `Move`, or the `CallPlan` of a Cell with a `bprop` of its own.
    """

    key: tuple
    path: str
    frame: object
    entry: object


def operators_in_order(frame):
    """A `Instruction` for every instruction of a program in the order in which they run; calls are gone into."""
    return [place for place in _walk(frame, (), "") if not _is_gone_into(place.entry)]


def _walk(frame, before, path):
    for index, entry in enumerate(frame.instructions):
        place = Instruction((*before, index), path, frame, entry)
        yield place
        if _is_gone_into(entry):
            yield from _walk(entry.frame, place.key, called_path(entry, path))


def _is_gone_into(entry):
    return isinstance(entry, CallPlan) and entry.frame is not None
