"""Dispatch of operators on `DTensor`s: rules are resolved once per kind of call; later calls run a cached program.

A kind of call is the operator's name, the metas of its tensors (shape, dtype, layout) and its other arguments. Its
program holds the redistribution of each input, the local arguments, and the metas of the outputs. The cached path does
no layout arithmetic.
"""

from functools import cache, partial

import numpy as np
from mindspore import Parameter, Tensor

from mindformers_core.algorithms.distributed_operators import run_locally
from mindformers_core.algorithms.dropout import WITHOUT_SEEDS
from mindformers_core.algorithms.redistribute import model_of_device, redistribute_local
from mindformers_core.algorithms.shard_context import shard_context
from mindformers_core.communication.world import process_state
from mindformers_core.dtensor.algorithm_price import Shaped, algorithm_price, shaped_results
from mindformers_core.dtensor.dtensor import DTensor, adopted, parameter_view, wrap
from mindformers_core.dtypes import dtype_name
from mindformers_core.layout import Layout
from mindformers_core.lowering.aliases import check_current, is_view, memory_of, share_memory, stale_plain
from mindformers_core.lowering.compositions import composed
from mindformers_core.lowering.corrected import OWN_FUNCTIONS
from mindformers_core.lowering.in_place import is_in_place
from mindformers_core.lowering.operator_source import attributes_of, operator_function
from mindformers_core.mindspore_private import needs_gradient
from mindformers_core.operators import OperatorCall, TensorMeta, resolve, signature_of, tensor_meta
from mindformers_core.operators.registry import facts_of, rewritten, rule_attributes
from mindformers_core.operators.resolve import jointly_kept
from mindformers_core.operators.rewrites import REPAIRS
from mindformers_core.program.graph import OperatorNode
from mindformers_core.program.structure import Value, tree_fill, tree_key, tree_leaves, tree_map
from mindformers_core.propagation.operators import operator_plan

_NO_TENSORS = frozenset({bool, str, type(None)})  # the question whether one is a tensor takes longer
_INEXACT = float, complex, np.inexact
_MOST_PROGRAMS = 65536  # a number that changes with every step would fill the memory with programs


def dispatch(func, args, kwargs=None):
    """Run operator `func` on the global tensors in `args`: MindSpore's `DTensor.__fallback__`.

    Raises:
        ValueError: the operator has no rule, the call doesn't fit its rule, or its tensors are on different meshes.
    """
    primitive = None
    if len(args) == 3 and type(args[1]) is str and type(args[2]) in (tuple, list):
        primitive, _, args = args  # how calls of classic primitives arrive
        args = args[: WITHOUT_SEEDS.get(func.name)]
    state = process_state()
    key, tensors, parts = _described(func.name, primitive, args, kwargs)
    try:
        program = state.calls.get(key)
    except TypeError:  # not hashable
        program = None
    if program is None:
        return _run_unknown(func, primitive, args, kwargs or {})
    if state.has_writes:
        _check_current(tensors)
    if program.direct is None or primitive is not None:
        return program.run(func, primitive, tensors, parts)
    before, after, meta = program.direct
    result = wrap(func(*before, *parts, *after), meta)
    if program.is_view:
        result.memory = memory_of(tensors[0])
    return result


def _described(name, primitive, args, kwargs):
    """What tells a call from others, a tuple; the tensors among its arguments, those of Parameters as DTensors; and
    the local tensors."""
    key, tensors, parts = [name], [], []
    for argument in args:
        if type(argument) is DTensor:
            key.append(argument._meta)
            tensors.append(argument)
            parts.append(argument._local)
        else:
            _describe(argument, key, tensors, parts)
    if kwargs:
        key += kwargs
        for argument in kwargs.values():
            _describe(argument, key, tensors, parts)
    if primitive is not None and facts_of(name).rule is not None:
        key.append(type(primitive))
        for value in rule_attributes(name, attributes_of(primitive)).values():
            _describe(value, key, tensors, parts)
    return tuple(key), tensors, parts


def _run_unknown(func, primitive, args, kwargs):
    """Run an operator of which no such call is known: by others, or by a new `_Program`."""
    name, state = func.name, process_state()
    args = read_numbers(name, args, lambda leaf: leaf if type(leaf) is Tensor else None)
    if name == "typeof":  # of a tensor's type; it computes nothing
        return func(*tree_map(_local, (primitive, name, args) if primitive else args))
    if is_in_place(name) and type(args[0]) is Tensor:
        adopted(args[0], next(leaf.mesh for leaf in tree_leaves((args, kwargs), DTensor)))
    parts = composed(name, args, kwargs, primitive)
    if parts is not None:
        return parts
    attributes = {} if primitive is None else rule_attributes(name, attributes_of(primitive))
    if tree_leaves((args, kwargs), Shaped):
        return shaped_results(name, args, kwargs | attributes)
    key, tensors, parts = _described(name, primitive, args, kwargs)
    _check_current(tensors)
    try:
        program = state.calls.get(key)  # known, where tensors were read as numbers
    except TypeError as error:
        shown = ", ".join(type(argument).__name__ for argument in args)
        raise TypeError(
            f"operator '{name}' on DTensors takes tensors, numbers, strings, tuples and lists, not ({shown})"
        ) from error
    if program is None:
        program = _Program(name, args, kwargs, attributes, tensors)
        if len(state.calls) >= _MOST_PROGRAMS:
            state.calls.clear()
        state.calls[key] = program
    return program.run(func, primitive, tensors, parts)


