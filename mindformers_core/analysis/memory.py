"""The most bytes of activations that a rank holds at once: a fold over the analysis of saved tensors. Pure Python.

What counts are results: what operators make, and what moves make of a tensor, also of a parameter (a gathered weight is
held like an activation). The arguments of the root and stored parameters belong to others.
"""

from collections import Counter

from mindformers_core.analysis.saved_tensors import SavedTensorAnalysis
from mindformers_core.program.plan import called_cells

__all__ = ["activation_peaks", "recomputed_at_once"]


def activation_peaks(frame, algorithm=None, activations=None):
    """`(training, evaluation)`: the largest number of bytes that a rank holds at once in the forward pass.

    Over all instructions in the order in which they run: a result is held from the instruction that makes it to the
    last one that uses it or a view of it, or to the end where the root returns it, or a gradient keeps it (see
    `Prediction`). In training what an operator keeps besides its inputs and results counts from then on.

    Args:
        frame: the `CellPlan`.
        algorithm: as of `algorithm_parts`.
        activations: the `ExplainedActivations`: what is computed again or waits on the host is not held for the
            backward pass. Default: all is held.

    Raises:
        ValueError: an operator runs a distributed algorithm, and there is no `algorithm`.
    """
    following = SavedTensorAnalysis(frame, algorithm, activations is not None and activations.arguments_need)
    course = following.course(*(() if activations is None else (activations.dropped, activations.on_host)))
    kept = {memory for memory in course.demand().kept if not memory.on_host}
    returned = [tensor.memory for tensor in course.results[()]]
    events = [*course.events(), ((), (), [memory for memory in returned if memory is not None])]
    training = [((*made, *own), used) for made, own, used in events]
    return _peak(training, kept), _peak([(made, used) for made, _, used in events], ())


def _peak(events, kept):
    """The most bytes at once, where memory is freed after the last event that makes or uses it, but what is `kept`."""
    last = {memory: place for place, (made, used) in enumerate(events) for memory in (*made, *used)}
    last |= dict.fromkeys(kept, len(events))
    freed = {}
    for memory, place in last.items():
        freed.setdefault(place, []).append(memory)
    peak = alive = 0
    for place, (made, _) in enumerate(events):
        alive += sum(memory.nbytes for memory in made)
        peak = max(peak, alive)
        alive -= sum(memory.nbytes for memory in freed.get(place, ()))
    return peak


def recomputed_at_once(frame, layers, marks):
    """The most bytes that are back at a time in the backward pass: of one layer, or of what is in none.

    Args:
        frame: the `CellPlan`.
        layers: paths of the Cells that each are computed again as a whole, or in parts.
        marks: as of `ExplainedActivations`.
    """
    calls = [key for key, path in called_cells(frame) if path in layers]
    sums = Counter()
    for key, mark in marks.items():
        sums[next((call for call in calls if key[: len(call)] == call), key)] += mark.nbytes
    return max(sums.values(), default=0)
