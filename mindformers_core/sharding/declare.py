"""The layouts that `shard()` hooks, plans and sharded primitives declare for tensors."""

import copy
import inspect
from dataclasses import replace
from fnmatch import fnmatchcase
from types import SimpleNamespace

from mindspore.ops import Primitive

from mindformers_core.hints import nearest
from mindformers_core.layout import Layout, LayoutSpec, bind_layout
from mindformers_core.mindspore_private import parameters_of
from mindformers_core.program.graph import cell_label
from mindformers_core.program.plan import joined_path
from mindformers_core.program.structure import call_signature
from mindformers_core.propagation.boundaries import Declaration, OperatorDeclaration
from mindformers_core.propagation.strategies import is_strategy

_PLAN_KEYS = ("input", "output", "weight", "eager")
_OPERATOR_KEYS = ("input", "output")
_SHARDED = {"in_strategy", "out_strategy", "in_layout", "out_layout"}  # what `Primitive.shard()` sets


def collect_declarations(cell, config=None, plan=None):
    """Cell path -> `Declaration`, for every Cell in the tree with a declaration by a hook, the plan or a primitive.

    A plan has precedence over a hook, part by part: a plan that gives a weight leaves the hook's input unchanged.
    Likewise it has precedence over `primitive.shard(in_strategy, out_strategy)`, which holds for primitives that are
    attributes of a Cell. A plan's pattern that matches no Cell may end in the name of such an attribute:
    `"layers.*.mlp.matmul"`.

    Raises:
        TypeError, ValueError: a hook that returns something else than three layouts, names that the Cell doesn't
            have, a pattern that neither a Cell's path nor a primitive's matches. All name the Cell's path and class.
    """
    cells = dict(cell.cells_and_names())
    found = {}
    for path, child in reversed(cells.items()):  # from below: a declaration of a Cell above has precedence
        operators = _sharded_primitives(path, child)
        declared = [(path, Declaration(operators=operators))] if operators else []
        hooked = _read_hook(path, child, config) if _is_hook(child, plan) else []
        for place, declaration in declared + hooked:
            found[place] = _override(found.get(place, Declaration()), declaration)
    for pattern, entry in (plan or {}).items():
        for path, declaration in _read_plan_entry(cells, pattern, entry):
            found[path] = _override(found.get(path, Declaration()), declaration)
    return found


def eager_cells(cell, plan):
    """Paths of the Cells that a plan marks by `"eager": True`: these, and the Cells around, have no program."""
    patterns = [pattern for pattern, entry in (plan or {}).items() if entry.get("eager")]
    return [path for path, _ in cell.cells_and_names() if any(_matches(path, pattern) for pattern in patterns)]


def copy_cell(cell):
    """A deep copy of a Cell. Primitives with strategies are shared: MindSpore's copy of a primitive drops them; so does
    that of a Parameter its attributes, which are copied here."""
    primitives = [value for _, child in cell.cells_and_names() for value in _primitives(child).values()]
    copied = copy.deepcopy(cell, {id(value): value for value in primitives if _SHARDED & value.attrs.keys()})
    for old, new in zip(cell.get_parameters(), copied.get_parameters(), strict=True):
        vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
    return copied


def owner_and_name(path, cells):
    """The path in `cells` of the Cell that has the Parameter at `path`, and its name there, which may have dots."""
    owner, name = "", path
    for place in [at for at, letter in enumerate(path) if letter == "."]:
        inner = path[:place]
        if inner in cells and path[place + 1 :] in parameters_of(cells[inner]):
            owner, name = inner, path[place + 1 :]
    return owner, name


def parameter_at(path, cells):
    """The Parameter at a path that its Cell, one of `cells`, computes with."""
    owner, name = owner_and_name(path, cells)
    return parameters_of(cells[owner])[name]


def _is_hook(cell, plan):
    """Whether a Cell's method `shard` is a hook: MindSpore's own isn't, its strategies are those of the Cell's
    primitives; nor, beside a plan, any with other parameters than `(self, config)`, which a library made for itself."""
    method = type(cell).shard
    is_own = not method.__module__.startswith("mindspore.")
    return is_own and (plan is None or list(inspect.signature(method).parameters)[1:] == ["config"])


