"""The programs of a sharded tree: for every signature that comes, one captured, propagated and generated module."""

import inspect
import logging
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from mindspore import Tensor
from mindspore._c_expression import typing

from mindformers_core.capture.capture import capture
from mindformers_core.dtensor.dtensor import DTensor, wrap
from mindformers_core.dtensor.move import cost_model, dtype_name
from mindformers_core.generation.load import load_module
from mindformers_core.generation.module_source import module_source
from mindformers_core.layout import Layout, bind_layout
from mindformers_core.operators import TensorMeta, tensor_meta
from mindformers_core.program.partition import calls_of, partition
from mindformers_core.program.plan import joined_path
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.propagation.checking import check_plan
from mindformers_core.propagation.propagate import propagate
from mindformers_core.propagation.saved import load_plan

_LOG = logging.getLogger("mindformers_core")

__all__ = ["Program", "arriving_tensors", "describe", "make_program", "plan_call", "signature_key"]


@dataclass(frozen=True, eq=False)
class Program:
    """What one signature runs.

    Attributes:
        name: the method of the called Cell that runs it.
        path: the called Cell.
        signature: what tells it from others: see `describe`.
        frame: its `CellPlan`.
        generated: the `CellPlan` that was generated: the same one, but where some of it is compiled by itself.
        graph: what was captured.
        file: the generated module.
        source: the `ModuleSource`.
        functions: name -> function, of the whole module.
        results: a `TensorMeta` for every tensor that it returns.
    """

    name: str
    path: str
    signature: tuple
    frame: object
    generated: object
    graph: object
    file: str
    source: object = field(repr=False)
    functions: dict = field(repr=False)
    results: tuple = field(repr=False)

    @property
    def communicates(self):
        """Whether it moves tensors between ranks, forward or backward."""
        entries = [entry for _, frame in self.frame.walk() for entry in frame.instructions]
        return any(getattr(entry, "steps", ()) or getattr(entry, "algorithm", None) for entry in entries)

    @property
    def inputs(self):
        """The `Value`s that it takes, with their global shapes."""
        return tree_leaves(self.graph.arguments)

    def wrapped(self, result):
        """The local result as a structure of DTensors."""
        if type(result) is Tensor and len(self.results) == 1:
            return wrap(result, self.results[0])
        found = []
        tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, result)
        tensors = map(wrap, found, self.results)
        return tree_map(lambda leaf: next(tensors) if _is_value(leaf) else leaf, self.graph.result)


def _is_value(leaf):
    return bool(tree_leaves(leaf))


def describe(leaf):
    """What a program depends on in an argument: of a tensor its local shape, dtype and, of a DTensor, its layout."""
    if isinstance(leaf, DTensor):
        return tuple(leaf._local.shape), leaf._meta.dtype, leaf.layout
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), dtype_name(leaf.dtype), None
    if isinstance(leaf, TensorMeta):
        return leaf.shape, leaf.dtype, leaf.layout
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, slice, np.generic, typing.Type, Enum)):
        return type(leaf), repr(leaf)  # since 1 == 1.0 == True, and 0.0 == -0.0
    raise TypeError(
        f"a sharded Cell takes tensors, numbers, strings, None, and tuples, lists and dicts of them, not {leaf!r} "
        f"({type(leaf).__name__}), which may change without its program being made anew: keep it in the Cell"
    )


def signature_key(structure):
    """A structure of arguments as something to look up: tuples of what `describe` says of every leaf."""
    if isinstance(structure, (tuple, list)):
        return type(structure), *map(signature_key, structure)
    if isinstance(structure, dict):
        return dict, *((name, signature_key(entry)) for name, entry in structure.items())
    return describe(structure)


def make_program(tree, path, args, kwargs, signature, saved_plan=None):
    """Capture, propagate, generate and load the program of one call.

    Args:
        tree: the `ShardedTree`.
        path: the Cell that is called.
        args, kwargs: as it is called; tensors, or `TensorMeta`s of local shapes.
        signature: what `signature_key` gives for them.
        saved_plan: a file to take the plan from, or None.
    """
    graph, frame = plan_call(tree, path, args, kwargs, saved_plan)
    return _generated(tree, path, signature, graph, tree.activations.marked(path, frame, tree.compiling))


def plan_call(tree, path, args, kwargs, saved_plan=None):
    """Capture and propagate one call; arguments as of `make_program`.

    Returns:
        `(CellGraph, CellPlan)`, without what the tree's `ActivationPolicy` makes of the plan.
    """
    bound = _bind(tree, path, args, kwargs)
    arriving = arriving_tensors(tree, path, args, kwargs)
    coming = iter(arriving)

    def enter(leaf):
        if not isinstance(leaf, (Tensor, TensorMeta)):
            return leaf
        shape, dtype, _ = describe(leaf)
        return TensorMeta(next(coming)[2].global_shape(shape), dtype, None, False)

    for name, value in list(bound.arguments.items())[1:]:
        bound.arguments[name] = tree_map(enter, value)
    tree.check_cells()
    try:
        with tree.as_written():
            graph = capture(tree.cells[path], *bound.args[1:], **bound.kwargs)
    except ValueError as error:
        undeclared = _undeclared(arriving, _declared_inputs(tree, path))
        if not undeclared:
            raise
        raise ValueError(f"{str(error).rstrip('.')}; {tree.label(path)} was called with {undeclared}") from error
    values = tree_leaves(graph.arguments)
    layouts = {value.id: layout for value, (_, _, layout) in zip(values, arriving, strict=True)}
    declarations = tree.below(path, tree.declarations)
    parameters = tree.below(path, tree.parameter_layouts)
    if saved_plan is not None:
        frame = load_plan(saved_plan, graph, tree.mesh, layouts, parameters, declarations, final=path == "")
    else:
        frame = propagate(graph, tree.mesh, layouts, parameters, declarations, cost_model(), final=path == "")
    check_plan(frame, final=path == "")
    if not tree.programs:
        _warn_of_undivided(tree, path, frame)
    return graph, frame


