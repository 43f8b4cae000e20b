"""Which sample a function is called with: its own, that of its name, or the first generic one that fits."""

from operator_samples import cells, functional, ops, primitives, tensor
from operator_samples.calls import NAMESPACES, Sample
from operator_samples.common import COMMON, GENERIC
from operator_samples.surface import targets

__all__ = ["all_targets", "candidates"]

_TABLES = {}
for _module in (functional, ops, tensor, cells, primitives):
    for _space, _entries in _module.SAMPLES.items():
        _TABLES[_space] = _TABLES.get(_space, {}) | _entries


def candidates(target):
    """The `Sample`s to try for a target, in order."""
    space, _, name = target.rpartition(".")
    if space not in NAMESPACES:
        return [Sample(target, primitives.EXPRESSIONS[target])]
    own = _TABLES.get(space, {}).get(name)
    if own is not None:
        return [Sample(target, own)]
    texts = ([COMMON[name]] if name in COMMON else []) + [text for text in GENERIC]
    if isinstance(getattr(NAMESPACES[space], name), type):
        texts = [f"; {text}" for text in GENERIC]
    return [Sample(target, text) for text in texts]


def all_targets():
    """Namespace -> its targets; the classic primitives of the seed's table as `"primitives"`, and expressions."""
    found = {space: [f"{space}.{name}" for name in targets(space)] for space in NAMESPACES}
    found["primitives"] = [f"ops.{name}" for name in primitives.SAMPLES["ops"]]
    found["expressions"] = list(primitives.EXPRESSIONS)
    return found