def _read_hook(path, cell, config):
    """Pairs (Cell path, `Declaration`)."""
    returned = cell.shard(config)
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TypeError(
            f"{cell_label(path, cell)}: shard(self, config) should return "
            "(input_layout, output_layout, weight_layout), "
            f"each a layout, a tuple, a dict or None, not {returned!r}. Where it is a method of another meaning, give "
            "shard() a plan (or {}): beside one, only shard(self, config) is a hook"
        )
    return _declaration(path, cell, returned, f"{type(cell).__name__}.shard()")


def _declaration(path, cell, parts, source):
    """Pairs (Cell path, `Declaration`): of the Cell, and of those below whose parameters it names by their paths."""
    where = f"{cell_label(path, cell)}, {source}"
    arguments = list(call_signature(type(cell).construct).parameters)[1:]
    own = list(parameters_of(cell))
    inputs = _by_name(parts[0], arguments, arguments[:1], f"{where}: input layout", "construct() takes")
    outputs = _by_name(parts[1], None, [0], f"{where}: output layout", "")
    named = isinstance(parts[2], dict)
    weights = _by_name(
        parts[2],
        [name for name, _ in cell.parameters_and_names()] if named else own,
        ["weight"] if "weight" in own else own[:1],
        f"{where}: weight layout",
        f"the Cell's {'' if named else 'own '}parameters are",
    )
    found, cells = [(path, Declaration(inputs, outputs))], dict(cell.cells_and_names())
    for name, layout in weights.items():
        inner, local = owner_and_name(name, cells)
        found.append((joined_path(path, inner), Declaration(weights={local: layout})))
    return found


def _by_name(declared, names, default, what, there):
    """Normalise a declared part to a dict: a dict by name, a tuple by position, a single layout for `default`."""
    known = ", ".join(names or ()) or "none"
    if declared is None:
        return {}
    if isinstance(declared, dict):
        unknown = [name for name in declared if names is not None and name not in names]
        if unknown:
            raise ValueError(f"{what} names '{unknown[0]}', but {there} {known}{nearest(unknown[0], names)}")
        entries = declared
    elif isinstance(declared, (tuple, list)):
        if names is not None and len(declared) > len(names):
            raise ValueError(f"{what} has {len(declared)} entries, but {there} {known}")
        entries = dict(zip(range(len(declared)) if names is None else names, declared))
    elif default:
        entries = {default[0]: declared}
    else:
        raise ValueError(f"{what} is {declared}, but {there} none")
    for name, entry in entries.items():
        if not (entry is None or _is_layout(entry)):
            raise TypeError(f"{what} of '{name}' is {entry!r}: write layout(…), or None to derive it")
    return {name: entry for name, entry in entries.items() if entry is not None}


def _read_plan_entry(cells, pattern, entry):
    """Pairs (Cell path, `Declaration`) of one entry of a plan."""
    source = f"plan entry '{pattern}'"
    matching = [path for path in cells if _matches(path, pattern)]
    if matching:
        parts = _plan_parts(source, entry, _PLAN_KEYS)
        return [pair for path in matching for pair in _declaration(path, cells[path], parts, source)]
    head, _, tail = pattern.rpartition(".")
    primitives = [(path, name) for path, child in cells.items() for name in _primitives(child)]
    matching = [(path, name) for path, name in primitives if _matches(path, head) and fnmatchcase(name, tail)]
    if not matching:
        known = [*filter(None, cells), *(joined_path(path, name) for path, name in primitives)]
        raise ValueError(
            f"plan pattern '{pattern}' matches no Cell of {type(cells['']).__name__}, and no primitive that is an "
            f"attribute of one{nearest(pattern, known)}"
        )
    parts, found = _plan_parts(source, entry, _OPERATOR_KEYS), []
    for path, name in matching:
        where = f"{_operator_label(path, cells[path], name)}, {source}"
        declared = (_by_tensor(part, f"{where}: {key}") for key, part in zip(_OPERATOR_KEYS, parts))
        found.append((path, Declaration(operators={name: OperatorDeclaration(*declared)})))
    return found