def _warn_of_undivided(tree, path, frame):
    """Warn, once for equal Cells, where tensors are gathered since their sizes don't divide."""
    cells = {}
    for inner, each in frame.walk():
        for why in {move.reason for move in each.moves if move.undivided}:
            cells.setdefault(why, []).append(tree.label(joined_path(path, inner)))
    for why, labels in cells.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        _LOG.warning("%s%s gathers what is sharded for %s; explain() shows where", labels[0], more, why)


def arriving_tensors(tree, path, args, kwargs):
    """`(name of the argument, tensor, Layout in which it arrives)` of every tensor that a Cell is called with."""
    bound, declared, found = _bind(tree, path, args, kwargs), _declared_inputs(tree, path), []

    def enter(leaf, name):
        if isinstance(leaf, (Tensor, TensorMeta)):
            what = f"input '{name}' of {tree.label(path)}"
            found.append((name, leaf, _arriving_layout(leaf, declared.get(name), tree.mesh, what)))

    for name, value in list(bound.arguments.items())[1:]:
        tree_map(lambda leaf, name=name: enter(leaf, name), value)
    return found


def _declared_inputs(tree, path):
    """Argument -> the layout in which plain tensors arrive that Python code calls the Cell with."""
    takes_parts = path == "" and path in tree.declarations and not tree.takes_full_batch
    return tree.declarations[path].inputs if takes_parts else {}


def _undeclared(arriving, declared):
    """Where some inputs are cut and others taken as whole, both; a frequent reason for shapes that don't fit."""
    arriving = [(name, describe(leaf)[0], layout) for name, leaf, layout in arriving]
    cut = [(name, shape, layout) for name, shape, layout in arriving if any(layout.dims)]
    whole = [(name, shape) for name, shape, at in arriving if name not in declared and shape and at.is_replicated]
    if not cut or not whole:
        return ""
    (name, local, layout), (other, shape) = cut[0], whole[0]
    return (
        f"'{name}' {local}, which is {layout.global_shape(local)} in all, {layout}, but with '{other}' {shape} of no "
        "declared layout, which is taken as whole: declare that, too, if each rank gives its part"
    )


def _bind(tree, path, args, kwargs):
    try:
        return inspect.signature(tree.classes[path].construct).bind(tree.cells[path], *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{tree.label(path)}, construct(): {error}") from None


def _arriving_layout(leaf, declared, mesh, name):
    """In which layout a tensor comes to a Cell that is called from outside."""
    _, _, layout = describe(leaf)
    if layout is not None:
        if layout.mesh != mesh:
            raise ValueError(f"{name} lives as {layout!r}, which is on another mesh than the Cell's, {mesh!r}")
        return layout
    if declared is not None:
        return bind_layout(declared, mesh, len(leaf.shape), name=name)
    return Layout.on(mesh, ((),) * len(leaf.shape))


def _generated(tree, path, signature, graph, frame):
    """Write, load and name the module of a plan."""
    header = _header(tree, path, graph, frame)
    prefix = f"{path}." if path else ""
    classes = {cell[len(prefix) :]: kind for cell, kind in tree.classes.items() if not path or cell.startswith(prefix)}
    classes[""] = tree.classes[path]
    generated = (
        partition(frame, *(calls_of(frame, path, cells) for cells in tree.compiling)) if tree.compiling else frame
    )
    apart = generated is not frame or tree.activations.marks and tree.compiling is not None
    if generated is not frame:
        check_plan(generated)
    source = module_source(generated, classes, cost_model(), tree.function_names, header, tree.deferring, apart)
    tree.function_names.update(source.functions.values())
    name = source.functions[generated]
    module = load_module(name, source)
    functions = {function: getattr(module, function) for function in source.functions.values()}
    values = tree_leaves(graph.result)
    results = tuple(tensor_meta(v.shape, v.dtype, layout, False) for v, layout in zip(values, frame.results))
    return Program(name, path, signature, frame, generated, graph, module.__file__, source, functions, results)


def _header(tree, path, graph, frame):
    """The docstring of a generated module."""
    inputs = [
        f"    {value.hint}: {value.described.partition(' ')[2]} as {frame.layouts[value.id]}"
        for value in tree_leaves(graph.arguments)
    ]
    mode = "training" if graph.training else "evaluation"
    return [
        f"Generated by mindformers_core from {tree.label(path)}, {graph.class_name}, for {mode} on {tree.mesh}.",
        "",
        "Straight-line code on this rank's parts of the tensors: PyNative runs it, @ms.jit compiles it. One function",
        "for each distinct (Cell class, graph, layouts): a method of the Cells that are called with its name.",
        "Inputs:" if inputs else "No tensor inputs.",
        *inputs,
    ]
