"""How many bytes of activations PyNative keeps from the forward to the backward pass, by a plan. Pure Python.

What is kept is what gradients need (`operators.saved`), each piece of memory once: a saved view holds all of the
memory that it is a view of, and most operators that take a view hold a copy of their own. Results of a dropped
instruction are not held: what it takes to compute them again is, back to what is available (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, with a choice for every single result).
"""

from dataclasses import dataclass
from functools import cache

from mindformers_core.analysis.saved_tensors import SavedTensorAnalysis
from mindformers_core.hints import nearest
from mindformers_core.program.plan import Move, called_cells, operators_in_order

__all__ = ["Prediction", "SavedTensor", "cell_keys", "recomputed", "saved_activations", "saved_bytes"]


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """One piece of memory that is kept from the forward to the backward pass.

    Attributes:
        key: of the instruction that makes it (see `places`).
        nbytes: bytes on one rank.
        view: key of the instruction that makes the view of which this is a copy that an operator keeps, or None.
    """

    key: tuple
    nbytes: int
    view: tuple | None = None

    @property
    def owner(self):
        """Key of the instruction that is to be dropped so that it isn't kept."""
        return self.key if self.view is None else self.view


def saved_activations(frame, dropped=frozenset(), algorithm=None, arguments_need=True):
    """What PyNative keeps for the backward pass of a program, in the order in which gradients ask for it.

    What the calls of equal layers ask for comes together, call by call.

    Parameters, constants of the module and arguments of the root belong to others and are not in the list; copies
    of views of them are.

    Args:
        frame: the root's `CellPlan`.
        dropped: keys of instructions whose results are computed again instead of being kept. What takes no tensors (a
            draw of random numbers) never runs again. What an operator keeps besides its inputs and results (the powers
            in a variance, a copy of an input that is a view) is kept all the same.
        algorithm: gives what runs in the place of an operator with a distributed algorithm (see `SavedTensorAnalysis`):
            `mindformers_core.capture.algorithm_graph.algorithm_of`.
        arguments_need: whether gradients flow back to the root's arguments, of whatever dtype. They do wherever the
            differentiated function (`mindspore.value_and_grad`) takes them as its own, even if only the gradients of
            weights are asked for; they don't where it has them from around it.

    Returns:
        A list of `SavedTensor`, one for each distinct piece of memory.

    Raises:
        ValueError: a key that no instruction has; a distributed algorithm, and no `algorithm` to ask.
    """
    return Prediction(frame, algorithm, arguments_need).saved(frozenset(dropped))


def saved_bytes(frame, dropped=frozenset(), algorithm=None, arguments_need=True):
    """The sum of `saved_activations`, in bytes on one rank. Takes and raises the same."""
    return Prediction(frame, algorithm, arguments_need).saved_bytes(frozenset(dropped))


def recomputed(frame, dropped, algorithm=None, arguments_need=True):
    """The set of those keys among `dropped` whose instructions run again. Arguments are those of `saved_activations`.

    An instruction runs again where a gradient asks for one of its results, or another one that runs again does.
    """
    return Prediction(frame, algorithm, arguments_need).recomputed(frozenset(dropped))


def cell_keys(frame, key, algorithm=None):
    """Keys of all instructions in one call of a Cell that are dropped where this Cell is selected.

    These are all but those that make its results and, where a result is a view, what it is a view of.

    Args:
        frame: the root's `CellPlan`.
        key: of the call (see `called_cells`); `()` is the root.
        algorithm: as for `saved_activations`.

    Raises:
        ValueError: there is no call at `key`.
    """
    return Prediction(frame, algorithm).cell_keys(tuple(key))


class Prediction:
    """What PyNative keeps of a program, and computes again, for one choice after the other.

    Each method tells what the function of its name does; asked more than once, it is much faster. `dropped` has to be a
    frozenset.

    Args:
        frame, algorithm, arguments_need: as of `saved_activations`.
    """

    def __init__(self, frame, algorithm=None, arguments_need=True):
        self._frame, self._following = frame, SavedTensorAnalysis(frame, algorithm, arguments_need)
        self._places = {place.key: place for place in operators_in_order(frame)}
        self._demand, self._undisturbed = cache(self._demand_of), cache(self._following.course)

    def saved(self, dropped=frozenset()):
        """See `saved_activations`."""
        kept = self._demand(dropped).kept
        views = (memory.view if isinstance(memory.view, tuple) else None for memory in kept)
        return [SavedTensor(memory.key, memory.nbytes, view) for memory, view in zip(kept, views)]

    def saved_bytes(self, dropped=frozenset()):
        """See `saved_bytes`."""
        return sum(memory.nbytes for memory in self._demand(dropped).kept)

    def recomputed(self, dropped):
        """See `recomputed`."""
        return set(self._demand(dropped).again)

    def cell_keys(self, key):
        """See `cell_keys`."""
        results = self._undisturbed().results_of(key)
        if results is None:
            calls = [str(other) for other, _ in called_cells(self._frame)]
            raise ValueError(f"no call of a Cell at {key}{nearest(str(key), calls)}")
        made = {inner for inner, place in self._places.items() if inner[: len(key)] == key and _runs(place.entry)}
        for tensor in results:
            while tensor is not None:
                made.discard(tensor.key)
                tensor = tensor.base
        return frozenset(made)

    def _demand_of(self, dropped):
        unknown = dropped.difference(self._places)
        if unknown:
            raise ValueError(
                f"no instruction at {min(unknown)}, which is to be dropped: take keys from operators_in_order(frame)"
            )
        return self._following.course(dropped).demand()


def _runs(entry):
    return not isinstance(entry, Move) or bool(entry.steps)
