"""`capture()`: run a Cell tree once on shapes alone, and get the graph of what it does.

The tree runs as it is, in Python, with traced tensors in the place of inputs, parameters and constants. Every
operator that meets one comes to the recorder (by MindSpore's `__fallback__`, or by its dispatch mode for the few that
don't ask), which runs it on the meta device. The user's code itself runs on the real device, so that plain tensors that
it makes have values: they are the graph's constants.
"""

import inspect
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from functools import cache
from types import MappingProxyType

import mindspore as ms
from mindspore import DeviceCtx, Parameter, Tensor, nn
from mindspore.common.device import _DEVICE_STACK
from mindspore.common.generator import default_generator
from mindspore.graph import jit_trace
from mindspore.graph._utils.pijit_context import PIJitCaptureContext
from mindspore.graph.api import _JitExecutor, _no_grad
from mindspore.utils import MsDispatchMode

from mindformers_core.capture.recording import Recorder
from mindformers_core.capture.traced import Traced
from mindformers_core.dtensor.indexing import index_tensor
from mindformers_core.operators import TensorMeta
from mindformers_core.program.graph import cell_label
from mindformers_core.program.structure import tree_map

__all__ = ["capture"]

# Operators that make random tensors from no tensor at all: recorded, where other plain results are constants.
_DRAWING = frozenset(
    ("UniformReal", "StandardNormal", "StandardLaplace", "UniformInt", "Randperm", "RandpermV2", "RandpermExt")
    + ("RandExt", "Randn", "RandInt", "Gamma", "Poisson")
)
_DRAWING_IN_PLACE = frozenset({"InplaceUniform", "InplaceNormal", "InplaceRandom", "InplaceExponential"})
# What functions under `@ms.jit` come to in each of its modes, ast, trace and bytecode; and what runs them as Python
_WITHOUT_COMPILING = (
    (_JitExecutor, "__call__", lambda executor, *args, **kwargs: executor.fn(*args, **kwargs)),
    (jit_trace, "_jit_trace_begin", lambda *args, **kwargs: True),
    (jit_trace, "_jit_trace_end", lambda result, **kwargs: result),
    (PIJitCaptureContext, "__enter__", lambda context: context),
    (PIJitCaptureContext, "__exit__", lambda *raised: None),
)


