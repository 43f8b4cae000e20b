"""The programs of a sharded tree: for every signature one captured, propagated and generated module."""

import logging
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial

import numpy as np
from mindspore import Tensor
from mindspore._c_expression import typing

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.capture.capture import capture_with_state
from mindformers_core.capture.python_state import PythonState
from mindformers_core.communication.world import process_state
from mindformers_core.dtensor.dtensor import DTensor, wrap
from mindformers_core.dtypes import dtype_name
from mindformers_core.generation.load import load_module
from mindformers_core.generation.module_source import ModuleOptions, write_module
from mindformers_core.grouping import grouped
from mindformers_core.operators import TensorMeta, tensor_meta
from mindformers_core.program.partition import calls_of, partition
from mindformers_core.program.plan import joined_path, walk_graphs
from mindformers_core.program.structure import call_signature, tree_fill, tree_leaves, tree_map
from mindformers_core.propagation.checking import check_plan
from mindformers_core.propagation.propagate import propagate
from mindformers_core.propagation.saved import load_plan
from mindformers_core.scopes import errors_at
from mindformers_core.sharding.collective_places import collective_places
from mindformers_core.sharding.compiling import kept_error
from mindformers_core.sharding.sharded_cells import tree_and_path

_LOG = logging.getLogger("mindformers_core")


@dataclass(frozen=True, eq=False)
class Program:
    """The generated program of one signature.

    Attributes:
        name: the method of the called Cell that runs it.
        path: of the called Cell.
        signature: its key, see `describe`.
        plan: its `CellPlan`.
        generated: the `CellPlan` of the generated module: `plan`, or its partition where parts are compiled alone.
        graph: the captured `CellGraph`.
        file: the generated module.
        source: the `ModuleSource`.
        functions: name -> function, of the whole module.
        results: a `TensorMeta` for every tensor that it returns.
        state: the `PythonState` that it depends on.
    """

    name: str
    path: str
    signature: tuple
    plan: object
    generated: object
    graph: object
    file: str
    source: object = field(repr=False)
    functions: dict = field(repr=False)
    results: tuple = field(repr=False)
    state: PythonState = field(repr=False)

    @property
    def communicates(self):
        """Whether it has collectives, forward or backward."""
        entries = [entry for _, plan in self.plan.walk() for entry in plan.instructions]
        return any(getattr(entry, "steps", ()) or getattr(entry, "algorithm", None) for entry in entries)

    @property
    def inputs(self):
        """The `Value`s of its arguments, with their global shapes."""
        return tree_leaves(self.graph.arguments)

    def calls(self):
        """`(Cell path, CellPlan, CellGraph)` of every call of a generated function; calls that share a plan have a
        graph each."""
        calls = walk_graphs(self.generated, self.graph)
        return [(joined_path(self.path, graph.path), plan, graph) for plan, graph in calls]

    @cached_property
    def calls_by_plan(self):
        """(Cell path, CellPlan) -> the `CellGraph`s of the calls, in order."""
        return grouped(((path, plan), graph) for path, plan, graph in self.calls())

    def wrapped(self, result):
        """The local result as a structure of DTensors."""
        if type(result) is Tensor and len(self.results) == 1:
            return wrap(result, self.results[0])
        return tree_fill(self.graph.result, map(wrap, tree_leaves(result, Tensor), self.results))


def describe(leaf):
    """The key of a leaf of the arguments: of a tensor its local shape, dtype and, of a DTensor, its layout."""
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


