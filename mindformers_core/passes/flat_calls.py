"""Calls in which nothing but tensors go in and out, one by one, for functions that MindSpore compiles.

Of a compiled function that PyNative differentiates, tensors in tuples, lists and dicts get wrong gradients, silently,
and results in dicts give them. So structures are taken apart before it, and put together in it by what is made here:
small functions of functions, which is what a graph can follow.
"""

from itertools import count

from mindspore import Tensor

from mindformers_core.program.structure import Value, tree_map

__all__ = ["giver", "unflatten", "skeleton", "taker", "tensors_in"]


def skeleton(structure):
    """A structure without its tensors, as something to look up: what a `taker` depends on."""
    if isinstance(structure, dict):
        return dict, *((name, skeleton(entry)) for name, entry in structure.items())
    if isinstance(structure, (tuple, list)):
        return type(structure), *map(skeleton, structure)
    return Tensor if isinstance(structure, Tensor) else (type(structure), repr(structure))


def tensors_in(structure):
    """The tensors in a structure, as a list."""
    if isinstance(structure, Tensor):
        return [structure]
    entries = structure if isinstance(structure, (tuple, list)) else ()
    entries = structure.values() if isinstance(structure, dict) else entries
    return [tensor for entry in entries for tensor in tensors_in(entry)]


def taker(structure):
    """A function that makes a structure of a flat tuple of its tensors, in the order of `tensors_in`.

    What is no tensor in it is 0 in what that gives.
    """
    return _taker(structure, count())


def _taker(structure, places):
    if isinstance(structure, Tensor):
        return _at(next(places))
    if isinstance(structure, dict):
        take = _no_entries
        for name, value in structure.items():
            take = _with_entry(name, _taker(value, places), take)
        return take
    if isinstance(structure, (tuple, list)):
        take = _nothing
        for part in reversed([_taker(entry, places) for entry in structure]):
            take = _with_first(part, take)
        return _as_list(take) if isinstance(structure, list) else take
    return _written_in


def giver(structure):
    """A function that makes a flat tuple of the tensors in a result; where they are, `Value`s stand in `structure`."""
    if isinstance(structure, Value):
        return _alone
    entries = structure.items() if isinstance(structure, dict) else ()
    entries = enumerate(structure) if isinstance(structure, (tuple, list)) else entries
    give = _nothing
    for key, entry in entries:
        give = _and(give, _part(key, giver(entry)))
    return give


def unflatten(structure, tensors):
    """What a `giver` has taken apart."""
    given = iter(tensors)
    return tree_map(lambda leaf: next(given) if isinstance(leaf, Value) else leaf, structure)


def _at(place):
    def take(flat):
        return flat[place]

    return take


def _written_in(flat):
    """In the place of what is no tensor. Generated functions have it written in, and graphs take few of its kinds."""
    return 0


def _nothing(flat):
    return ()


def _no_entries(flat):
    return {}


def _with_first(first, rest):
    def take(flat):
        return (first(flat),) + rest(flat)

    return take


def _with_entry(name, value, rest):
    def take(flat):
        found = rest(flat)
        found[name] = value(flat)
        return found

    return take


def _as_list(inner):
    def take(flat):
        return list(inner(flat))

    return take


def _alone(result):
    return (result,)


def _part(key, give):
    def given(result):
        return give(result[key])

    return given


def _and(first, second):
    def given(result):
        return first(result) + second(result)

    return given
