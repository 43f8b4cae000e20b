"""The recorder of a capture: a graph for every call of a Cell, a node for every operator on traced tensors."""

import inspect
import sys
from functools import cache, partial
from itertools import repeat

import numpy as np
from mindspore import DeviceCtx, Parameter, Tensor, dtype as mstype, mint, ops
from mindspore.ops import Primitive

from mindformers_core.algorithms.dropout import WITHOUT_SEEDS
from mindformers_core.capture.open_call import Held, Made, OpenCall, contents_of, count_inputs, plain_leaf
from mindformers_core.capture.python_state import PythonReads
from mindformers_core.capture.shape_functions import inferred, method_behind, without_shape
from mindformers_core.capture.traced import CaptureError, Traced, call_site, failed_site
from mindformers_core.dtensor.dispatch import read_numbers
from mindformers_core.dtypes import dtype_name
from mindformers_core.hints import message_of
from mindformers_core.lowering.aliases import is_view, note_adopted, share_memory, stale_plain
from mindformers_core.lowering.compositions import composed
from mindformers_core.lowering.in_place import is_in_place
from mindformers_core.lowering.operator_source import attributes_of
from mindformers_core.mindspore_private import NoFallbackGuard
from mindformers_core.operators import TensorMeta
from mindformers_core.padding import note_stored, stored_shape
from mindformers_core.program.graph import CallNode, OperatorNode, PrimitiveUse
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.scopes import replaced