def make_program(tree, path, args, kwargs, signature, saved_plan=None):
    """Capture, propagate, generate and load the program of one call.

    Args:
        tree: the `ShardedTree`.
        path: the Cell that is called.
        args, kwargs: its arguments; tensors, or `TensorMeta`s of local shapes.
        signature: the key of the program in the tree.
        saved_plan: see `prepare`.
    """
    observer, states = process_state().observer, [PythonState()]
    graph, plan = observer.planned(tree, path, lambda: annotated_plan(tree, path, args, kwargs, saved_plan, states))
    generated = partition(plan, *(calls_of(plan, path, cells) for cells in tree.compiling)) if tree.compiling else plan
    if generated is not plan:
        check_plan(generated)
    separate_collectives = generated is not plan or tree.activations.is_active and tree.compiling is not None
    header, taken = _header(tree, path, graph, plan), frozenset(tree.function_names)
    options = ModuleOptions(header, taken, tree.deferring, separate_collectives, observer.instruments)
    classes = _below(path, tree.classes)
    key = generated, tuple(classes.items()), options
    source = observer.generated(key, lambda: write_module(generated, classes, options))
    tree.function_names.update(source.functions.values())
    name = source.functions[generated]
    module = load_module(name, source)
    module.keep_attribute = partial(_keep, path, source.kept)
    _check_kept(tree, path, source.kept)
    functions = {function: getattr(module, function) for function in source.functions.values()}
    values = tree_leaves(graph.result)
    results = tuple(tensor_meta(v.shape, v.dtype, layout, False) for v, layout in zip(values, plan.results))
    made = plan, generated, graph, module.__file__, source, functions, results, states[-1]
    program = Program(name, path, signature, *made)
    if process_state().watch is not None:
        places = {id(cell): inner for inner, cell in tree.cells.items()}
        process_state().watch.recorder.sources[module.__file__] = collective_places(program, places)
    return program


def _keep(path, entries, cell, number, local):
    """Set an attribute to tensors that a function, of this Cell, has computed, made as final as results."""
    plan, kept = entries[number]
    tree, own = tree_and_path(cell)
    where = (path, kept.path) if kept.local is None else (own, kept.local.strip("."))

    def distributed(value, tensor):
        layout = plan.layouts[value.id]
        made = wrap(tensor, tensor_meta(value.shape, value.dtype, layout, False))
        return made.redistribute(layout.contiguous.replace(partial=(), varying=()))

    tensors = map(distributed, tree_leaves(kept.value), tree_leaves(local, Tensor))
    setattr(tree.cells[joined_path(*where)], kept.name, tree_fill(kept.value, tensors))


def _check_kept(tree, path, entries):
    """Raise `ValueError` for tensors in attributes that would have no gradient."""
    for plan, kept in entries:
        inner = joined_path(path, plan.graph.path)
        around = [(at, cell) for at, cell in tree.cells.items() if at in ("", inner) or inner.startswith(f"{at}.")]
        again = [tree.label(at) for at, cell in around if cell._recompute_cell]
        if again or tree.compiling:
            why = f"{again[0]} is recomputed" if again else "the Cells of this step are compiled one by one"
            raise ValueError(kept_error(plan, kept, why))


def annotated_plan(tree, path, args, kwargs, saved_plan=None, states=None):
    """As `plan_call`; the plan has the keepers of the tree's `ActivationPolicy`, or of a `saved_plan` in memory."""
    graph, plan = plan_call(tree, path, args, kwargs, saved_plan, states)
    return graph, plan if callable(saved_plan) else tree.activations.annotate(path, plan, tree.compiling)


def plan_call(tree, path, args, kwargs, saved_plan=None, states=None):
    """Capture and propagate one call; arguments as of `make_program`. `states`: a list that gets the `PythonState`.

    Returns:
        `(CellGraph, CellPlan)`; the tree's `ActivationPolicy` is not applied.
    """
    bound, arriving = bind_arguments(tree, path, args, kwargs)
    tree.follow_cells()
    try:
        with tree.as_written():
            graph, state = capture_with_state(tree.cells[path], bound.args[1:], bound.kwargs)
    except ValueError as error:
        undeclared = _undeclared(arriving, tree.boundaries[path])
        if not undeclared:
            raise
        raise ValueError(f"{str(error).rstrip('.')}; {tree.label(path)} was called with {undeclared}") from error
    if states is not None:
        states.append(state)
    values = tree_leaves(graph.arguments)
    layouts = {value.id: layout for value, (_, _, layout) in zip(values, arriving, strict=True)}
    declarations, parameters = _below(path, tree.declarations), _below(path, tree.parameter_layouts)
    if callable(saved_plan):
        plan = saved_plan(graph)
    elif saved_plan is not None:
        plan = load_plan(saved_plan, graph, tree.mesh, layouts, parameters, declarations, final=path == "")
    else:
        model = tree.device_model
        plan = propagate(graph, tree.mesh, layouts, parameters, declarations, model, path == "", algorithm_of)
    check_plan(plan, final=path == "")
    if not tree.programs:
        _warn_of_undivided(tree, path, plan)
    return graph, plan