def _operator_label(path, cell, name):
    """The name of a primitive among a Cell's attributes in error messages."""
    return f"{cell_label(path, cell)}, operator '{name}' ({cell.__dict__[name].name})"


def _primitives(cell):
    """Name -> primitive, for those that are attributes of the Cell."""
    return {name: value for name, value in cell.__dict__.items() if isinstance(value, Primitive)}


def _sharded_primitives(path, cell):
    """Name -> `OperatorDeclaration`, for the primitives with strategies or layouts set by `Primitive.shard()`.

    Those with the attribute `manual_split` are left out: the table's layout says how they are cut.
    """
    found = {}
    for name, primitive in _primitives(cell).items():
        if "manual_split" in primitive.attrs:
            continue
        where = f"{_operator_label(path, cell, name)}, {primitive.name}.shard()"
        declared = OperatorDeclaration(
            _stored(primitive, "in_strategy", "in_layout", where),
            _stored(primitive, "out_strategy", "out_layout", where),
        )
        if declared != OperatorDeclaration():
            found[name] = declared
    return found


def _stored(primitive, strategy_name, layout_name, where):
    """The strategies, or the dicts of layouts (without their ranks), that `Primitive.shard()` left as attributes."""
    layouts, strategies = primitive.attrs.get(layout_name), primitive.attrs.get(strategy_name)
    if layouts is not None and strategies is not None:
        raise ValueError(f"{where}: it was called with strategies and again with layouts; call it once")
    where = f"{where}: {strategy_name}"
    if layouts is None:
        return _by_tensor(strategies, where)
    return _by_tensor([_as_layout(parts, where) for parts in layouts], where)


def _as_layout(parts, where):
    return bind_layout(SimpleNamespace(to_dict=lambda: parts), None, name=where) if isinstance(parts, dict) else parts


def _by_tensor(declared, what):
    """Normalise a declared part of an operator to None or a tuple, one entry for every tensor."""
    if declared is None:
        return None
    if _is_layout(declared) or isinstance(declared, (tuple, list)) and declared and is_strategy(declared):
        declared = (declared,)
    if not isinstance(declared, (tuple, list)):
        raise TypeError(f"{what} is {declared!r}: write a tuple with a layout(…), a strategy or None for every tensor")
    for place, entry in enumerate(declared):
        if not (entry is None or _is_layout(entry) or is_strategy(entry)):
            raise TypeError(
                f"{what} {place} is {entry!r}: write layout(…), a strategy as (2, 1) (into how many parts each dim is "
                "cut), or None to derive it"
            )
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in declared)


def _is_layout(entry):
    return isinstance(entry, (LayoutSpec, Layout)) or hasattr(entry, "to_dict")


def _plan_parts(source, entry, keys):
    """The parts of a plan's entry in the order of `keys`, None where there is none."""
    if not isinstance(entry, dict):
        raise TypeError(f"{source} should be a dict with the keys {', '.join(keys)}, not {entry!r}")
    for key in entry:
        if key not in keys:
            of = "" if key not in _PLAN_KEYS else " (an operator has no weights, only inputs)"
            raise ValueError(f"{source}: unknown key '{key}'; allowed: {', '.join(keys)}{of or nearest(key, keys)}")
    return [entry.get(key) for key in keys]


def _override(base, other):
    """The declarations of `other`, completed by those of `base`."""
    operators = dict(base.operators)
    for name, declared in other.operators.items():
        given = {part: entry for part, entry in vars(declared).items() if entry is not None}
        operators[name] = replace(operators.get(name, declared), **given)
    return Declaration(
        base.inputs | other.inputs, base.outputs | other.outputs, base.weights | other.weights, operators
    )


def _matches(path, pattern):
    """Whether a path like `layers.0.mlp` matches a pattern, segment by segment; `**` stands for any number of them."""
    return _match_segments(path.split(".") if path else [], pattern.split(".") if pattern else [])


def _match_segments(segments, patterns):
    if not patterns:
        return not segments
    if patterns[0] == "**":
        return any(_match_segments(segments[skip:], patterns[1:]) for skip in range(len(segments) + 1))
    return bool(segments) and fnmatchcase(segments[0], patterns[0]) and _match_segments(segments[1:], patterns[1:])
