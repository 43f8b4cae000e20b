"""`capture()`: run a Cell tree once on shapes alone, and record its operators as a graph.

The tree runs unchanged, in Python, with traced tensors in the place of inputs, parameters and constants. Every operator
on a traced tensor reaches the recorder (by MindSpore's `__fallback__`, or by its dispatch mode for the operators that
ignore `__fallback__`), which runs it on the meta device. The user's code itself runs on the real device, so that plain
tensors made by it have values: they are the graph's constants.
"""

import inspect
import sys
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import MappingProxyType

import mindspore as ms
from mindspore import Parameter, Tensor, dtype as mstype, nn, ops
from mindspore.ops import functional_overload
from mindspore.utils import MsDispatchMode

from mindformers_core import mindspore_private as private
from mindformers_core.capture.open_call import computed_in
from mindformers_core.capture.python_state import CURES, attributes_of_any_cell
from mindformers_core.capture.recording import Recorder
from mindformers_core.capture.shape_functions import ON_PLAIN_TENSORS, by_numpy, creating_functions
from mindformers_core.capture.traced import CaptureError, Traced, call_site
from mindformers_core.dtensor.interception import PlainTensorFallback, draws_by_position, refused, set_item_of
from mindformers_core.lowering.aliases import adoptions
from mindformers_core.lowering.in_place import DRAWS_IN_PLACE, is_in_place
from mindformers_core.lowering.indexing import index_tensor
from mindformers_core.operators.registry import facts_of
from mindformers_core.operators.rules.matmul import einsum_names
from mindformers_core.program.graph import cell_label
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.scopes import replaced


def _einsum(equation, operands):
    """What `mint.einsum` is, which is for one kind of device only; of the classic one, a number has a dim."""
    result = ops.einsum(equation, *operands)
    _, names = einsum_names(equation, [operand.ndim for operand in operands])
    return result if names else result.reshape(())


_UNREAD = attributes_of_any_cell() | {*dir(nn.Cell)}  # attributes that are MindSpore's, or methods
_CAPTURES = 3  # of a call whose construct changes what it reads, until nothing changes any more

# Entry points of `@ms.jit` in each of its modes, ast, trace and bytecode; and functions that run the call as Python
_WITHOUT_COMPILING = (
    (private.JitExecutor, "__call__", lambda executor, *args, **kwargs: executor.fn(*args, **kwargs)),
    (*private.TRACE_BEGIN, lambda *args, **kwargs: True),
    (*private.TRACE_END, lambda result, **kwargs: result),
    (private.PIJitCaptureContext, "__enter__", lambda context: context),
    (private.PIJitCaptureContext, "__exit__", lambda *raised: None),
    (functional_overload, "einsum", _einsum),
    (private.PyNativeExecutor, "grad", refused),  # of `ms.vjp`
    *((kind, "__call__", refused) for kind in (ops.GradOperation, *private.DIFFERENTIATING)),
)
_WIDTHS = private.MixedPrecisionType.FP16, private.MixedPrecisionType.FP32, private.MixedPrecisionType.BF16
_CASTS = dict(zip(_WIDTHS, (mstype.float16, mstype.float32, mstype.bfloat16)))


def capture(cell, *inputs, **named_inputs):
    """The graph of `cell(*inputs, **named_inputs)`, without computing anything.

    Works on any machine, for any size, and for operators without a kernel. The tree, its parameters and the state of
    the random generators are restored. Operators among plain tensors that `construct` makes are run. Hooks of Cells are
    not run: they belong to the call of a Cell, not to its computation.

    Args:
        cell: a Cell that isn't sharded, built in any way, also under `ms.DeviceCtx("meta")`.
        inputs, named_inputs: arguments of `construct`. Of tensors only shapes and dtypes matter (the global ones): a
            `TensorMeta` will do.

    Returns:
        The `CellGraph` of the root, with those of the other Cells in its `CallNode`s.

    Raises:
        TypeError: `cell` is no Cell. ValueError: it is sharded already.
        CaptureError: something needs a tensor's values, changes a tensor in place, uses a parameter that isn't in the
            tree, or doesn't fit; a ValueError that names the Cell's path and class, and the line.
    """
    return capture_with_state(cell, inputs, named_inputs)[0]


def capture_with_state(cell, inputs, named_inputs):
    """`(CellGraph, PythonState)` of a call; see `capture`."""
    for _ in range(_CAPTURES):
        recorder, state = _captured(cell, inputs, named_inputs)
        changed = state.changed()
        if changed is None:  # else a cache was filled, which the next capture reads
            return recorder.root, state
    read, then, now = changed
    raise CaptureError(
        f"in {cell_label(recorder.tree.path(read.cell), read.cell)}, {read.source}: construct changes {read.what} at "
        f"every call, from {then!r} to {now!r}, and reads it, but a program has it written in: {CURES}"
    )


