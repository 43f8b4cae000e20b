"""Calls whose pytrees are flattened to tuples of tensors, for functions that MindSpore compiles.

Where PyNative differentiates a compiled function, MindSpore computes wrong gradients, without an error, for tensors in
tuples, lists and dicts, and for results in dicts. So arguments are flattened before the compiled function and
unflattened in it; results are flattened in it and unflattened after it. Both are done by closures over one node of the
pytree each, since a graph can contain these.
"""

from itertools import count

from mindspore import Tensor

from mindformers_core.program.structure import Value, tree_key


def treedef(structure):
    """A hashable description of a pytree without its tensors: equal ones have the same `unflatten_fn`."""
    return tree_key(structure, lambda leaf: Tensor if isinstance(leaf, Tensor) else (type(leaf), repr(leaf)))


def unflatten_fn(structure):
    """A function that rebuilds a pytree from the tuple of its tensors, in the order of `tree_leaves`.

    Other leaves become 0: generated functions contain their values, and graphs take few of their types.
    """
    return _unflatten_fn(structure, count())


def _unflatten_fn(structure, places):
    if isinstance(structure, Tensor):
        place = next(places)
        return lambda flat: flat[place]
    if isinstance(structure, dict):
        entries = tuple((name, _unflatten_fn(entry, places)) for name, entry in structure.items())

        def build_dict(flat):
            built = {}
            for name, build in entries:
                built[name] = build(flat)
            return built

        return build_dict
    if isinstance(structure, (tuple, list)):
        kind = tuple if isinstance(structure, tuple) else list
        parts = tuple(_unflatten_fn(entry, places) for entry in structure)
        return lambda flat: kind([build(flat) for build in parts])
    return lambda flat: 0


def flatten_fn(structure):
    """A function that flattens a result to a tuple of its tensors; `structure` has a `Value` in the place of each."""
    if isinstance(structure, Value):
        return lambda result: (result,)
    entries = structure.items() if isinstance(structure, dict) else ()
    entries = enumerate(structure) if isinstance(structure, (tuple, list)) else entries
    parts = tuple((key, flatten_fn(entry)) for key, entry in entries)

    def flatten(result):
        flat = ()
        for key, flatten_part in parts:
            flat += flatten_part(result[key])
        return flat

    return flatten
