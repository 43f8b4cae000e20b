"""Dispatch of operators on `DTensor`s: rules are resolved once per kind of call; later calls run a cached program.

A kind of call is the operator's name, the metas of its tensors (shape, dtype, layout) and its other arguments. Its
program holds the redistribution of each input, the local arguments, and the metas of the outputs. The cached path does
no layout arithmetic.
"""

from functools import cache

from mindspore import Parameter, Tensor

from mindformers_core.algorithms.distributed_operators import run_locally
from mindformers_core.algorithms.dropout import WITHOUT_SEEDS
from mindformers_core.algorithms.redistribute import model_of_device, redistribute_local
from mindformers_core.algorithms.shard_context import shard_context
from mindformers_core.communication.world import process_state
from mindformers_core.dtensor.dtensor import DTensor, adopted, parameter_view, wrap
from mindformers_core.dtypes import dtype_name
from mindformers_core.layout import Layout
from mindformers_core.lowering.aliases import check_current, is_view, share_memory, stale_plain
from mindformers_core.lowering.compositions import composed
from mindformers_core.lowering.corrected import OWN_FUNCTIONS
from mindformers_core.lowering.in_place import is_in_place
from mindformers_core.lowering.operator_source import attributes_of, operator_function
from mindformers_core.mindspore_private import needs_gradient
from mindformers_core.operators import OperatorCall, TensorMeta, resolve, signature_of, tensor_meta
from mindformers_core.operators.registry import facts_of, rule_attributes
from mindformers_core.operators.rewrites import REPAIRS
from mindformers_core.program.graph import OperatorNode
from mindformers_core.program.structure import Value, tree_fill, tree_key, tree_leaves, tree_map
from mindformers_core.propagation.operators import operator_plan

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
    args = read_numbers(func.name, args, lambda leaf: leaf if type(leaf) is Tensor else None)
    if func.name == "typeof":  # of a tensor's type; it computes nothing
        return func(*tree_map(_local, (primitive, func.name, args) if primitive else args))
    kwargs = kwargs or {}
    if is_in_place(func.name) and type(args[0]) is Tensor:
        adopted(args[0], next(leaf.mesh for leaf in tree_leaves((args, kwargs), DTensor)))
    parts = composed(func.name, args, kwargs, primitive)
    if parts is not None:
        return parts
    key, tensors = [func.name, *kwargs], []
    for argument in (*args, *kwargs.values()):
        _describe(argument, key, tensors)
    attributes = {} if primitive is None else rule_attributes(func.name, attributes_of(primitive))
    state = process_state()
    key = (state.device_model, *key, *attributes.values())
    programs = state.memo(__name__)  # kind of call -> `_Program`, which depends on this process's rank
    try:
        program = programs.get(key)
    except TypeError as error:  # not hashable
        shown = ", ".join(type(argument).__name__ for argument in args)
        raise TypeError(
            f"operator '{func.name}' on DTensors takes tensors, numbers, strings, tuples and lists, not ({shown})"
        ) from error
    if program is None:
        program = _Program(func.name, args, kwargs, attributes, tensors)
        if len(programs) >= _MOST_PROGRAMS:
            programs.clear()
        programs[key] = program
    return program.run(func, primitive, args, tensors)


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


def _describe(argument, key, tensors):
    """Append the kind of an argument to `key`, and its tensors to `tensors`."""
    kind = type(argument)
    if kind is DTensor:
        check_current(argument)
        key.append(argument._meta)
        tensors.append(argument)
    elif isinstance(argument, Parameter) and hasattr(argument, "global_shape"):
        _describe(parameter_view(argument), key, tensors)
    elif isinstance(argument, Tensor):
        if text := stale_plain(argument):
            raise ValueError(text)
        key.append((argument.shape, argument.dtype, needs_gradient(argument)))
        tensors.append(argument)
    elif kind is tuple or kind is list:
        key.append(len(argument))
        for entry in argument:
            _describe(entry, key, tensors)
    else:
        key.append(kind)  # since 1 == 1.0 == True
        key.append(argument)


class _Program:
    """One kind of call, resolved.

    Attributes:
        name, given, attributes: of the operator, the number of its positional arguments, and a primitive's attributes
            that its rule takes besides.
        functions: of an operator that MindSpore gets wrong, by arguments: what calls it by its source; else None.
        mesh: that of its tensors.
        plan, context: the `OperatorPlan`, and the `ShardContext` of its algorithm, if it has one; a `TensorMeta` is in
            the place of every tensor, and the dtypes of the outputs are not known.
        targets: for every tensor the layout that it is redistributed to, or None.
        direct: whether the local call differs from the global one only in its tensors, which are the local ones.
        is_view: whether results share memory with the first tensor on one card.
        constant: whether no gradient flows to the outputs.
        metas: the outputs' `TensorMeta`s; None before the first run, which determines the dtypes.
    """

    def __init__(self, name, args, kwargs, attributes, tensors):
        self.name, self.given, self.attributes, self.metas = name, len(args), attributes, None
        self.functions = {} if facts_of(name).rewrite in REPAIRS or name in OWN_FUNCTIONS else None
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
        call = OperatorCall(name, signature, tuple(metas), mesh, model_of_device(mesh))
        self.plan = plan = operator_plan(node, call, resolve(call))
        self.context = plan.algorithm and shard_context(plan)
        self.targets = tuple(map(_target, metas, plan.inputs))
        flat = not kwargs and sum(isinstance(argument, TensorMeta) for argument in args) == len(metas)
        self.direct = flat and plan.local_call == (args, kwargs) and not plan.algorithm and not any(self.targets)

    def run(self, func, primitive, args, tensors):
        """Redistribute the inputs, call the operator on local tensors, and wrap the results."""

        def operator(local_args, kwargs):
            if self.functions is not None:
                return self._by_source(local_args, kwargs)
            if primitive is None:
                return func(*local_args, **kwargs)
            changed = local_args[self.given :]  # by `localize`: attributes of the primitive
            primitive_here = _made(type(primitive), changed) if changed else primitive
            return func(primitive_here, self.name, local_args[: self.given])

        if self.direct:
            result = operator(tuple(map(_local, args)), {})
        else:
            parts = [_local_part(tensor, target) for tensor, target in zip(tensors, self.targets)]
            result = run_locally(self.plan, parts, operator, self.context)
        metas = self.metas
        if metas is None:
            metas = self._check_outputs(result)
            self.metas = None if facts_of(self.name).gather else metas  # their shapes may depend on values
        results = wrap(result, metas[0]) if isinstance(result, Tensor) else tuple(map(wrap, result, metas))
        if self.is_view:
            share_memory(tensors, results)
        return results

    def _by_source(self, args, kwargs):
        """The result of the operator by its source, which is right; local calls of an algorithm differ."""
        key = None if self.direct else tree_key((args, kwargs), _leaf_key)
        function = self.functions.get(key)
        if function is None:
            function = self.functions[key] = operator_function(self.plan.node, args, kwargs | self.attributes)
        return function(*tree_leaves((args, kwargs), Tensor))

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
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


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
        return _local(tensor if target is None else tensor.redistribute(target))
    return redistribute_local(tensor, Layout.on(target.mesh, ((),) * tensor.ndim), target)
