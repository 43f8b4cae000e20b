"""The layouts that an operator admits, as data: a factor mapping. Pure Python.

Every tensor dim of an operator's inputs and outputs is named by a *factor* (`m`, `k`, `n` of a matmul), and the
operator may be computed shard by shard along any factor. A dim that merges several factors, as in a reshape, lists them
major to minor. The notation follows OpenXLA Shardy's sharding rules; the linearity classes follow PyTorch DTensor's
tables of pointwise operators.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, cached_property

from mindformers_core.placement import axes_in


class TensorMeta:
    """Global shape, dtype name and layout of a tensor, without data. Interned by `tensor_meta`, so compare by identity.

    Rules get one in the place of every tensor argument, and look at `shape` and `dtype` only. A `constant` has no
    gradient, and neither has a tensor whose dtype is not a floating one: it needs no varying mark.
    """

    __slots__ = ("shape", "dtype", "layout", "local_shape", "constant", "differentiable")

    def __init__(self, shape, dtype, layout, constant):
        self.shape = shape
        self.dtype = dtype
        self.layout = layout
        self.local_shape = shape if layout is None else layout.local_shape(shape)
        self.constant = constant
        self.differentiable = is_float(dtype) and not constant

    @property
    def ndim(self):
        """Number of tensor dims."""
        return len(self.shape)

    def __repr__(self):
        return f"{self.dtype}{list(self.shape)}{self.layout if self.layout is not None else ''}"


@cache
def tensor_meta(shape, dtype, layout=None, constant=False):
    """The one `TensorMeta` of a global shape, a dtype name (`"float32"`), a `Layout`, and whether it is a constant.

    Raises:
        ValueError: the layout doesn't fit the shape.
    """
    return TensorMeta(shape, dtype, layout, constant)


def is_float(dtype):
    """Whether this dtype name is that of a floating type (real or complex)."""
    return "float" in dtype or "complex" in dtype


@dataclass(frozen=True)
class LocalCall:
    """How a rank calls an operator, where it doesn't with the arguments of the global call.

    Attributes:
        arguments: positional arguments of the distributed algorithm, where it doesn't call the operator, and so takes
            others, also attributes of a primitive: a `TensorMeta` in the place of every tensor.
        localize: `(arguments, local_output_shapes) -> arguments` where an argument depends on shapes (a reshape's
            target). Its input is the positional arguments followed by the values of named ones; it returns positional
            arguments only.
        halos: dim of the first input whose windows reach beyond a part -> the numbers of elements that a part takes
            from the one in front of it and from the one after it, and that pad the end of a dim that isn't sharded.
    """

    arguments: tuple | None = None
    localize: Callable | None = None
    halos: dict = field(default_factory=dict)

    def localized(self, args, kwargs, shapes, runs_algorithm=False):
        """The arguments of the local call, positional and named: those of the global call, or in their place others.

        Args:
            args, kwargs: of the global call.
            shapes: the local shape of every output.
            runs_algorithm: whether a distributed algorithm runs in the operator's place. Default: the operator runs.
        """
        if runs_algorithm and self.arguments is not None:
            return self.arguments, {}
        return (args, kwargs) if self.localize is None else (self.localize((*args, *kwargs.values()), shapes), {})


@dataclass(frozen=True)
class Signature:
    """The factor mapping of one operator call: the factors of every tensor dim, and the ways to shard them.

    Two of them are equal where their mappings are, whatever their local calls.

    Attributes:
        inputs: for every tensor input (in order of appearance in the arguments) and every dim a tuple of factor
            names, major to minor; `()` for a dim that is broadcast or has size 1.
        outputs: likewise for every output.
        sizes: size of every factor.
        reduced: factors that no output has, with the operation (`"sum"`, …) that combines the shards' results: where
            such a factor is sharded, the outputs are partial.
        whole: factors that can't be sharded. A factor of no input is one of them unless it is `made`, since local
            inputs don't determine a rank's shard of it.
        made: factors of no input that can be sharded, since the local call takes the local size, as of a dim that
            is broadcast.
        linear: groups of inputs. Partial sums may pass through the operator where they come in through all inputs of
            one group (a replicated member is turned into a partial first): `({0, 1},)` for an addition,
            `({0}, {1})` for a product, which is linear in one argument at a time.
        added: inputs that are added to a reduced result (a bias): they become partial where a reduced factor is
            sharded.
        distributed: factor -> name of the distributed algorithm that replaces the operator where the factor is
            sharded. A factor that is in neither an output nor `reduced` is whole again in the result.
        joint: group of factors -> name of the distributed algorithm that replaces the operator where one mesh axis
            cuts them together: every rank has a part along each, and combines its part along the first with all parts
            along the others. A tensor that has several of them is cut along the first that it has; each output has one.
        offers: groups of factors, each a tuple, that an axis may cut although no input is cut so: the price decides.
        undivided: whole factor -> the error, in words, where an axis that cuts it divides nothing that is offered;
            other whole factors are gathered.
        yielding: numbers of inputs whose declared cuts yield to the price where another input is cut so.
        run: name of a distributed algorithm that always replaces the operator.
        moves_only: whether the operator only moves or copies elements: on a strided part it gives the same elements of
            the result, so that a dim that merges factors may be sharded along a minor one.
        part: of its operations that is computed, where that is known before the call: of attention what isn't masked.
        local: the `LocalCall`.
    """

    inputs: tuple
    outputs: tuple
    sizes: dict
    reduced: dict = field(default_factory=dict)
    whole: frozenset = frozenset()
    linear: tuple = ()
    added: tuple = ()
    distributed: dict = field(default_factory=dict)
    joint: dict = field(default_factory=dict)
    offers: tuple = ()
    undivided: dict = field(default_factory=dict)
    yielding: tuple = ()
    run: str | None = None
    made: frozenset = frozenset()
    moves_only: bool = False
    part: float = 1.0
    local: LocalCall = field(default=LocalCall(), compare=False)

    def __post_init__(self):
        taken = {factor for dims in self.inputs for factors in dims for factor in factors}
        given = {factor for dims in self.outputs for factors in dims for factor in factors}
        assert not self.made & taken, (self.made, self.inputs)
        made = [{factor for factors in dims for factor in factors} for dims in self.outputs]
        assert all(each.intersection(group) for each in made for group in self.joint), (self.joint, self.outputs)
        object.__setattr__(self, "whole", frozenset(self.whole) | (given - taken - self.made))

    def __hash__(self):
        return hash((self.inputs, self.outputs, frozenset(self.sizes.items()), self.whole, self.run))

    def differences(self, other):
        """The names of the attributes in which another mapping differs."""
        return [each.name for each in fields(self) if each.compare and vars(self)[each.name] != vars(other)[each.name]]

    @property
    def algorithms(self):
        """The names of all distributed algorithms that it may ask for."""
        return {*self.distributed.values(), *self.joint.values(), self.run} - {None}

    def joint_axes(self, axes_of):
        """Group of `joint` -> the mesh axes that cut all its factors, where `axes_of` says which axes cut a factor."""
        found = {}
        for group in self.joint:
            first, *others = (axes_in(axes_of.get(factor, ())) for factor in group)
            found[group] = tuple(axis for axis in first if all(axis in axes for axes in others))
        return {group: axes for group, axes in found.items() if axes}

    @cached_property
    def output_shapes(self):
        """The global shape of every output."""
        return [tuple(math.prod(map(self.sizes.get, factors)) for factors in dims) for dims in self.outputs]


# names of one parameter, by a method, its operator, and classes
_SPELLINGS = {"dim", "dims", "axis", "axes"}, {"keepdim", "keepdims", "keep_dims"}, {"other", "mat2", "exponent"}


def spelled(named, parameters):
    """Named arguments by the names that `parameters`, names in order, have for them: MindSpore has several for some."""

    def own(name):
        alike = next((group for group in _SPELLINGS if name in group), ())
        return name if name in parameters else next((each for each in parameters if each in alike), name)

    return {own(name): value for name, value in named.items()}


def tensors_in(args):
    """All `TensorMeta` of an argument list in order, as a `Signature` numbers its inputs, tuples and lists included."""
    if isinstance(args, TensorMeta):
        return [args]
    return [tensor for each in args for tensor in tensors_in(each)] if isinstance(args, (tuple, list)) else []


def whole_signature(tensors, shapes, linear=()):
    """The `Signature` of an operator that can't be cut, by its inputs and the shapes of its results."""
    inputs, outputs = (
        tuple(tuple((f"{side}{place}.{dim}",) for dim in range(len(shape))) for place, shape in enumerate(every))
        for side, every in (("i", [tensor.shape for tensor in tensors]), ("o", shapes))
    )
    every = zip((*inputs, *outputs), (*(tensor.shape for tensor in tensors), *shapes))
    sizes = {name: size for names, shape in every for (name,), size in zip(names, shape)}
    return Signature(inputs, outputs, sizes, whole=frozenset(sizes), linear=linear)
