"""How many bytes of activations PyNative keeps from the forward to the backward pass, by a plan. Pure Python.

What is kept is what gradients need (`saved_by_operator`), each piece of memory once: a saved view holds all of the
memory that it is a view of, and most operators that take a view hold a copy of their own. Results of a dropped
instruction are not held: what it takes to compute them again is, back to what is at hand (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, with a choice for every single result).
"""

from dataclasses import dataclass

from mindformers_core.mesh import nearest
from mindformers_core.recompute.following import follow
from mindformers_core.recompute.places import operators_in_order

__all__ = ["SavedTensor", "cell_keys", "recomputed", "saved_activations", "saved_bytes"]


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """One piece of memory that is kept from the forward to the backward pass.

    Attributes:
        key: of the instruction that makes it (see `places`).
        value: the `Value` that it was made for.
        nbytes: bytes on one rank.
    """

    key: tuple
    value: object
    nbytes: int


def saved_activations(frame, dropped=frozenset(), algorithm=None, arguments_need=True):
    """What PyNative keeps for the backward pass of a program, in the order in which gradients ask for it.

    Parameters, constants of the module and arguments of the root belong to others and are not in the list; copies
    of views of them are.

    Args:
        frame: the root's `FramePlan`.
        dropped: keys of instructions whose results are computed again instead of being kept. What takes no tensors (a
            draw of random numbers) never runs again. What an operator keeps besides its inputs and results (the powers
            in a variance, a copy of an input that is a view) is kept all the same.
        algorithm: gives what runs in the place of an operator with a distributed algorithm (see `follow`):
            `mindformers_core.recompute.algorithms.algorithm_of`.
        arguments_need: whether gradients flow back to the root's arguments, of whatever dtype. They do wherever the
            differentiated function (`mindspore.value_and_grad`) takes them as its own, even if only the gradients of
            weights are asked for; they don't where it has them from around it.

    Returns:
        A list of `SavedTensor`, one for each distinct piece of memory.

    Raises:
        ValueError: a key that no instruction has; a distributed algorithm, and no `algorithm` to ask.
    """
    return _Backward(frame, dropped, algorithm, arguments_need).saved()


def saved_bytes(frame, dropped=frozenset(), algorithm=None, arguments_need=True):
    """The sum of `saved_activations`, in bytes on one rank. Takes and raises the same."""
    saved = saved_activations(frame, dropped, algorithm, arguments_need)
    return sum(tensor.nbytes for tensor in saved)


def recomputed(frame, dropped, algorithm=None, arguments_need=True):
    """The set of those keys among `dropped` whose instructions run again. Arguments are those of `saved_activations`.

    An instruction runs again where a gradient asks for one of its results, or another one that runs again does.
    """
    backward = _Backward(frame, dropped, algorithm, arguments_need)
    return {run.key for run in backward.again}


def cell_keys(frame, key, algorithm=None):
    """Keys of all instructions in one call of a Cell that are dropped where this Cell is selected.

    These are all but those that make its results and, where a result is a view, what it is a view of.

    Args:
        frame: the root's `FramePlan`.
        key: of the call (see `called_cells`); `()` is the root.
        algorithm: as for `saved_activations`.

    Raises:
        ValueError: there is no call at `key`.
    """
    course = follow(frame, algorithm=algorithm)
    if key not in course.results:
        raise ValueError(f"no call of a Cell at {key}{nearest(str(key), map(str, course.results))}")
    made = {run.key for run in course.runs if run.key[: len(key)] == tuple(key)}
    for tensor in course.results[key]:
        while tensor is not None:
            made.discard(tensor.run and tensor.run.key)
            tensor = tensor.base
    return frozenset(made)


class _Backward:
    """What the backward pass of a program keeps and computes again.

    Attributes:
        kept: pieces of memory, each once.
        again: the `Run`s that run again.
    """

    def __init__(self, frame, dropped, algorithm, arguments_need):
        _check(frame, dropped)
        self.dropped = frozenset(dropped)
        self.kept, self.again = {}, {}
        for run in follow(frame, self.dropped, algorithm, arguments_need).runs:
            self.kept.update(dict.fromkeys(run.own))
            for tensor in run.saved:
                self._hold(tensor)

    def saved(self):
        """See `saved_activations`."""
        return [SavedTensor(memory.key, memory.value, memory.nbytes) for memory in self.kept]

    def _hold(self, tensor):
        """A tensor has to be at hand in the backward pass. Long chains are dropped, so there is no recursion."""
        waiting = [tensor]
        while waiting:
            tensor = waiting.pop()
            if tensor.run is None or tensor.run.key not in self.dropped or not tensor.run.inputs:
                if tensor.memory is not None:
                    self.kept[tensor.memory] = None
            elif tensor.run not in self.again:
                self.again[tensor.run] = None
                waiting.extend(tensor.run.inputs)


def _check(frame, dropped):
    """Refuse keys that aren't there."""
    unknown = set(dropped) - {place.key for place in operators_in_order(frame)} if dropped else ()
    if unknown:
        key = min(unknown)
        raise ValueError(f"no instruction at {key}, which is to be dropped: take keys from operators_in_order(frame)")