def _warn_of_undivided(tree, path, plan):
    """Warn, once for equal Cells, where tensors are gathered since their sizes don't divide."""
    cells = {}
    for inner, each in plan.walk():
        for why in {move.reason for move in each.redistributions if move.reason.undivided}:
            cells.setdefault(why, []).append(tree.label(joined_path(path, inner)))
    for why, labels in cells.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        _LOG.warning("%s%s gathers what is sharded for %s; explain() shows where", labels[0], more, why)


def _below(path, entries):
    """The entries of a dict by Cell path at or below `path`, by their paths from there."""
    if not path:
        return entries
    inner = {name.removeprefix(f"{path}."): entry for name, entry in entries.items() if name.startswith(f"{path}.")}
    return inner | ({"": entries[path]} if path in entries else {})


def bind_arguments(tree, path, args, kwargs):
    """Bind the arguments of a call from outside to the parameters of `construct`.

    Returns:
        `(BoundArguments with a TensorMeta of the global shape for every tensor, list of (name of the argument, tensor,
        Layout in which it arrives))`.
    """
    with errors_at(f"{tree.label(path)}, construct(): "):
        bound = call_signature(tree.classes[path].construct).bind(tree.cells[path], *args, **kwargs)
    boundary, arriving = tree.boundaries[path], []

    def enter(leaf, name):
        if not isinstance(leaf, (Tensor, TensorMeta)):
            return leaf
        shape, dtype, layout = describe(leaf)
        layout = boundary.arriving_layout(name, len(shape)) if layout is None else layout
        if layout.mesh != tree.mesh:
            raise ValueError(
                f"input '{name}' of {boundary.label} lives as {layout!r}, which is on another mesh than the Cell's, "
                f"{tree.mesh!r}"
            )
        arriving.append((name, leaf, layout))
        return TensorMeta(layout.global_shape(shape), dtype, None, False)

    for name, value in list(bound.arguments.items())[1:]:
        bound.arguments[name] = tree_map(lambda leaf, name=name: enter(leaf, name), value)
    return bound, arriving


def _undeclared(arriving, boundary):
    """The first sharded input and the first undeclared one, as text: together a frequent reason for shape errors."""
    shapes = [(name, describe(leaf)[0], layout) for name, leaf, layout in arriving]
    sharded = [(name, shape, layout) for name, shape, layout in shapes if any(layout.dims)]
    declared = boundary.inputs if boundary.takes_parts else ()
    undeclared = [(name, shape) for name, shape, at in shapes if name not in declared and shape and at.is_replicated]
    if not sharded or not undeclared:
        return ""
    (name, local, layout), (other, shape) = sharded[0], undeclared[0]
    return (
        f"'{name}' {local}, which is {layout.global_shape(local)} in all, {layout}, but with '{other}' {shape} of no "
        "declared layout, which is taken as whole: declare that, too, if each rank gives its part"
    )


def _header(tree, path, graph, plan):
    """The docstring of a generated module."""
    inputs = [
        f"    {value.hint}: {value.described.partition(' ')[2]} as {plan.layouts[value.id]}"
        for value in tree_leaves(graph.arguments)
    ]
    mode = "training" if graph.training else "evaluation"
    return (
        f"Generated by mindformers_core from {tree.label(path)}, {graph.class_name}, for {mode} on {tree.mesh}.",
        "",
        "Straight-line code on this rank's parts of the tensors: PyNative runs it, @ms.jit compiles it. One function",
        "for each distinct (Cell class, graph, layouts): a method of the Cells that are called with its name.",
        "Inputs:" if inputs else "No tensor inputs.",
        *inputs,
    )