def _check_current(tensors):
    """Raise a `ValueError` for a tensor that a write made stale."""
    for tensor in tensors:
        if type(tensor) is DTensor:
            check_current(tensor)
        elif text := stale_plain(tensor):
            raise ValueError(text)


def read_numbers(name, args, plain):
    """The arguments of an operator with ints, or tuples of them, in the place of tensors that are read as numbers.

    Args:
        name, args: of the operator.
        plain: function from an argument to the tensor that holds its values; None where there is none.
    """
    args = list(args)
    for place in facts_of(name).numbers:
        if place < len(args) and isinstance(args[place], Tensor) and (tensor := plain(args[place])) is not None:
            found = tensor.asnumpy().tolist()
            args[place] = tuple(found) if isinstance(found, list) else found
    return tuple(args)


def _local(argument):
    return argument._local if type(argument) is DTensor else argument


def _describe(argument, key, tensors, parts):
    """Append the kind of an argument to `key`, its tensors to `tensors`, and their local ones to `parts`."""
    kind = type(argument)
    if kind is DTensor:
        key.append(argument._meta)
        tensors.append(argument)
        parts.append(argument._local)
    elif kind is int:
        key.append(argument)
    elif kind is tuple or kind is list:
        key += tuple, len(argument)
        for entry in argument:
            _describe(entry, key, tensors, parts)
    elif isinstance(argument, _INEXACT):
        key += kind, repr(argument)  # since 0.0 == -0.0
    elif kind in _NO_TENSORS or not isinstance(argument, Tensor):
        key += kind, argument  # since True == 1
    elif isinstance(argument, Parameter) and hasattr(argument, "global_shape"):
        _describe(parameter_view(argument), key, tensors, parts)
    else:
        key.append((argument.shape, argument.dtype, needs_gradient(argument)))
        tensors.append(argument)
        parts.append(argument)


