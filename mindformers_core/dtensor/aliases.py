"""Tensors that share memory on one card: a value and its views, of which a write in place makes all others stale."""

from mindspore import Tensor

from mindformers_core.operators.registry import facts_of, rewritten
from mindformers_core.program.structure import tree_leaves

_RETURNED = frozenset({"Contiguous", "Diagonal"})  # views, or the input itself, beside those that records tell


def is_view(name, args, kwargs):
    """Whether results of an operator may have the memory of its first tensor."""
    if name.endswith("View") or name in _RETURNED:
        return True
    name, _, _ = rewritten(name, tuple(args), dict(kwargs))
    return facts_of(name).view is not None


def check_memory(tensor):
    """Raise a `ValueError` for a plain tensor that is to be changed in place, and is part of another one."""
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        raise ValueError(
            f"a plain tensor of shape {tensor.shape} is changed in place that is part of another one, which would have "
            "to change, too: change that one, x[...] = y"
        )


def share_memory(source, results):
    """Record that the results of an operator have the memory of its first tensor."""
    for view in tree_leaves(results, Tensor):
        if view.dtype == source.dtype:  # else a copy
            vars(view)["memory"] = vars(source).setdefault("memory", ([0, ""], 0))


def note_write(tensor, where, is_stale=False):
    """Record that a tensor was changed in place, at this line; its views, and what it is a view of, are stale then.

    Args:
        tensor, where: the tensor, and the line.
        is_stale: whether the tensor itself can't be read, either. Default: False.
    """
    memory, _ = vars(tensor).setdefault("memory", ([0, ""], 0))
    memory[:] = memory[0] + 1, where
    vars(tensor)["memory"] = memory, -1 if is_stale else memory[0]


def written_at(tensor):
    """The line of the write that made a tensor stale; None for one that isn't."""
    memory, version = vars(tensor).get("memory", ((0, ""), 0))
    return memory[1] if memory[0] != version else None
