"""Who declares what: the layouts that `shard()` hooks and plans give to a Cell's inputs, outputs and parameters."""

import inspect
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mindspore import nn

from mindformers_core.layout import Layout, LayoutSpec
from mindformers_core.mesh import nearest

__all__ = ["Declaration", "cell_label", "collect_declarations"]

_PLAN_KEYS = ("input", "output", "weight")


@dataclass(frozen=True)
class Declaration:
    """What is declared for one Cell.

    Attributes:
        inputs: argument name of `construct` -> layout.
        outputs: position (or key, where `construct` returns a dict) -> layout.
        weights: name of one of the Cell's own parameters -> layout.
    """

    inputs: dict
    outputs: dict
    weights: dict


def collect_declarations(cell, config=None, plan=None):
    """Cell path -> `Declaration`, for every Cell in the tree that a hook or the plan speaks of.

    A plan wins over a hook, part by part: a plan that gives a weight leaves the hook's input alone.

    Raises:
        TypeError, ValueError: a hook that returns something else than three layouts, names that the Cell doesn't
            have, a pattern that no Cell's path matches. All name the Cell's path and class.
    """
    paths = dict(cell.cells_and_names())
    found = {path: _read_hook(path, child, config) for path, child in paths.items() if _has_hook(child)}
    for pattern, entry in (plan or {}).items():
        matching = [path for path in paths if _matches(path, pattern)]
        if not matching:
            raise ValueError(
                f"plan pattern '{pattern}' matches no Cell of {type(cell).__name__}{nearest(pattern, paths)}"
            )
        for path in matching:
            _check_plan_keys(pattern, entry)
            parts = [entry.get(key) for key in _PLAN_KEYS]
            declared = _declaration(path, paths[path], parts, f"plan entry '{pattern}'")
            found[path] = _override(found.get(path), declared)
    return found


def cell_label(path, cell):
    """How errors call a Cell."""
    return f"Cell '{path}' ({type(cell).__name__})" if path else f"the root Cell ({type(cell).__name__})"


def _has_hook(cell):
    return getattr(type(cell), "shard", None) is not nn.Cell.shard


def _read_hook(path, cell, config):
    returned = cell.shard(config)
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TypeError(
            f"{cell_label(path, cell)}: shard(self, config) should return "
            "(input_layout, output_layout, weight_layout), "
            f"each a layout, a tuple, a dict or None, not {returned!r}"
        )
    return _declaration(path, cell, returned, f"{type(cell).__name__}.shard()")


def _declaration(path, cell, parts, source):
    where = f"{cell_label(path, cell)}, {source}"
    arguments = [name for name in inspect.signature(type(cell).construct).parameters if name != "self"]
    own = list(cell._params)
    inputs = _by_name(parts[0], arguments, arguments[:1], f"{where}: input layout", "construct() takes")
    outputs = _by_name(parts[1], None, [0], f"{where}: output layout", "")
    weights = _by_name(
        parts[2],
        own,
        ["weight"] if "weight" in own else own[:1],
        f"{where}: weight layout",
        "the Cell's own parameters are",
    )
    return Declaration(inputs, outputs, weights)


def _by_name(declared, names, default, what, there):
    """Normalise a declared part to a dict: a dict by name, a tuple by position, a single layout for `default`."""
    if declared is None:
        return {}
    if isinstance(declared, dict):
        for name in declared:
            if names is not None and name not in names:
                raise ValueError(
                    f"{what} names '{name}', but {there} {', '.join(names) or 'none'}{nearest(name, names)}"
                )
        entries = declared
    elif isinstance(declared, (tuple, list)):
        if names is not None and len(declared) > len(names):
            raise ValueError(f"{what} has {len(declared)} entries, but {there} {', '.join(names) or 'none'}")
        entries = dict(zip(names if names is not None else range(len(declared)), declared))
    else:
        if not default:
            raise ValueError(f"{what} is {declared}, but {there} none")
        entries = {default[0]: declared}
    for name, entry in entries.items():
        if not (entry is None or isinstance(entry, (LayoutSpec, Layout)) or hasattr(entry, "to_dict")):
            raise TypeError(f"{what} of '{name}' is {entry!r}: write layout(…), or None to derive it")
    return {name: entry for name, entry in entries.items() if entry is not None}


def _check_plan_keys(pattern, entry):
    if not isinstance(entry, dict):
        raise TypeError(f"plan entry '{pattern}' should be a dict with the keys {', '.join(_PLAN_KEYS)}, not {entry!r}")
    for key in entry:
        if key not in _PLAN_KEYS:
            raise ValueError(
                f"plan entry '{pattern}': unknown key '{key}'; allowed: {', '.join(_PLAN_KEYS)}"
                + nearest(key, _PLAN_KEYS)
            )


def _override(base, other):
    if base is None:
        return other
    return Declaration(base.inputs | other.inputs, base.outputs | other.outputs, base.weights | other.weights)


def _matches(path, pattern):
    """Whether a path like `layers.0.mlp` matches a pattern, segment by segment; `**` stands for any number of them."""
    return _match_segments(path.split(".") if path else [], pattern.split(".") if pattern else [])


def _match_segments(segments, patterns):
    if not patterns:
        return not segments
    if patterns[0] == "**":
        return any(_match_segments(segments[skip:], patterns[1:]) for skip in range(len(segments) + 1))
    return bool(segments) and fnmatchcase(segments[0], patterns[0]) and _match_segments(segments[1:], patterns[1:])
