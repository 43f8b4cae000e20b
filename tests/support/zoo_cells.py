"""What models that others wrote do, in words of our own: one small Cell for each kind."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import wraps

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

WIDTH = 8


def numbers(*shape, seed=0):
    return Tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


class Projected(nn.Cell):
    """A projection, in the attribute `inner`, and something after it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Dense(WIDTH, WIDTH)
        self.inner.weight.set_data(numbers(WIDTH, WIDTH, seed=1))


class OwnStrategies(Projected):
    """A method `shard` of another meaning: it takes the strategy of a product, and returns the Cell."""

    def construct(self, x):
        return ops.tanh(self.inner(x))

    def shard(self, product_strategy, bias_strategy=None):
        raise AssertionError("this method is no hook")


class TwoHalves(Projected):
    """Pieces along `axis`, the older name of the argument."""

    def construct(self, x):
        left, right = self.inner(x).chunk(2, axis=-1)
        return ops.sigmoid(left) * right


class ListsAsIndices(Projected):
    """Lists of slices, of lists, and with `None`, `...` or a tensor in them are read as tuples."""

    def construct(self, x):
        h = self.inner(x)
        middle = [slice(None)] * h.ndim
        middle[-1] = slice(2, 6)
        pairs = h[[[0, 1], [2, 3]]]
        return h[middle] * h[[..., 0]][:, None] + pairs.sum() + h[[None, 1]].sum() + h[[Tensor([3, 2]), 1]].sum()


class Asks(Projected):
    """`None`, or a word, is searched in a tensor: it isn't there, whatever its values."""

    def construct(self, x):
        h = self.inner(x)
        return h if None in h or "mask" in h else ops.relu(h)


