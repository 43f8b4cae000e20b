"""The programs of a sharded tree: for every signature one captured, propagated and generated module."""

from dataclasses import dataclass, field
from functools import cached_property, partial

from mindspore import Tensor

from mindformers_core.capture.python_state import PythonState
from mindformers_core.communication.world import process_state
from mindformers_core.dtensor.dtensor import wrap
from mindformers_core.generation.load import load_module
from mindformers_core.generation.module_source import ModuleOptions, write_module
from mindformers_core.grouping import grouped
from mindformers_core.mindspore_private import recompute_cell_of
from mindformers_core.operators import tensor_meta
from mindformers_core.program.plan import joined_path, walk_graphs
from mindformers_core.program.structure import tree_fill, tree_leaves
from mindformers_core.sharding.collective_places import collective_places
from mindformers_core.sharding.compiling import kept_error
from mindformers_core.sharding.plan_passes import GENERATED, below, planned_call, run_passes
from mindformers_core.sharding.sharded_cells import tree_and_path


@dataclass(frozen=True, eq=False)
class Program:
    """The generated program of one signature.

    Attributes:
        name: the method of the called Cell that runs it.
        path: of the called Cell.
        signature: its key, see `describe`.
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


def make_program(tree, path, args, kwargs, signature, saved_plan=None):
    """Capture, propagate, generate and load the program of one call.

    Args:
        tree: the `ShardedTree`.
        path: the Cell that is called.
        args, kwargs: its arguments; tensors, or `TensorMeta`s of local shapes.
        signature: the key of the program in the tree.
        saved_plan: see `prepare`.
    """
    instrumentation = process_state().instrumentation
    graph, plan, state = instrumentation.planned(tree, path, lambda: planned_call(tree, path, args, kwargs, saved_plan))
    generated = run_passes(GENERATED, tree, path, plan)
    separate_collectives = generated is not plan or tree.activations.is_active and tree.compiling is not None
    header, taken = _header(tree, path, graph, plan), frozenset(tree.function_names)
    options = ModuleOptions(header, taken, tree.deferring, separate_collectives, process_state().observer.instruments)
    classes = below(path, tree.classes)
    key = generated, tuple(classes.items()), options
    generate = partial(write_module, generated, classes, options)
    if tree.kept and not options.is_observed:
        facts = {**vars(options), "taken": sorted(taken)}, tree.compiling, classes
        generate = partial(tree.kept.source, graph, generated, facts, generate)
    source = instrumentation.generated(key, generate)
    tree.function_names.update(source.functions.values())
    name = source.functions[generated]
    module = load_module(name, source)
    module.keep_attribute = partial(_keep, path, source.kept)
    _check_kept(tree, path, source.kept)
    functions = {function: getattr(module, function) for function in source.functions.values()}
    results = tuple(tensor_meta(value.shape, value.dtype, layout, False) for value, layout in plan.returned)
    made = plan, generated, graph, module.__file__, source, functions, results, state
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
        again = [tree.label(at) for at, cell in around if recompute_cell_of(cell)]
        if again or tree.compiling:
            why = f"{again[0]} is recomputed" if again else "the Cells of this step are compiled one by one"
            raise ValueError(kept_error(plan, kept, why))


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
