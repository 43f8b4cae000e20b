"""Peak memory of activations on one rank: a fold over the saved-tensor analysis. Pure Python.

Results of operators and of redistributions count, a gathered weight as well. Arguments of the root and stored
parameters don't: the caller owns them.
"""

from collections import Counter

from mindformers_core.analysis.saved_tensors import traced
from mindformers_core.grouping import grouped
from mindformers_core.program.plan import called_cells


def activation_peaks(plan, algorithm, activations):
    """`(training, evaluation)`: peak bytes on one rank in the forward pass.

    The live range of a result begins at its producer and ends at the last consumer of it or of a view of it; results of
    the root and tensors saved for gradients (see `Prediction`) live to the end. In training, memory that an operator
    saves besides its inputs and results counts from that operator on.

    Args:
        algorithm: as of `through_algorithm`.
        activations: the `ExplainedActivations`: recomputed and swapped tensors are not kept for the backward pass.

    Raises:
        ValueError: an operator runs a distributed algorithm, and `algorithm` is None.
    """
    trace = traced(plan, {}, activations.dropped, activations.on_host, algorithm, activations.arguments_need)
    kept = {memory for memory in trace.live_set().kept if not memory.on_host}
    returned = [tensor.memory for tensor in trace.results[()]]
    events = [*trace.events(), ((), (), [memory for memory in returned if memory is not None])]
    training = [((*made, *own), used) for made, own, used in events]
    return _peak(training, kept), _peak([(made, used) for made, _, used in events], ())


def _peak(events, kept):
    """The most bytes at once, where memory is freed after the last event that makes or uses it, but what is `kept`."""
    last = {memory: place for place, (made, used) in enumerate(events) for memory in (*made, *used)}
    last |= dict.fromkeys(kept, len(events))
    freed = grouped((place, memory) for memory, place in last.items())
    peak = alive = 0
    for place, (made, _) in enumerate(events):
        alive += sum(memory.nbytes for memory in made)
        peak = max(peak, alive)
        alive -= sum(memory.nbytes for memory in freed.get(place, ()))
    return peak


def recomputed_at_once(plan, layers, notes):
    """Peak of recomputed bytes in the backward pass: the largest sum of one layer, or of one tensor outside of layers.

    Args:
        layers: paths of the Cells that are recomputed one at a time, as a whole or in parts.
        notes: as of `ExplainedActivations`.
    """
    calls = [key for key, path in called_cells(plan) if path in layers]
    sums = Counter()
    for key, note in notes.items():
        sums[next((call for call in calls if key[: len(call)] == call), key)] += note.nbytes
    return max(sums.values(), default=0)