class NamedProducts(Projected):
    """The operands of a sum and a product go by their names in the method."""

    def construct(self, x):
        h = self.inner(x).reshape(-1, 2, WIDTH // 2)
        bias = x.reshape(-1, 2, WIDTH // 2)[:, :1, :1]
        return bias.baddbmm(batch1=h, batch2=h.swapaxes(1, 2), beta=0.5, alpha=2.0)


class HalfInside(Projected):
    """A projection in float16 by `to_float`, between casts, and masks by slices with all five masks given."""

    def __init__(self):
        super().__init__()
        self.inner.to_float(ms.float16)
        self.lower = Tensor(np.tril(np.ones((16, 16), np.float32)))

    def construct(self, x):
        mask = ops.strided_slice(self.lower, (0, 0), (WIDTH, WIDTH), (1, 1), 0, 0, 0, 0, 0)
        return ops.matmul(self.inner(x).astype(ms.float32), mask) * 0.5


class HalfThroughout(Projected):
    """`to_float` of the root holds for operators that it calls itself, too."""

    def __init__(self):
        super().__init__()
        self.to_float(ms.float16)

    def construct(self, x):
        return ops.tanh(self.inner(x)) * 2.0


class OneStrategy(Projected):
    """A primitive with a strategy that cuts nothing, for tensors of other numbers of dims, too."""

    def __init__(self):
        super().__init__()
        self.cast = ops.Cast().shard(((1, 1, 1, 1),))
        self.scale = Parameter(numbers(1, seed=4), "scale")

    def construct(self, x):
        return self.cast(self.inner(x), ms.float32) * self.cast(self.scale, ms.float32)


class SharedInLists(nn.Cell):
    """A Cell in two plain lists and in a SequentialCell, a bound method in the place of another's `construct`."""

    def __init__(self):
        super().__init__()
        shared = nn.Dense(WIDTH, WIDTH)
        self.inner, self.stages = shared, [shared, nn.ReLU(), shared]
        self.whole = nn.SequentialCell(self.stages)
        self.adapted = nn.Dense(WIDTH, WIDTH)
        self.adapted.construct = self.doubled

    def doubled(self, x):
        return ops.dense(x, self.adapted.weight, self.adapted.bias) * 2

    def construct(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.whole(self.adapted(x))


@dataclass
class Output(OrderedDict):
    """A result that is a dataclass and a dict, and looks into its first field when it is made."""

    hidden: Tensor = None
    mask: Tensor = None

    def __post_init__(self):
        next(iter(self.hidden))
        self.update(hidden=self.hidden)

    def __reduce__(self):
        return Output, (self.hidden, self.mask)


class Encoded(Projected):
    def construct(self, x):
        return Output(ops.tanh(self.inner(x)))


class Outputs(nn.Cell):
    """Results of a Cell that are made anew by whoever copies them."""

    def __init__(self):
        super().__init__()
        self.inner, self.encoder = nn.Dense(WIDTH, WIDTH), Encoded()

    def construct(self, x):
        return self.inner(self.encoder(x)["hidden"])


class DotsInNames(Projected):
    """Parameters in a tuple, whose names have dots, as paths have; one as if it were of the Cell inside."""

    def __init__(self):
        super().__init__()
        names = ("token.0", "token.1", "inner.scale")
        self.tokens = ParameterTuple([Parameter(numbers(WIDTH, seed=3 + at), name) for at, name in enumerate(names)])

    def construct(self, x):
        return self.inner(x * self.tokens[0]) * self.tokens[1] + self.tokens[2]


class EqualNames(nn.Cell):
    """Two Parameters of one name: optimizers would refuse them, and a dict by name has one."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = Projected(), nn.Dense(WIDTH, WIDTH)
        for cell in (self.first.inner, self.inner):
            cell.weight.name = "self.weight"

    def construct(self, x):
        return self.inner(self.first.inner(x))


def keeping_scale(construct):
    """A decorator that takes an argument away, and hides its own signature."""

    @wraps(construct)
    def with_scale(self, *args, **kwargs):
        scale = kwargs.pop("scale", 1.0)
        return construct(self, *args, **kwargs) * scale

    return with_scale


class Scaled(Projected):
    @keeping_scale
    def construct(self, x, power=1):
        return self.inner(x) ** power


class Decorated(nn.Cell):
    """Calls with an argument that only the decorator of `construct` takes."""

    def __init__(self):
        super().__init__()
        self.inner, self.scaled = nn.Dense(WIDTH, WIDTH), Scaled()

    def construct(self, x):
        return self.inner(self.scaled(x, scale=0.5, power=2)) + self.scaled(x)


class Borrows(nn.Cell):
    def __init__(self, shared, others):
        super().__init__()
        self.shared, self.others = shared, others

    def construct(self, x):
        for other in self.others:
            x = other(x)
        return self.shared(ops.tanh(x))


class SharedByEqualLayers(Projected):
    """Two layers with one program call Cells of elsewhere: in a plain list, and in an attribute each."""

    def __init__(self):
        super().__init__()
        self.listed = nn.Dense(WIDTH, WIDTH)
        shared = nn.Dense(WIDTH, WIDTH)
        self.layers = nn.CellList([Borrows(shared, [self.listed, self.listed]) for _ in range(3)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.inner(x)


class Drawn(nn.Cell):
    def __init__(self, seed):
        super().__init__()
        self.drawn = nn.Dense(WIDTH, WIDTH, weight_init=numbers(WIDTH, WIDTH, seed=seed))

    def construct(self, x):
        return ops.tanh(self.drawn(x))


class Twice(nn.Cell):
    def __init__(self, seed):
        super().__init__()
        self.twin = Drawn(seed)

    def construct(self, x):
        return self.twin(self.twin(x))


class TwiceInEqualLayers(Projected):
    """Two layers with one program and unlike weights, which call a Cell of theirs twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Twice(seed) for seed in range(2)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.inner(x)


class Normed(Projected):
    def __init__(self):
        super().__init__()
        self.directions = Parameter(numbers(WIDTH, WIDTH, seed=5), "directions")

    def construct(self, x):
        lengths = ops.sqrt((self.directions**2).sum(1, keepdims=True))
        ops.assign(self.inner.weight, self.directions / lengths)
        return ops.tanh(self.inner(x))


class WeightsByNorm(Projected):
    """The weight of a Cell is written before each of its calls; its gradient stays its own, as on one card."""

    def __init__(self):
        super().__init__()
        self.normed = Normed()

    def construct(self, x):
        return self.inner(self.normed(self.normed(x))) + self.normed.inner.weight.sum()


class AddsToPart(Projected):
    """A part of a plain mask is added to in place, by numbers that aren't."""

    def construct(self, x):
        mask, h = ops.zeros((x.shape[0], WIDTH, WIDTH)), self.inner(x)
        mask[:, :, 2:] += h[:, None, 2:]
        h[:, 1:3] *= x[:, :2]
        return mask.sum(1) * h


class NoElements(Projected):
    """A Parameter without elements: no further tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = Parameter(Tensor(np.zeros((0, WIDTH), np.float32)), "tokens")

    def construct(self, x):
        return self.inner(ops.cat((self.tokens, x)))


KINDS = (OwnStrategies, TwoHalves, ListsAsIndices, Asks, NamedProducts, HalfInside, SharedInLists)
KINDS += (OneStrategy, Outputs, DotsInNames, NoElements, Decorated, SharedByEqualLayers, WeightsByNorm, AddsToPart)
KINDS += (TwiceInEqualLayers,)
