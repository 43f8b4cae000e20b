"""The hooks into MindSpore that send operators on `DTensor`s to the dispatcher, from the first one of a process on.

MindSpore looks up `__fallback__` of a Tensor subclass at every operator call. Two cases need hooks of their own: a call
whose first tensor is a plain one looks up `Tensor.__fallback__`; and a few primitives have no such look-up.
"""

from functools import wraps

from mindspore import Parameter, Tensor, ops

from mindformers_core import mindspore_private as private
from mindformers_core.algorithms.custom import is_dispatched, operator_named
from mindformers_core.algorithms.draws import draw_whole
from mindformers_core.algorithms.dropout import WITHOUT_SEEDS
from mindformers_core.communication.world import process_state
from mindformers_core.dtensor.dispatch import dispatch
from mindformers_core.dtensor.dtensor import DTensor, adopted
from mindformers_core.lowering.compositions import composed
from mindformers_core.lowering.in_place import DRAWS_IN_PLACE
from mindformers_core.lowering.operator_source import attributes_of
from mindformers_core.operators.registry import facts_of, registered_operators
from mindformers_core.program.structure import tree_leaves
from mindformers_core.scopes import entered, once

_GENERATED = ops.auto_generate
# primitives that don't look up `__fallback__`
_WITHOUT_FALLBACK = (ops.Stack, _GENERATED.StackExt, ops.AddN, _GENERATED.FullLike, _GENERATED.RandLikeExt)


class PlainTensorFallback:
    """A dispatcher as an attribute of plain tensors, not of Parameters: it would slow down every optimizer."""

    def __init__(self, dispatcher):
        self.dispatcher = dispatcher

    def __get__(self, tensor, owner):
        if issubclass(owner, Parameter):
            raise AttributeError("__fallback__")
        return self.dispatcher


@once
def intercept_operators():
    """Send operators on DTensors to `dispatch`: called before the first one, a capture, and `shard()`."""
    with private.outside_of_meta(), private.no_grad():
        private.connect_generator()
    Tensor.__setitem__ = set_item_of(DTensor, lambda tensor, like: adopted(tensor, like.mesh))
    for name in ("__iadd__", "__isub__", "__imul__", "__itruediv__"):
        setattr(Tensor, name, _assigning(getattr(Tensor, name), getattr(DTensor, name)))
    Tensor.__init__ = _of_values(Tensor.__init__)
    private.JitExecutor.__call__ = _as_python(private.JitExecutor.__call__)
    private.PyNativeExecutor.grad = _of_whole(private.PyNativeExecutor.grad)
    for primitive in _WITHOUT_FALLBACK:
        primitive.__call__ = _dispatching(primitive.__call__)
    for name in (*registered_operators("draws"), *DRAWS_IN_PLACE):
        primitive = getattr(_GENERATED, name, None) or getattr(ops, name, None)
        if primitive is not None:  # else an operator of a user's
            primitive.__call__ = _drawing(primitive.__call__)
    setattr(*private.CROSS_ENTROPY, _without_branch(getattr(*private.CROSS_ENTROPY)))
    Tensor.__fallback__ = PlainTensorFallback(dispatch)


def draws_by_position(active=True):
    """While open, draws among plain tensors give a distributed program's numbers, the same on all ranks; or don't."""
    intercept_operators()
    return entered(process_state().memo(__name__), "draws", active)


def _drawing(call):
    """A `__call__` of a primitive that draws by position within `draws_by_position`."""

    @wraps(call)  # its parameters are asked for
    def drawing_call(self, *args, **kwargs):
        if not process_state().memo(__name__).get("draws") or any(map(is_dispatched, args)):
            return call(self, *args, **kwargs)
        if facts_of(self.name).rule is None:
            return composed(self.name, args, kwargs, self)
        args = (*args, *attributes_of(self).values())[: WITHOUT_SEEDS.get(self.name)]
        return draw_whole(self.name, args, kwargs)

    return drawing_call


def set_item_of(kind, adopt):
    """`Tensor.__setitem__` by which a plain tensor becomes one of a kind, where it gets a part of one, or at one's
    places: `adopt(tensor, the other)` makes it so."""
    set_item = Tensor.__setitem__

    def item(tensor, index, value):
        given = tree_leaves((index, value), kind) if type(tensor) is Tensor else ()
        if given:
            adopt(tensor, given[0])[index] = value
        else:
            set_item(tensor, index, value)

    return item


def _assigning(in_place, function):
    """`plain += other`, which makes a new tensor where the other one is dispatched, as one card does on CPU."""

    def assigning(tensor, other):
        return (function if type(tensor) is Tensor and is_dispatched(other) else in_place)(tensor, other)

    return assigning


def _without_branch(function):
    """The cross-entropy of `mint`: a mean for smoothed labels is a quotient, without a branch on the sum of weights."""

    def cross_entropy(x, labels, weight, ignore_index, reduction, smoothing, *dims):
        if not smoothing or reduction != "mean" or not is_dispatched(x):
            return function(x, labels, weight, ignore_index, reduction, smoothing, *dims)
        loss = function(x, labels, weight, ignore_index, "sum", smoothing, *dims)
        counted = ops.cast(ops.not_equal(labels, ignore_index), labels.dtype)
        weights = counted if weight is None else ops.gather(weight, labels * counted, 0) * counted
        return loss / ops.cast(weights, loss.dtype).sum()

    return cross_entropy


def _of_values(make):
    """`Tensor(x)`, of the values of the whole of another one."""

    @wraps(make)
    def made(self, input_data=None, *args, **kwargs):
        if is_dispatched(input_data):
            input_data = input_data._whole("Tensor(x), where x or ops.stop_gradient(x) would do,")
        make(self, input_data, *args, **kwargs)

    return made


def _as_python(call):
    """What `@ms.jit` makes of a function; operator by operator for DTensors, of which it would compile the parts."""

    @wraps(call)
    def jitted(executor, *args, **kwargs):
        if not tree_leaves((args, kwargs), DTensor):
            return call(executor, *args, **kwargs)
        if executor.fn.__qualname__.startswith(private.OF_VMAP):
            refused()
        return executor.fn(*args, **kwargs)

    return jitted


def _of_whole(grad):
    """A gradient; while a Cell runs operator by operator of whole tensors only, since it is this rank's, and plain."""

    @wraps(grad)
    def gradient(self, *args):
        for tensor in tree_leaves(args, DTensor) if process_state().memo(__name__).get("draws") else ():
            tensor._whole("a gradient inside of construct, which is a plain tensor,")
        return grad(self, *args)

    return gradient


def refused(*_, **__):
    """What takes the place of functions that differentiate or vectorise another one."""
    raise ValueError(
        "a function is differentiated or vectorised (ms.grad, ops.vmap, …), of which neither operators nor parts of "
        "tensors are seen: write the derivative, or the whole batch, with operators, differentiate the sharded Cell "
        "from outside, or give a Cell a bprop"
    )


def _dispatching(call):
    """A `__call__` that passes calls with dispatched tensors on, and runs all others itself."""

    def dispatching_call(self, *args):
        for tensor in filter(is_dispatched, tree_leaves(args, Tensor)):
            operator = operator_named(self.name, lambda primitive, _, local: call(primitive, *local))
            return tensor.__fallback__(operator, (self, self.name, args))
        return call(self, *args)

    return dispatching_call
