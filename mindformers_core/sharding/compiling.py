"""`@ms.jit` and sharded Cells: while MindSpore compiles a call, Python chooses the generated program of the call.

MindSpore infers types before it compiles, and calls Python for the result of an operator of ours: the name of the
method that holds the program. So the choice takes place during a compilation, and the graph has no trace of it. A
capture can't take place there (classic primitives don't run on the meta device then): `jit()` makes a missing program
after the compilation has stopped at it, and compiles again. The compilation stops at an invalid shape: for an error
raised in Python MindSpore writes a long message and a file; for this one, raised by its bindings, nothing.
"""

import os
from contextlib import contextmanager
from functools import cache, wraps
from inspect import getsourcefile, getsourcelines
from itertools import count
from pathlib import Path
from weakref import ref

import mindspore as ms

from mindformers_core.algorithms.compiled import ConstantOfPython
from mindformers_core.communication.world import process_state, world
from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.dtypes import dtype_name
from mindformers_core.operators import TensorMeta
from mindformers_core.program.structure import tree_leaves
from mindformers_core.sharding.first_inputs import compare_inputs

_NOT_A_SHAPE = {"dtype": ms.TensorType(ms.float32), "shape": ("none",), "value": None}
_NUMBERS = count()


def _state():
    """A dict. "cells": number -> (reference to a tree, path). In a `jit()` also "met": (reference to a tree, program)s
    of a compilation; "missing": a call that it stopped at; "refused": whether it met an error."""
    return process_state().memo(__name__)


def register_cell(tree, path):
    """The number by which a compiled call names the Cell at `path` of a sharded tree."""
    number = next(_NUMBERS)
    _state().setdefault("cells", {})[number] = ref(tree), path
    return number


def _cell(number):
    tree, path = _state()["cells"][number]
    return tree(), path


class _ChooseProgram(ConstantOfPython):
    """The name of the method that runs a call of the Cell with this number."""

    def __init__(self):
        super().__init__()
        self.add_prim_attr("forbid_reuse_result", True)

    def __call__(self, number, args, kwargs):
        tree, path = _cell(number)
        if path in tree.eager:
            return "run_eagerly"
        return tree.running or tree.program(path, args, kwargs).name

    def __infer__(self, number, args, kwargs):
        """While a graph is compiled: a program that exists; without one `jit()` stops the compilation here."""
        tree, path = _cell(number["value"])
        if path in tree.eager:
            _state()["refused"] = True
            raise RuntimeError(_eager_error(tree, path))
        args, kwargs = (_structure(given["value"], given["shape"], given["dtype"]) for given in (args, kwargs))
        if not tree.storage.is_open:
            raise ValueError(
                f"{tree.label('')} is under hsdp(), whose weights are gathered around calls, not in a graph: compile "
                "steps with mindformers_core.zero.value_and_grad(cell, compiled=True), and call the Cell itself to "
                "evaluate"
            )
        tree.activations.check_compiling()
        with tree.for_compiled():
            program = tree.known_program(path, args, kwargs)
        if _state().get("met") is not None:
            _state()["met"].append((ref(tree), program))
        elif program is None:
            raise RuntimeError(_missing_program(tree, path, args, kwargs))
        if program is None:
            _state()["missing"] = tree, path, args, kwargs
            return _NOT_A_SHAPE
        if program.source.kept:
            _state()["refused"] = True
            raise RuntimeError(kept_error(*program.source.kept[0], "the function is compiled (PyNative would keep it)"))
        return {"dtype": None, "shape": None, "value": program.name}


choose_program = _ChooseProgram()


def _eager_error(tree, path):
    """The error message for a Cell that runs eagerly, in a graph."""
    construct = tree.classes[path].construct
    return (
        f"{tree.label(path)} runs operator by operator (eager), which @ms.jit can't compile: its construct is in "
        f"{getsourcefile(construct)}:{getsourcelines(construct)[1]}. Run the step in PyNative (recipe: "
        "context.mode: 1), or restructure construct so that it needs no tensor's values, and don't mark it eager"
    )


def kept_error(plan, kept, why):
    """The error message for a Cell that keeps tensors in attributes, where they would have no gradient."""
    return (
        f"{plan.graph.label} keeps a tensor in its attribute '{kept.name}', at {kept.source}, and {why}, so that it "
        "would have no gradient: return the tensor"
    )


def _missing_program(tree, path, args, kwargs):
    """The error message for a call in a graph that has no program."""
    shown = map(str, tree_leaves((args, kwargs), TensorMeta))
    before = "prepare(cell, *inputs), or a call with such inputs in PyNative"
    if tree.activations.is_active:
        before = "prepare(cell, *inputs, compiled=True)"
    return (
        f"{tree.label(path)} is sharded and has no program yet for inputs ({', '.join(shown)}), this rank's parts; it "
        f"has {len(tree.programs)} for others. Compile with mindformers_core.jit in the place of mindspore.jit, which "
        f"makes it, or make it before: {before}"
    )


def _structure(value, shape, dtype):
    """A value that MindSpore infers, with its shape and dtype: of dicts, these are lists in the order of the keys."""
    if isinstance(value, dict):
        return {key: _structure(*entry) for key, *entry in zip(value, value.values(), shape, dtype)}
    if isinstance(dtype, (tuple, list)):
        values = [None] * len(dtype) if value is None else value
        return type(dtype)(map(_structure, values, shape, dtype))
    if isinstance(dtype, ms.TensorType):
        return TensorMeta(tuple(shape), dtype_name(dtype.element_type()), None, False)
    if value is not None or dtype is None:
        return value
    raise TypeError(
        f"a sharded Cell got an argument of type {dtype} whose value isn't known when it is compiled (mutable()?): "
        "pass a constant, which is compiled in, or a tensor"
    )


