"""Tensors that share memory on one card: a value and its views, of which a write in place makes all others stale."""

from mindformers_core.communication.world import process_state
from mindformers_core.operators.registry import facts_of, rewritten
from mindformers_core.scopes import entered

# views, or the input itself, beside those that records tell
_RETURNED = frozenset({"Diagonal", "Meshgrid", "Slice"})


def is_view(name, args, kwargs):
    """Whether results of an operator may have the memory of its first tensor."""
    if name == "FuncDropoutExt":
        return not all(args[1:3])  # nothing is drawn: a probability of 0, or no training
    rewritten_name, _, _ = rewritten(name, tuple(args), dict(kwargs))
    return name.endswith("View") or name in _RETURNED or facts_of(rewritten_name).view is not None


def check_memory(tensor):
    """Raise a `ValueError` for a plain tensor that is to be changed in place, and is part of another one."""
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        raise ValueError(
            f"a plain tensor of shape {tensor.shape} is changed in place that is part of another one, which would have "
            "to change, too: change that one, x[...] = y"
        )


def adoptions():
    """While open, plain tensors that become others, since they are changed in place, are known to `stale_plain`."""
    return entered(process_state().memo(__name__), "adopted", {})


def note_adopted(tensor, where=""):
    """Record that a plain tensor becomes another, at this line: plain ones of its memory stay as they are."""
    known = process_state().memo(__name__).get("adopted")
    if known is not None:
        known[tensor.untyped_storage().data_ptr()] = tensor, where and f", at {where}"


def stale_plain(tensor):
    """What is wrong with a plain tensor that has the memory of one that became another, and was changed; or None."""
    known = process_state().memo(__name__).get("adopted")
    if not known or tensor.is_meta or tensor.untyped_storage().data_ptr() not in known:
        return None
    _, where = known[tensor.untyped_storage().data_ptr()]
    return (
        f"a plain tensor of shape {tensor.shape} is used after one of the same memory, such as a view of it, was "
        f"changed in place{where}: change the whole one, x[...] = y"
    )


def share_memory(tensors, results):
    """Record that the results of an operator have the memory of its first tensor; of `meshgrid`, each that of its own.

    Args:
        tensors: those among the arguments.
        results: one tensor, or several, of the first tensor's dtype; else they are copies.
    """
    views = results if isinstance(results, (tuple, list)) else (results,)
    for source, view in zip(tensors if len(tensors) == len(views) else tensors[:1] * len(views), views):
        view.memory = memory_of(source)


def memory_of(tensor):
    """`([number of writes, line of the last one, what it is if it outlives the call], the number when it was made)`."""
    if tensor.memory is None:
        tensor.memory = [0, "", tensor.lasting()], 0
    return tensor.memory


def unwritable(tensor):
    """Why a tensor can't be changed in place, since what outlives the call would have to change; "" where it can."""
    what = memory_of(tensor)[0][2]
    return what and (
        f"a tensor of shape {tuple(tensor.shape)} is changed in place that is {what}, or a view of it, which would "
        "have to change after the call, too: change a copy, x.copy(); or make what changes a Parameter with "
        "requires_grad=False, and write that itself, as in self.cache[0, 1:3] = y"
    )


def note_write(tensor, where):
    """Record that a tensor was changed in place, at this line; its views, and what it is a view of, are stale then."""
    memory, _ = memory_of(tensor)
    memory[:2] = memory[0] + 1, where
    tensor.memory = memory, memory[0]
    type(process_state()).has_writes = True


def written_at(tensor):
    """The line of the write that made a tensor stale; None for one that isn't."""
    memory, version = tensor.memory or ((0,), 0)
    return memory[1] if memory[0] != version else None


def check_current(tensor):
    """Raise a `ValueError` for a distributed tensor that a write made stale."""
    if tensor.memory is not None and written_at(tensor) is not None:
        raise ValueError(
            f"a distributed tensor of shape {tensor.shape} is used after one of the same memory, such as a view of it, "
            "was changed in place: take a copy before, or take the view again"
        )