class Recorder:
    """Records one capture.

    Attributes:
        tree: the `CapturedTree`: it knows the names of Cells and parameters.
        open_calls: the calls that are open, innermost last.
        inferring: whether operators run unrecorded, on the meta device or on constants.
        plain_writes: number of writes into plain tensors so far.
        reads: the `PythonReads`.
        root: the finished `CellGraph` of the root.
    """

    def __init__(self, tree):
        self.tree, self.root = tree, None
        self.open_calls, self._calls, self.plain_writes = [], 0, 0
        self.inferring = self._silent = False
        self._metas = {}  # (shape, dtype) -> meta tensor
        self._loose = {}  # id of a plain tensor -> its stand-in, and the number of writes before
        self.reads = PythonReads(lambda: self.open_calls[-1].cell, self.error)

    def hold(self, tensor, path):
        """The stand-in of a tensor at `path` of the tree, or of a tensor that the tree doesn't own (None)."""
        shape = getattr(tensor, "global_shape", tensor.shape)  # a sharded Parameter holds a part only
        held = Traced.around(self, self.meta(shape, tensor.dtype), Held(path), tensor)
        if hasattr(tensor, "part_sizes"):
            whole = self.meta(stored_shape(tensor), tensor.dtype)
            note_stored(held, Traced.around(self, whole, Held(path), tensor), tensor.part_sizes)
        return held

    def input(self, leaf):
        """A leaf of the root's arguments, traced where it is a tensor or `TensorMeta`."""
        is_tensor = isinstance(leaf, (Tensor, TensorMeta))
        return Traced.around(self, self.meta(leaf.shape, leaf.dtype), Made(None, None)) if is_tensor else leaf

    def meta(self, shape, dtype):
        """A meta tensor; `dtype` is one of MindSpore's, or its name."""
        key = tuple(shape), getattr(mstype, dtype.replace("bool", "bool_")) if isinstance(dtype, str) else dtype
        if key not in self._metas:
            with NoFallbackGuard(), DeviceCtx("meta"):
                self._metas[key] = mint.empty(key[0], dtype=key[1])
        return self._metas[key]

    def error(self, text, source=None):
        """A `CaptureError` that names the Cell and the line: `source`, or else the current one."""
        source = source or call_site()[0]
        call = self.open_calls[-1] if self.open_calls else None
        if call is None:
            return CaptureError(f"{source}: {text}")
        if source is None:
            code = inspect.unwrap(self.tree.kind(call.cell).construct).__code__
            source = f"{code.co_filename}:{code.co_firstlineno}"
        return CaptureError(f"in {self.tree.label(call.cell)}, {source}: {text}")

    def values_of(self, tensor, what):
        """The plain tensor with a constant's values, computed by the first call; an error for any other traced tensor.

        Other leaves are as they are.
        """
        if type(tensor) is not Traced:
            return tensor
        if tensor.original is None and tensor.deferred is not None:
            tensor.original = tensor.deferred()
        if tensor.original is not None and not isinstance(tensor.original, Parameter):
            return tensor.original
        raise self.error(
            f"{what} needs the values of a tensor, {dtype_name(tensor.dtype)}{list(tensor.shape)}, and while a Cell "
            "is captured there are none, only shapes. Mark the Cell, cell.eager() after shard(), and it runs operator "
            "by operator, in PyNative; or restructure it: ops.where or ops.masked_fill in the place of a branch, "
            "x.shape in the place of a count, an argument of construct in the place of a switch"
        )

    def stray(self, parameter):
        """The error for a Parameter that the tree doesn't own."""
        return self.error(
            f"parameter '{parameter.name}' of shape {tuple(parameter.shape)} belongs to no Cell of the tree, and "
            "would be neither trained nor saved: make it an attribute of a Cell (several in a ParameterTuple), and "
            "keep Cells in an nn.CellList, not in a plain list"
        )

    def call(self, cell, construct, args, kwargs):
        """A Cell's `construct(*args, **kwargs)`, recorded as a node of the caller and as a graph of its own."""
        sys.setprofile(None)  # for speed: until the user's code runs
        source, _ = call_site()
        args, kwargs = self.stand_in(args), self.stand_in(kwargs)
        caller = self.open_calls[-1] if self.open_calls else None
        shown = ((), {}) if caller is None else tree_map(caller.leaf, (args, kwargs))
        call = OpenCall(self.tree, cell, self._calls, construct, args, kwargs, caller)
        self._calls += 1
        self.open_calls.append(call)
        try:
            with self.reads.reading(cell, construct):
                result = construct(*args, **kwargs)
            result = self.stand_in(result)
            graph = call.finish(result)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            source, is_users = failed_site(error)
            said = message_of(error)
            if isinstance(error, CaptureError) or is_users and said in (str(error).strip(), type(error).__name__):
                raise
            raise self.error(said, source) from error
        finally:
            self.open_calls.pop()
        if caller is None:
            self.root = graph
            return result
        received, name = {}, self.tree.path(cell).rpartition(".")[2]

        def receive(leaf):
            if not isinstance(leaf, Traced):
                return leaf
            if id(leaf) not in received:
                made = caller.new_value(leaf, name, call.value_of(leaf).constant)
                known = (leaf.original, leaf.deferred) if made.constant else (None, None)
                received[id(leaf)] = Traced.around(self, leaf.meta, Made(caller, made), *known)
                share_memory([leaf], received[id(leaf)])
            return received[id(leaf)]

        result = tree_map(receive, result)
        called = self.tree.local_path(caller.cell, cell)
        caller.nodes.append(CallNode(called, *shown, tree_map(caller.leaf, result), graph, source))
        sys.setprofile(self.reads.profile)
        return result

    def is_input(self, entry):
        """Whether a traced tensor's entry is an argument of the root."""
        return any(entry == Made(self.open_calls[0], value) for value in tree_leaves(self.open_calls[0].arguments))

    def write(self, tensor, value):
        """Record that a Parameter is written; returns its new value, whose gradient is the Parameter's."""
        parameter = tensor.original
        if hasattr(parameter, "unwritable"):
            raise self.error(parameter.unwritable)
        if "stored" in vars(tensor):
            raise self.error(f"parameter '{parameter.name}' is stored with padding, and a Cell can't write it")
        vars(tensor).setdefault("path", getattr(tensor.entry, "path", None))
        home, value = self.hold(parameter, tensor.path), self.stand_in(ops.stop_gradient(value))
        read = value
        if parameter.requires_grad and parameter.is_floating_point():
            with replaced(self.open_calls[-1], cast=None):
                read = value + (home - ops.stop_gradient(home))
        self.add_node("Assign", "function", (home, value), {}, home.meta)
        return read

    def random_state(self):
        """A draw from MindSpore's default generator as a node, `RandomState()`, of two int64 results without dims."""
        metas = (self.meta((), mstype.int64),) * 2
        return self.add_node("RandomState", "function", (), {}, metas, hints=("seed", "offset"))

    def add_node(self, operator, kind, args, kwargs, metas, primitive=None, attribute=None, hints=(), values=None):
        """Append an `OperatorNode` to the graph of the innermost call, and return the traced results.

        Args:
            operator, kind, args, kwargs, primitive, attribute: of the node, with traced tensors.
            metas: the results as meta tensors.
            hints: of the results. Default: the operator.
            values: of an operator on constants a function that computes the tensors among its results; else None.
        """
        call = self.open_calls[-1]
        shown = tree_map(call.leaf, (args, kwargs))
        numbered = enumerate(hints or repeat(operator))

        def make(leaf):
            if not isinstance(leaf, Tensor):
                return leaf
            place, hint = next(numbered)
            made = Made(call, call.new_value(leaf, hint, values is not None))
            return Traced.around(self, leaf, made, deferred=values and (lambda: values()[place]))

        results = tree_map(make, metas)
        outputs, (source, _) = tree_map(call.leaf, results), call_site()
        call.nodes.append(OperatorNode(operator, kind, *shown, outputs, primitive, attribute, source))
        return results

    def operator(self, func, args, kwargs=None):
        """Run an operator on the meta device, and record it: MindSpore's `__fallback__`."""
        sys.setprofile(None)
        try:
            return self._operator(func, args, kwargs)
        finally:
            sys.setprofile(self.reads.profile if self.open_calls else None)

    def _operator(self, func, args, kwargs):
        primitive, name, kwargs = None, func.name, kwargs or {}
        kind = "method" if type(func).__name__ == "TensorOverloadCall" else "function"
        if len(args) == 3 and type(args[1]) is str and isinstance(args[0], Primitive):
            primitive, _, args = args
            kind = "primitive"
        if is_in_place(name):
            self.adopt(args[0])
        if not self._silent:
            args, kwargs = self.open_calls[-1].casted(name, args, kwargs)
        with replaced(self.open_calls[-1], cast=None):
            parts = None if self._silent else composed(name, args, kwargs, primitive)
        if parts is not None:
            return parts
        if is_in_place(name):
            raise self.error(f"operator '{name}' changes a tensor in place: use its result, as in x = x + y")
        if reason := without_shape(name):
            raise self.error(reason)
        args = read_numbers(name, args, partial(self.values_of, what="a size"))
        args, kwargs = self.stand_in(args), self.stand_in(kwargs)
        metas = self._infer(func, primitive, args, kwargs)
        if self._silent or not tree_leaves(metas, Tensor):
            return tree_map(self.input, metas)  # of no graph
        return self._write(func, kind, primitive, args, kwargs, metas)

    def _write(self, func, kind, primitive, args, kwargs, metas):
        """Record an operator, and return the traced results."""
        name, call, use = func.name, self.open_calls[-1], None
        shown = tuple(args[: WITHOUT_SEEDS.get(name)])
        used = tree_leaves(tree_map(call.leaf, (shown, kwargs)))
        if primitive is not None:
            attributes = tree_map(plain_leaf, dict(attributes_of(primitive)))
            if name in WITHOUT_SEEDS:
                attributes = {key: value for key, value in attributes.items() if key not in ("Seed0", "Seed1")}
            kind_of = type(primitive)
            use = PrimitiveUse(kind_of.__module__, kind_of.__name__, attributes, count_inputs(primitive, args))
        _, called = call_site()
        attribute = getattr(called, "instance_name", None)
        attribute = attribute if call.cell.__dict__.get(attribute) is called else None
        constant = bool(used) and all(value.constant for value in used)
        values = self._computing(func, primitive, args, kwargs) if constant else None
        results = self.add_node(name, kind, shown, kwargs, metas, use, attribute, values=values)
        if is_view(name, args, kwargs):
            tensors, made = tree_leaves((args, kwargs), Traced), tree_leaves(results, Traced)
            if made[0].dtype == tensors[0].dtype:  # else a copy
                share_memory(tensors, made)
        return results

    def _computing(self, func, primitive, args, kwargs):
        """A function that runs an operator on constants for real, once, and gives the tensors among its results."""
        real = partial(self.values_of, what="a constant")
        return cache(lambda: tree_leaves(self._unrecorded(func, primitive, args, kwargs, real), Tensor))

    def _unrecorded(self, func, primitive, args, kwargs, leaf):
        """The result of an operator, with `leaf(each)` for the leaves of its arguments."""
        call, named = tree_map(leaf, (tuple(args), kwargs))
        with replaced(self, inferring=True), NoFallbackGuard():
            return func(*call, **named) if primitive is None else func(primitive, func.name, call)

    def _infer(self, func, primitive, args, kwargs):
        """The results as meta tensors.

        A method without a result on the meta device is replaced by the Python function behind it. What is known not to
        run there isn't tried: after an error MindSpore drops the gradient that it records around the capture.
        """
        behind, refused = method_behind(func.name), None
        try:
            if found := inferred(func.name, args, kwargs):
                results = tuple(self.meta(*each) for each in found)
                return results if len(results) > 1 else results[0]
        except ValueError as error:
            refused = error
        try:
            with DeviceCtx("meta"):
                result = self._unrecorded(func, primitive, args, kwargs, _meta_leaf)
        except Exception as error:
            target = getattr(call_site()[1], "attrs", {}).get("primitive_target")
            if target is not None:
                raise self.error(
                    f"operator '{func.name}' has primitive_target={target!r}: here an operator computes where the mesh "
                    "does (docs/from_mindspore.md), so leave the attribute out"
                ) from error
            if "Not implement" not in str(error) or behind is None:
                why, shown = refused or error, ", ".join(map(repr, args))
                raise self.error(
                    f"operator {func.name}({shown}) can't be run on shapes alone: {message_of(why)}"
                ) from why
            result = None
        if result is not None:
            return result
        if behind is None:
            raise self.error(f"operator '{func.name}' gives no shape on the meta device: use mindspore.ops")
        with replaced(self, _silent=True):
            return tree_map(_meta_leaf, behind(*args, **kwargs))

    def stand_in(self, structure):
        """The structure with a traced tensor in the place of every plain one; itself where there is none."""
        if all(type(tensor) is Traced for tensor in tree_leaves(structure, Tensor)):
            return structure
        return tree_map(self._traced, structure)

    def _traced(self, leaf):
        if not isinstance(leaf, Tensor) or type(leaf) is Traced:
            return leaf
        if isinstance(leaf, Parameter):
            raise self.stray(leaf)
        self.check_plain([leaf])
        held, writes = self._loose.get(id(leaf), (None, None))
        if writes != self.plain_writes:
            if held is None or not leaf.is_meta and not np.array_equal(held.seen, contents_of(leaf), equal_nan=True):
                held = self.hold(leaf, None)  # which keeps the tensor, and so its id
                vars(held)["seen"] = None if leaf.is_meta else contents_of(leaf).copy()
            self._loose[id(leaf)] = held, self.plain_writes
        return held

    def check_plain(self, tensors):
        """Raise an error for a plain tensor with the memory of one that became traced, and was changed alone."""
        for text in filter(None, map(stale_plain, tensors)):
            raise self.error(text)

    def adopt(self, tensor):
        """A tensor that is changed in place: a plain one becomes a traced one."""
        if type(tensor) is Tensor:
            self.check_plain([tensor])
            vars(tensor).update(vars(self.hold(tensor.copy(), None)))
            note_adopted(tensor, call_site()[0])
            tensor.__class__ = Traced
        return tensor


def _meta_leaf(leaf):
    return leaf.meta if type(leaf) is Traced else leaf