def capture(cell, *inputs, **named_inputs):
    """What `cell(*inputs, **named_inputs)` would do, without computing anything.

    Runs on any machine, for any size, and for operators without a kernel. The tree, its parameters and the state of the
    random generators are afterwards what they were. Operators among plain tensors that `construct` makes are run. Hooks
    of Cells are not: they belong to the call of a Cell, not to what it computes.

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
    if not isinstance(cell, nn.Cell):
        raise TypeError(f"capture() takes a Cell, an instance of a subclass of nn.Cell, not {cell!r}")
    if any("_sharding" in child.__dict__ for _, child in cell.cells_and_names()):
        raise ValueError(f"{cell_label('', cell)} is sharded already: capture() takes the single-card model")
    recorder = Recorder(_CapturedTree(cell))
    with ExitStack() as scope:
        scope.enter_context(_nothing_compiled())
        if ms.get_context("device_target") == "meta":
            scope.enter_context(DeviceCtx(_real_device()))
        scope.enter_context(_random_state())
        scope.enter_context(_no_grad())
        scope.enter_context(recorder.tree.traced(recorder))
        scope.enter_context(_tensors_hand_over_to(recorder))
        scope.enter_context(_draws_recorded_by(recorder))
        scope.enter_context(_Unasked(recorder))
        _run_root(cell, tree_map(lambda leaf: _input(recorder, leaf), (inputs, named_inputs)))
    return recorder.root


def _run_root(cell, arguments):
    args, named = arguments
    cell(*args, **named)


def _input(recorder, leaf):
    if isinstance(leaf, TensorMeta):
        return recorder.input(leaf.shape, getattr(ms, "bool_" if leaf.dtype == "bool" else leaf.dtype))
    return recorder.input(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _real_device():
    """The device target around all `DeviceCtx("meta")` blocks."""
    return next(device for device, _ in _DEVICE_STACK.get_stack() if device != "meta")


class _CapturedTree:
    """The names of a Cell tree's parts, and the swap of its tensors and classes for traced ones."""

    def __init__(self, root):
        self._cells = {id(cell): (cell, path) for path, cell in root.cells_and_names()}
        self._kinds = {key: type(cell) for key, (cell, _) in self._cells.items()}
        self._own = {key: _by_identity(cell._params) for key, (cell, _) in self._cells.items()}
        self._parameters = {id(parameter): path for path, parameter in root.parameters_and_names()}
        self._children = {key: dict(cell._cells) for key, (cell, _) in self._cells.items()}
        self._local_paths = {}
        self._stand_ins = {}

    def path(self, cell):
        """Path of a Cell from the root."""
        return self._cells[id(cell)][1]

    def kind(self, cell):
        """The class of a Cell, before it was swapped."""
        return self._kinds[id(cell)]

    def name(self, cell):
        """The last part of a Cell's path."""
        return self.path(cell).rpartition(".")[2]

    def label(self, cell):
        """How errors call a Cell."""
        return cell_label(self.path(cell), cell)

    def source(self, cell):
        """Where the class of a Cell defines `construct`."""
        code = inspect.unwrap(self.kind(cell).construct).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    @staticmethod
    def signature(construct):
        """The signature of a bound `construct`."""
        return _signature(construct.__func__) if hasattr(construct, "__func__") else inspect.signature(construct)

    def attribute(self, cell, primitive):
        """The name of a primitive among a Cell's attributes, or None."""
        name = None if primitive is None else vars(primitive).get("instance_name")
        return name if name and cell.__dict__.get(name) is primitive else None

    def local_path(self, cell, part):
        """Path of a Cell or Parameter from `cell`, or None where it isn't below it."""
        found = self._local_paths.get(id(cell))
        if found is None:
            found = self._local_paths[id(cell)] = {}
            self._collect(cell, "", found)
        return found.get(id(part))

    def _collect(self, cell, prefix, found):
        for key, name in self._own.get(id(cell), {}).items():
            found.setdefault(key, prefix + name)
        for name, child in self._children.get(id(cell), {}).items():
            if child is not None and id(child) not in found:
                found[id(child)] = prefix + name
                self._collect(child, f"{prefix}{name}.", found)

    @contextmanager
    def traced(self, recorder):
        """While open, parameters and tensors that Cells keep are traced ones, and calls of Cells go to the recorder."""
        before = [(cell, type(cell), dict(cell.__dict__)) for cell, _ in self._cells.values()]
        try:
            for cell, kind, attributes in before:
                for name, value in attributes.items():
                    cell.__dict__[name] = self._trace(value, self.path(cell), name, recorder)
                # neither initialised nor recorded for a gradient when it is called
                cell.__dict__.update(_recorder=recorder, requires_grad=False, _init_flag=True)
                cell.__class__ = _captured_class(kind)
            yield
        finally:
            for cell, kind, attributes in before:
                cell.__class__ = kind
                cell.__dict__.clear()
                cell.__dict__.update(attributes)

    def _trace(self, value, path, name, recorder):
        """An attribute's value with stand-ins for the tensors in it; itself where there are none."""
        if isinstance(value, Tensor):
            if id(value) not in self._stand_ins:
                found = f"{path}.{name}" if path else name
                found = self._parameters.get(id(value)) if isinstance(value, Parameter) else found
                self._stand_ins[id(value)] = recorder.hold(value, found)
            return self._stand_ins[id(value)]
        if isinstance(value, (tuple, list)):
            entries = [self._trace(entry, path, f"{name}.{place}", recorder) for place, entry in enumerate(value)]
            if _same(entries, value):
                return value
            return type(value)(entries) if type(value) is list else tuple(entries)
        if type(value) in (dict, OrderedDict):
            held = name in ("_params", "_buffers", "_params_list")
            names = {key: key if held else f"{name}.{key}" for key in value}
            entries = {key: self._trace(entry, path, names[key], recorder) for key, entry in value.items()}
            return value if _same(entries.values(), value.values()) else type(value)(entries)
        return value