def jit(function=None, **options):
    """`mindspore.jit` for functions that call sharded Cells: signatures that are new are captured, then compiled.

    Plain `mindspore.jit` compiles such calls, too, once the Cell has been called with these shapes in PyNative, or
    `prepare(cell, *inputs)` (under `recompute()` with `compiled=True`) has made the program; without one it raises an
    error. Inside a compiled function the inputs of the sharded Cell, its results, and gradients are plain tensors:
    this rank's parts.

    Args:
        function: a function or a Cell; None to use this as a decorator with options.
        options: of `mindspore.jit`. Its `capture_mode` has to be the default, `"ast"`: the others ignore or miscompute
            the gradients of collectives.

    Raises:
        ValueError: another `capture_mode`. TypeError: the compiled function gets a `DTensor`.
    """
    if options.get("capture_mode", "ast") != "ast":
        raise ValueError(f"jit(capture_mode={options['capture_mode']!r}): only 'ast' keeps the collectives' gradients")
    if function is None:
        return lambda function: jit(function, **options)
    known = []  # (compiled function, list of what holds for it: (reference to a tree, its state, program))

    def holds(tree, state, program):
        return tree() is None or tree().state() == state and program.state.changed() is None

    @wraps(function if not isinstance(function, ms.nn.Cell) else function.construct)
    def run(*args, **kwargs):
        for tensor in tree_leaves((args, kwargs), DTensor):
            raise TypeError(
                f"a function compiled by jit() works on local tensors, and got a DTensor of shape {tensor.shape} that "
                f"lives as {tensor.layout}: pass x.to_local(), in the layout that the Cell declares for its input"
            )
        made, outer = [], _state().get("met")
        fresh = cache(lambda: (ms.jit(function, **options), []))  # one for all attempts of this call
        while True:
            _state()["met"] = []
            entry = next((entry for entry in known if all(holds(*each) for each in entry[1])), None)
            compiled, conditions = entry or fresh()
            try:
                with _recorded(function, is_first=entry is None):
                    result = compiled(*args, **kwargs)
            except Exception:
                missing = _state().pop("missing", None)
                if _state().pop("refused", False):
                    _remove_dump()
                if missing is None:
                    raise
            else:
                conditions += [(tree, tree().state(), program) for tree, program in dict.fromkeys(_state()["met"])]
                known.extend([(compiled, conditions)] * (entry is None))
                _replay_writes([(tree(), program) for tree, _, program in conditions if tree() is not None])
                return result
            finally:
                _state()["met"] = outer
            made.append(_make_program(*missing, made))
            _compare_inputs(*missing[:2], args, kwargs)

    return run


def _replay_writes(programs):
    """Set the attributes that a call leaves; `programs`: pairs (tree, program) of a compiled function that has run."""
    leaving = [program.state.writes[0] for _, program in programs if program.state.writes]
    if len(leaving) > 1:
        cell, name, _ = leaving[0]
        raise ValueError(
            f"construct sets attribute '{name}' of a {type(cell).__name__}, and the compiled function has several "
            "programs, for inputs of several shapes, of which it isn't known which one has run: return the value, or "
            "run in PyNative"
        )
    for tree, program in programs:
        tree.finish_run(program)


@contextmanager
def _recorded(function, is_first):
    """Within, the report of a hang names the compiled function; an error of its collectives is the report."""
    watch = process_state().watch
    if watch is None:
        yield
        return
    code = getattr(getattr(function, "construct", function), "__code__", None)
    where = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""
    name = getattr(function, "__qualname__", type(function).__name__)
    with watch.recorder.waiting("compiling" if is_first else "compiled", place=f"{name}{where}"):
        try:
            yield
        except RuntimeError as error:
            if "Launch kernel failed" in str(error) and "AllReduce" in str(error):
                raise RuntimeError(f"a collective of a compiled function has failed\n{watch.report()}") from None
            raise


def _make_program(tree, path, args, kwargs, made):
    """Make the program at which a compilation stopped; returns tree and key. An error if it is among `made`."""
    with tree.for_compiled():
        key = tree, tree.key(path, args, kwargs)
        if key in made:
            raise RuntimeError(_missing_program(tree, path, args, kwargs)) from None
        tree.program(path, args, kwargs)
    return key


def _compare_inputs(tree, path, args, kwargs):
    """Compare the arguments of a compiled function, the source of the root's inputs, among the ranks."""
    (*_, program) = tree.programs.values()
    if not tree.check_inputs or path != "" or not program.communicates:
        return
    layouts = [program.plan.layouts[value.id] for value in program.inputs]
    shards = {axis: layout.placement(axis) for layout in layouts for dim in layout.axes for axis in dim}
    tensors = [leaf for leaf in tree_leaves((args, kwargs), ms.Tensor) if type(leaf) is ms.Tensor]
    inputs = [(f"argument {place}", tensor) for place, tensor in enumerate(tensors)]
    compare_inputs(tree.label(""), tree.mesh, inputs, [shards] * len(inputs))


def _remove_dump():
    """Remove the dump that MindSpore writes when a compilation fails, and the folders created for it."""
    folder = Path(os.environ.get("MS_OM_PATH") or ".") / f"rank_{world().rank}" / "om"
    (folder / "analyze_fail.ir").unlink(missing_ok=True)
    for left in (folder, folder.parent):
        if left.is_dir() and not any(left.iterdir()):
            left.rmdir()
