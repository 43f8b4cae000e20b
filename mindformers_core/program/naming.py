"""Readable names for generated code: variables keep the names of the user's code. Pure Python."""

import ast
import builtins
import keyword
import linecache
import re
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from mindformers_core.program.graph import CallNode

_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")
_ONE_WORD = re.compile(r"mat_mul|re_lu|ge_lu|si_lu|swi_glu")  # usual spellings
_OPERATIONS = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript)
_CONDITIONS = (ast.IfExp, ast.BoolOp)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_SYMBOLS = {"mult": "mul", "usub": "neg", "lt": "less", "gt": "greater", "lte": "lessequal", "gte": "greaterequal"}


class Names:
    """The names of one generated function.

    Args:
        reserved: names that no variable may have, besides Python's own: those of the module, a container that may
            grow while the function is written.
    """

    def __init__(self, reserved=()):
        self._python = frozenset((*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self"))
        self._module = reserved
        self._taken = set()

    def keep(self, name):
        """Reserve the name of a function parameter unchanged."""
        self._taken.add(name)
        return name

    def __contains__(self, name):
        return name in self._taken

    def variable(self, hint):
        """Reserve a free name: the hint, or `hint_2`, `hint_3`, …; `sum_` where Python has that name."""
        stem = re.sub(r"\W", "_", hint) or "value"
        stem = f"value_{stem}" if stem[0].isdigit() else stem
        name, number = (f"{stem}_" if stem in self._python else stem), 1
        while name in self._taken or name in self._python or name in self._module:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name


def snake_case(name):
    """A class name as a function name: `LlamaForCausalLM` becomes `llama_for_causal_lm`, `RMSNorm` `rms_norm`."""
    return _ONE_WORD.sub(lambda found: found[0].replace("_", ""), _WORDS.sub("_", name).lower())


def assigned_names(graph):
    """The variables to which the user's code assigns the results of a graph's nodes.

    For `p = q = self.q_proj(self.norm(x))`, the results of `q_proj` are `p` and `q`, and that of `norm` has no name.

    Args:
        graph: a `CellGraph`, whose nodes have file and line of their source; unreadable files give no names.

    Returns:
        Index of every node with a name -> for each target of the assignment a tuple with a name, or None, for every
        tensor in its outputs; None for a target with another number of names. Names may repeat.
    """
    names = {}
    placed = [(index, node, _statement(node.source)) for index, node in enumerate(graph.nodes)]
    for statement, run in groupby(placed, key=lambda entry: entry[2]):
        run = [(index, node) for index, node, _ in run]
        if statement is None:
            continue
        if statement.parallel:
            found = _in_parallel(statement.parallel, run)
        else:
            found = ((index, node, statement.targets) for index, node in _outermost(statement, run))
        for index, node, targets in found:
            names[index] = [_names(target, len(node.made)) for target in targets]
    return names


@dataclass(frozen=True, eq=False)
class _Statement:
    """An assignment.

    Attributes:
        targets: each a name, or a tuple of names and None; a name with a star collects the remaining values.
        outermost: kinds of the operations that compute the assigned value: `"q_proj"`, `"add"`; two of them for
            `a(x) if c else b(x)`.
        inner: the kinds of all other operations of the statement.
        parallel: of `a, b = f(x), g(h(x))` the kind and the targets of every operation, in order.
    """

    targets: tuple
    outermost: tuple
    inner: tuple
    parallel: tuple = ()


def _names(target, count):
    """The names in a target of a `_Statement` for `count` tensors, or None."""
    if isinstance(target, str):
        return (target,) * count
    names = []
    for name in target:
        is_rest = name is not None and name.startswith("*")
        names += [name[1:]] * (count - len(target) + 1) if is_rest else [name]
    return tuple(names) if len(names) == count else None


def _outermost(statement, run):
    """The nodes of one or more executions of a statement that produce the assigned value.

    Inner operations precede outer ones, so of `n` operations of one kind in a statement every `n`-th is the outermost.
    More nodes than operations of a kind are a loop. Without a matching kind the last node is taken.
    """
    alike = [entry for entry in run if any(_is_kind(entry[1], kind) for kind in statement.outermost)]
    inner = sum(kind in statement.outermost for kind in statement.inner)
    if not alike and not statement.inner:
        alike = [entry for entry in run if _kind(entry[1]) == _kind(run[-1][1])]
    if not alike or len(alike) % (inner + 1):
        return run[-1:]
    return alike[inner :: inner + 1]


def _in_parallel(parts, run):
    """`(index, node, targets)` of the results of a parallel assignment's executions, if distinguishable."""
    expected, kinds = parts * (len(run) // len(parts)), {kind for kind, _ in parts}
    # an operator may be captured under another name, except that of another operator in the statement
    others = ((node, kinds - {kind}) for (_, node), (kind, _) in zip(run, expected) if not _is_kind(node, kind))
    if len(expected) == len(run) and not any(_is_kind(node, kind) for node, kinds in others for kind in kinds):
        yield from ((index, node, targets) for (index, node), (_, targets) in zip(run, expected) if targets)


def _kind(node):
    return "a Cell" if isinstance(node, CallNode) else node.operator


def _is_kind(node, kind):
    """Whether a node has this kind in the user's code: an attribute, a function, or an operator's symbol."""
    if isinstance(node, CallNode):
        return (node.child or "").rpartition(".")[2] == kind
    return node.attribute == kind or _plain(node.operator).startswith(_plain(kind))


def _plain(name):
    return name.replace("_", "").lower()


def _statement(source):
    """The assignment at `file:line`, or None."""
    path, _, line = (source or "").rpartition(":")
    return _statements("".join(linecache.getlines(path))).get(int(line)) if path else None


@cache
def _statements(text):
    """Line -> the `_Statement` on it, or None, for a file of Python code."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and not isinstance(node, ast.Match):
            statement = _read(node)
            for line in range(node.lineno, node.end_lineno + 1):
                found[line] = None if line in found else statement  # two on one line are ambiguous
    return found


def _read(node):
    """The `_Statement` of a syntax node, or None for one without names for results."""
    if isinstance(node, ast.AugAssign):
        operations, outermost = _kinds(node.value), (_symbol(node.op),)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        operations, outermost = _kinds(node.value), tuple(map(_expression_kind, _results(node.value)))
    else:
        return None
    targets = map(_target, node.targets if isinstance(node, ast.Assign) else [node.target])
    targets = tuple(target for target in targets if target)
    if isinstance(node.value, (ast.Tuple, ast.List)):
        parallel = _parallel(node.value.elts, [target for target in targets if isinstance(target, tuple)])
        return _Statement((), (), (), parallel) if parallel else None
    for kind in outermost:
        if kind in operations:
            operations.remove(kind)
    return _Statement(targets, outermost, tuple(operations)) if targets and outermost else None


def _parallel(values, targets):
    """`_Statement.parallel` of `a, b = f(x), g(h(x))`; empty without one name for each value."""
    if any(len(target) != len(values) or any(name and name[0] == "*" for name in target) for target in targets):
        return ()
    parts = []
    for place, value in enumerate(values):
        if any(isinstance(node, (*_COMPREHENSIONS, *_CONDITIONS, ast.Lambda)) for node in ast.walk(value)):
            return ()
        names = tuple(target[place] for target in targets if target[place])
        parts += [(_expression_kind(node), names if node is value else ()) for node in _in_order(value)]
    return tuple(parts)


def _in_order(value):
    """The operations of an expression in execution order."""
    for child in ast.iter_child_nodes(value):
        yield from _in_order(child)
    if isinstance(value, _OPERATIONS):
        yield value


def _target(node):
    """The name, or tuple of names and None, of an assignment's target; None for other targets, as `x[0] = …`."""
    if isinstance(node, (ast.Tuple, ast.List)):
        names = tuple(map(_target, node.elts))
        return tuple(name if isinstance(name, str) else None for name in names) if any(names) else None
    if isinstance(node, ast.Starred):
        name = _target(node.value)
        return f"*{name}" if isinstance(name, str) else None
    name = getattr(node, "id", getattr(node, "attr", None))
    return name if name and name.strip("_") else None


def _results(value):
    """The operations that produce an expression's value: one of them, or each in a comprehension."""
    if isinstance(value, ast.IfExp):
        return _results(value.body) + _results(value.orelse)
    if isinstance(value, _COMPREHENSIONS):
        return _results(value.value if isinstance(value, ast.DictComp) else value.elt)
    return [value] if isinstance(value, _OPERATIONS) else []


def _kinds(value):
    return [_expression_kind(node) for node in ast.walk(value) if isinstance(node, _OPERATIONS)]


def _expression_kind(node):
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "()"))
    if isinstance(node, ast.Subscript):
        return "[]"
    return _symbol(node.ops[0] if isinstance(node, ast.Compare) else node.op)


def _symbol(operator):
    name = type(operator).__name__.lower()
    return _SYMBOLS.get(name, name)