class _Program:
    """One kind of call, resolved.

    Attributes:
        name, given, attributes: of the operator, the number of its positional arguments, and a primitive's attributes
            that its rule takes besides.
        function: of an operator that MindSpore gets wrong, what calls it by its source; else None.
        functions: likewise where there is an algorithm, which calls the operator: by its arguments.
        mesh: that of its tensors.
        plan, context: the `OperatorPlan`, and the `ShardContext` of its algorithm, if it has one; a `TensorMeta` is in
            the place of every tensor, and the dtypes of the outputs are not known.
        targets: for every tensor the layout that it is redistributed to, or None.
        is_moving: whether any tensor is.
        direct: `around` and the meta of the one output, after the first run, where nothing else is to be known.
        around: the arguments of the local call before its tensors and behind them; None where these are further apart,
            and where there is an algorithm.
        is_view: whether results share memory with the first tensor on one card.
        constant: whether no gradient flows to the outputs.
        metas: the outputs' `TensorMeta`s; None before the first run, which determines the dtypes.
    """

    def __init__(self, name, args, kwargs, attributes, tensors):
        self.name, self.given, self.attributes, self.metas = name, len(args), attributes, None
        self.mesh = mesh = _common_mesh(name, tensors)
        if is_in_place(name):
            raise TypeError(
                f"operator '{name}' would change a distributed tensor in place: use its result, as in x = x + y"
            )
        metas = [_meta_of(tensor, mesh) for tensor in tensors]
        args, kwargs = tree_fill((args, kwargs), metas, Tensor)
        self.is_view = is_view(name, args, kwargs) and type(tensors[0]) is DTensor
        self.constant = not any(meta.differentiable for meta in metas)
        signature = signature_of(name, args, kwargs | attributes)
        outputs = tuple(Value(place, shape, "", name) for place, shape in enumerate(signature.output_shapes))
        node = OperatorNode(name, "function", args, kwargs, outputs, None, None, None)
        kept = tuple(meta.layout.cut_axes & process_state().batch_axes for meta in metas)
        kept = jointly_kept(signature, metas, kept)
        model = model_of_device(mesh)
        price = partial(algorithm_price, node, attributes)
        call = OperatorCall(name, signature, tuple(metas), mesh, model, kept=kept, algorithm_price=price)
        self.plan = plan = operator_plan(node, call, resolve(call))
        self.context = plan.algorithm and shard_context(plan)
        self.targets = tuple(map(_target, metas, plan.inputs))
        self.is_moving, self.direct = any(self.targets), None
        self.around = None if plan.algorithm else _around(*plan.local_call, len(metas))
        parts = [tensor_meta(layout.local_shape(meta.shape), meta.dtype) for meta, layout in zip(metas, plan.inputs)]
        local_args, named = tree_fill(plan.local_call, parts, TensorMeta)
        is_wrong = name in OWN_FUNCTIONS or (
            facts_of(name).rewrite in REPAIRS and (plan.algorithm or rewritten(name, local_args, named)[0] != name)
        )
        self.functions = {} if is_wrong else None
        self.function = self._by_source(local_args, named) if is_wrong and not plan.algorithm else None

    def run(self, func, primitive, tensors, parts):
        """Redistribute the inputs, call the operator on local tensors, and wrap the results."""
        if self.is_moving:
            parts = list(map(_local_part, tensors, self.targets))
        if self.function is not None:
            result = self.function(*parts)
        elif self.around is None:
            result = run_locally(self.plan, parts, partial(self._operator, func, primitive), self.context)
        else:
            before, after = self.around
            args = *before, *parts, *after
            result = func(*args) if primitive is None else self._operator(func, primitive, args, {})
        metas = self.metas
        if metas is None:
            metas = self._check_outputs(result)
            self.is_view = self.is_view and metas[0].dtype == tensors[0]._meta.dtype  # else a copy
            if not facts_of(self.name).gather:  # else their shapes may depend on values
                self.metas = metas
                is_special = self.is_moving or self.function is not None or self.around is None
                self.direct = None if is_special or not isinstance(result, Tensor) else (*self.around, metas[0])
        results = tuple(map(wrap, result, metas)) if isinstance(result, (tuple, list)) else wrap(result, metas[0])
        if self.is_view:
            share_memory(tensors, results)
        return results

    def _operator(self, func, primitive, args, kwargs):
        """The operator itself on local tensors, whose arguments differ from call to call in an algorithm."""
        if self.functions is not None:
            key = tree_key((args, kwargs), _leaf_key)
            if key not in self.functions:
                self.functions[key] = self._by_source(args, kwargs)
            return self.functions[key](*tree_leaves((args, kwargs), Tensor))
        if primitive is None:
            return func(*args, **kwargs)
        changed = tuple(args[self.given :])  # by `localize`: attributes of the primitive
        primitive_here = _made(type(primitive), changed) if changed else primitive
        return func(primitive_here, self.name, tuple(args[: self.given]))

    def _by_source(self, args, kwargs):
        """A function of the tensors among its arguments that calls the operator by its source, which is right."""
        return operator_function(self.plan.node, args, kwargs | self.attributes)

    def _check_outputs(self, result):
        """The metas of the outputs; checks the shapes of the local results against the rule's prediction."""
        results, produced = [result] if isinstance(result, Tensor) else result, self.plan.produced
        if facts_of(self.name).gather:  # each rank has whole results
            produced = [(local, Layout.on(self.mesh, ((),) * local.ndim)) for local in results]
        metas = tuple(
            tensor_meta(tuple(whole.shape), dtype_name(local.dtype), layout, self.constant)
            for local, (whole, layout) in zip(results, produced, strict=True)
        )
        for local, meta in zip(results, metas):
            if tuple(local.shape) != meta.local_shape:
                raise ValueError(
                    f"operator '{self.name}' returned a local tensor of shape {local.shape} where its rule predicted "
                    f"{meta.local_shape} ({meta}): the rule is wrong for this call"
                )
        return metas


def _leaf_key(leaf):
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return type(leaf), repr(leaf) if isinstance(leaf, _INEXACT) else leaf


@cache
def _made(kind, attributes):
    """A classic primitive."""
    return kind(*attributes)


def _common_mesh(name, tensors):
    meshes = {tensor.mesh: tensor for tensor in tensors if type(tensor) is DTensor}
    if len(meshes) > 1:
        shown = "; ".join(f"{tensor.layout!r}" for tensor in meshes.values())
        raise ValueError(
            f"operator '{name}' got tensors on different meshes: {shown}. Take one over to the other's mesh first: "
            "distribute_tensor(x.full_tensor(), layout, mesh)"
        )
    return next(iter(meshes))


def _around(args, kwargs, count):
    """The arguments in front of all tensors and those behind; None where others are among the tensors."""
    places = [place for place, argument in enumerate(args) if isinstance(argument, TensorMeta)]
    if kwargs or len(places) < count or places[-1] - places[0] >= count:
        return None
    return args[: places[0]], args[places[-1] + 1 :]


def _meta_of(tensor, mesh):
    """The meta of a DTensor, or of a plain tensor, which is replicated."""
    if type(tensor) is DTensor:
        return tensor._meta
    layout = Layout.on(mesh, ((),) * tensor.ndim)
    return tensor_meta(tuple(tensor.shape), dtype_name(tensor.dtype), layout, constant=not needs_gradient(tensor))


def _target(meta, needed):
    """The layout that a tensor is redistributed to, or None; varying axes count only where there is a gradient."""
    arriving = meta.layout if meta.differentiable else meta.layout.replace(varying=())
    return None if arriving == needed else needed


def _local_part(tensor, target):
    if target is None or type(tensor) is DTensor:
        return _local(tensor if target is None else tensor._in_layout(target))
    return redistribute_local(tensor, Layout.on(target.mesh, ((),) * tensor.ndim), target)