def _by_identity(parameters):
    return {id(parameter): name for name, parameter in parameters.items() if parameter is not None}


def _same(entries, others):
    return all(entry is other for entry, other in zip(entries, others))


class _CapturedCell:
    """Mixed into the class of every Cell of a tree while it is captured."""

    # a hook would run once more when the captured Cell is called
    _forward_pre_hook = _forward_hook = _backward_pre_hook = _backward_hook = MappingProxyType({})

    def construct(self, *args, **kwargs):
        return self.__dict__["_recorder"].call(self, super().construct, args, kwargs)


@cache
def _captured_class(cls):
    return type(cls.__name__, (_CapturedCell, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


@cache
def _signature(construct):
    """The signature of a `construct`, without its `self`."""
    signature = inspect.signature(construct)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class _Unasked(MsDispatchMode):
    """Sees the operators that nobody is asked about: those that ignore `__fallback__`, and those on plain tensors."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __ms_dispatch__(self, func, args, kwargs=None):
        recorder, kwargs = self.recorder, kwargs or {}
        if not recorder.inferring:
            if func.name in _DRAWING_IN_PLACE:
                raise recorder.error(
                    f"operator '{func.name}' draws into a plain tensor, which can't be captured: draw with "
                    "mindspore.ops, or pass the numbers in"
                )
            if func.name in _DRAWING or _has_traced(args):
                return recorder.operator(func, args, kwargs)
        return func(*args, **kwargs)


def _has_traced(args):
    return any(type(entry) is Traced or (isinstance(entry, (tuple, list)) and _has_traced(entry)) for entry in args)


@contextmanager
def _tensors_hand_over_to(recorder):
    """While open, calls whose first tensor is a plain one come to the recorder too, and so does `plain[traced]`."""
    fallback, get_item = Tensor.__dict__["__fallback__"], Tensor.__getitem__

    def item(tensor, index):
        traced = type(index) is Traced or (isinstance(index, tuple) and _has_traced(index))
        return index_tensor(recorder.stand_in(tensor), index) if traced else get_item(tensor, index)

    Tensor.__fallback__ = _HandOver(recorder)
    Tensor.__getitem__ = item
    try:
        yield
    finally:
        Tensor.__fallback__ = fallback
        Tensor.__getitem__ = get_item


class _HandOver:
    """What plain tensors have as `__fallback__`: none where it is asked of a Parameter, for the sake of optimizers."""

    def __init__(self, recorder):
        self.recorder = recorder

    def __get__(self, tensor, owner):
        if issubclass(owner, Parameter):
            raise AttributeError("__fallback__")
        return lambda func, args, kwargs=None: self.recorder.operator(func, args, kwargs or {})


@contextmanager
def _nothing_compiled():
    """While open, functions under `@ms.jit` run as Python, and so do Cells in graph mode.

    Not by `MS_JIT=0`: a process that another thread starts meanwhile would inherit it, and never compile anything.
    """
    mode, before = ms.get_context("mode"), [getattr(owner, name) for owner, name, _ in _WITHOUT_COMPILING]
    for owner, name, function in _WITHOUT_COMPILING:
        setattr(owner, name, function)
    if mode != ms.PYNATIVE_MODE:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(_WITHOUT_COMPILING, before):
            setattr(owner, name, function)
        if mode != ms.PYNATIVE_MODE:
            ms.set_context(mode=mode)


@contextmanager
def _random_state():
    """The state of the random generators is afterwards what it was."""
    before = ms.get_rng_state()
    try:
        yield
    finally:
        ms.set_rng_state(before)


@contextmanager
def _draws_recorded_by(recorder):
    """While open, what draws from MindSpore's default generator is written down."""
    default_generator._step = lambda step: recorder.random_state()
    try:
        yield
    finally:
        del default_generator._step