def _captured(cell, inputs, named_inputs):
    """The `Recorder` of a call, and the `PythonState`."""
    if not isinstance(cell, nn.Cell):
        raise TypeError(f"capture() takes a Cell, an instance of a subclass of nn.Cell, not {cell!r}")
    if any("_sharding" in child.__dict__ for _, child in cell.cells_and_names()):
        raise ValueError(f"{cell_label('', cell)} is sharded already: capture() takes the single-card model")
    recorder = Recorder(CapturedTree(cell))
    with ExitStack() as scope:
        scope.enter_context(draws_by_position(False))  # which puts into MindSpore what is replaced here
        # Not by `MS_JIT=0`: a process that another thread starts meanwhile would inherit it, and never compile.
        drawing = *private.DRAW, lambda step: recorder.random_state()
        for owner, name, function in (*_WITHOUT_COMPILING, *creating_functions(), drawing):
            scope.enter_context(replaced(owner, **{name: function}))
        mode = ms.get_context("mode")
        if mode != ms.PYNATIVE_MODE:
            ms.set_context(mode=ms.PYNATIVE_MODE)
            scope.callback(ms.set_context, mode=mode)
        scope.enter_context(private.outside_of_meta())
        scope.callback(ms.set_rng_state, ms.get_rng_state())
        scope.enter_context(private.no_grad())
        scope.enter_context(adoptions())
        scope.enter_context(recorder.tree.traced(recorder))
        set_item = set_item_of(Traced, lambda tensor, _: recorder.adopt(tensor))
        tensor_methods = {
            "__fallback__": PlainTensorFallback(recorder.operator),
            "__getitem__": _get_item(recorder),
            "__setitem__": _counted(recorder, set_item),
            "assign_value": _counted(recorder, Tensor.assign_value),
        }
        scope.enter_context(replaced(Tensor, **tensor_methods))
        scope.enter_context(_Dispatched(recorder))
        args, named = tree_map(recorder.input, (inputs, named_inputs))
        profiler = sys.getprofile()  # that of cProfile is no function
        scope.callback(getattr(profiler, "enable", partial(sys.setprofile, profiler)))
        cell(*args, **named)
        sys.setprofile(None)
        recorder.tree.check_copies(recorder)
        plain = partial(recorder.values_of, what="an attribute")
        asked = recorder.reads.asked.items()
        written = [(cell, name, vars(cell).get(name)) for (_, name), cell in asked if cell is not None]
        writes = [(*where, tree_map(plain, value)) for *where, value in written if not computed_in(value)]
        state = recorder.reads.finish(writes)
    return recorder, state


class CapturedTree:
    """The names of the Cells and Parameters of a tree, and the swap of its tensors and classes for traced ones.

    Attributes:
        before: id of a Cell -> the attributes that it has outside of the capture.
    """

    def __init__(self, root):
        cells = dict(root.cells_and_names())
        self._cells = {id(cell): (cell, path, type(cell)) for path, cell in cells.items()}
        self._parameters = {id(parameter): path for path, parameter in root.parameters_and_names()}
        self._local_paths = {id(cell): _paths_from(cell) for cell in cells.values()}
        self._stand_ins, self._copies, self.before = {}, [], {}

    def cast_of(self, cell):
        """The dtype that operators in a Cell cast floats to, by `Cell.to_float`; None: as around it."""
        return _CASTS.get(self.before[id(cell)]["mixed_precision_type"])

    def path(self, cell):
        """Path of a Cell from the root."""
        return self._cells[id(cell)][1]

    def kind(self, cell):
        """The class of a Cell, before it was swapped."""
        return self._cells[id(cell)][2]

    def label(self, cell):
        """The name of a Cell in error messages."""
        return cell_label(self.path(cell), cell)

    def local_path(self, cell, part):
        """Path of a Cell or Parameter from `cell`, or None where it isn't below `cell`."""
        return self._local_paths[id(cell)].get(id(part))

    @contextmanager
    def traced(self, recorder):
        """While open, parameters and tensors that Cells keep are traced ones, and calls of Cells go to the recorder."""
        before = [(cell, kind, dict(cell.__dict__)) for cell, _, kind in self._cells.values()]
        self.before = {id(cell): attributes for cell, _, attributes in before}
        try:
            for cell, kind, attributes in before:
                for name, value in attributes.items():
                    cell.__dict__[name] = self._trace(value, self.path(cell), name, recorder)
                # neither initialised nor recorded for a gradient when it is called; the recorder casts for `to_float`
                vars(cell).update(private.BUILT, _recorder=recorder, mixed_precision_type=None, requires_grad=False)
                cell.__class__ = _captured_class(kind)
            for cell, kind, attributes in before:
                if attributes[private.CELLS] or hasattr(kind, "__len__"):
                    recorder.reads.cells(cell, inspect.unwrap(kind.construct).__code__)
            yield
        finally:
            for cell, kind, attributes in before:
                cell.__class__ = kind
                cell.__dict__.clear()
                cell.__dict__.update(attributes)

    def check_copies(self, recorder):
        """Raise an error where `construct` has changed a list or dict with tensors, of which there is a copy now."""
        for home, copy, contents in self._copies:
            if list(copy) != contents:
                raise recorder.error(f"construct changes self.{home}, which has tensors, in place: {CURES}")

    def _trace(self, value, path, name, recorder):
        """An attribute's value with stand-ins for the tensors in it; itself where there are none."""
        if isinstance(value, Tensor):
            if id(value) not in self._stand_ins:
                found = f"{path}.{name}" if path else name
                found = self._parameters.get(id(value)) if isinstance(value, Parameter) else found
                self._stand_ins[id(value)] = recorder.hold(value, found)
            return self._stand_ins[id(value)]
        if type(value) in (dict, OrderedDict):
            keys, entries = list(value), list(value.values())
        elif isinstance(value, (tuple, list)):
            keys, entries = range(len(value)), value
        else:
            return value
        is_table = name in private.PARAMETER_TABLES  # its keys are names of attributes
        names = [key if is_table else f"{name}.{key}" for key in keys]
        traced = [self._trace(entry, path, inner, recorder) for entry, inner in zip(entries, names)]
        if all(entry is other for entry, other in zip(traced, entries)):
            return value
        copy = type(value)(zip(keys, traced)) if isinstance(value, dict) else traced
        if not is_table and type(value) is not tuple:
            self._copies.append((name, copy, list(copy)))
        return tuple(copy) if isinstance(value, tuple) else copy


def _paths_from(cell):
    """Identity of every Cell and Parameter below `cell` -> its path from there; none of a name that has dots itself."""
    parts = *cell.parameters_and_names(), *cell.cells_and_names()
    named = [private.parameters_of(child).items() for _, child in cell.cells_and_names()]
    dotted = {id(parameter) for items in named for name, parameter in items if "." in name}
    return {id(part): path for path, part in parts if path and id(part) not in dotted}


class _CapturedCell:
    """Mixed into the class of every Cell of a tree while it is captured."""

    # a hook would run once more when the captured Cell is called
    _forward_pre_hook = _forward_hook = _backward_pre_hook = _backward_hook = MappingProxyType({})

    def __getattribute__(self, name):
        if name not in _UNREAD:
            recorder = object.__getattribute__(self, "__dict__")["_recorder"]
            if (id(self), name) not in recorder.reads.asked and recorder.open_calls:
                recorder.reads.attribute(self, name, recorder.tree.before[id(self)])
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        """As MindSpore's: `self.steps += 1` writes a Parameter."""
        held = private.parameters_of(self).get(name)
        if type(held) is not Traced or not isinstance(value, Tensor):
            super().__setattr__(name, value)
            if name not in _UNREAD:
                recorder = self.__dict__["_recorder"]
                recorder.reads.asked[id(self), name] = self  # what is read later is of this call
                recorder.open_calls[-1].set_attributes[id(self), name] = self, value, call_site()[0]
        elif value is not held:
            held.overwrite(value)

    def construct(self, *args, **kwargs):
        return self.__dict__["_recorder"].call(self, super().construct, args, kwargs)


@cache
def _captured_class(cls):
    return type(cls.__name__, (_CapturedCell, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


class _Dispatched(MsDispatchMode):
    """Records operators that ignore `__fallback__`, and random draws among plain tensors."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __ms_dispatch__(self, func, args, kwargs=None):
        recorder, kwargs = self.recorder, kwargs or {}
        if recorder.inferring:
            return func(*args, **kwargs)
        recorder.plain_writes += is_in_place(func.name)
        if facts_of(func.name).draws or func.name in DRAWS_IN_PLACE or tree_leaves(args, Traced):
            return recorder.operator(func, args, kwargs)
        recorder.check_plain(tree_leaves((args, kwargs), Tensor))
        if func.name in ON_PLAIN_TENSORS and ms.get_context("device_target") == "CPU":
            return by_numpy(func.name, args)
        return func(*args, **kwargs)


def _get_item(recorder):
    """`Tensor.__getitem__` that records `plain[traced]`."""
    get_item = Tensor.__getitem__

    def item(tensor, index):
        traced = tree_leaves(index, Traced)
        return index_tensor(recorder.stand_in(tensor), index) if traced else get_item(tensor, index)

    return item


def _counted(recorder, method):
    """A method that changes a plain tensor, and tells the recorder of the write."""

    def write(tensor, *args):
        recorder.plain_writes += 1
        return method(tensor, *args)

    return write
