"""Models for the tests of capture: those of `models`, and some that do unusual things. `MODELS`."""

from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from models import EXAMPLES, Classifier, llama
from models.example import floats, ids
from support.small_cells import cell_of

__all__ = ["MODELS", "Closure", "Function", "Passing", "assert_unchanged", "small_llama", "snapshot"]


class Function(nn.Cell):
    """A Cell that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, *inputs):
        return self.function(*inputs)


def snapshot(cell):
    """All that a capture must not change."""
    values = {p.name: (p.asnumpy().copy(), p.device, p.requires_grad) for p in cell.get_parameters()}
    cells = {name: (type(child), dict(child.__dict__)) for name, child in cell.cells_and_names()}
    return values, cells


def assert_unchanged(cell, before):
    values, cells = before
    for parameter in cell.get_parameters():
        value, device, trainable = values[parameter.name]
        np.testing.assert_array_equal(parameter.asnumpy(), value)
        assert (parameter.device, parameter.requires_grad) == (device, trainable)
    for name, child in cell.cells_and_names():
        kind, attributes = cells[name]
        assert type(child) is kind
        assert child.__dict__.keys() == attributes.keys()
        assert all(child.__dict__[key] is value for key, value in attributes.items())


def small_llama(**changes):
    """A Llama of two layers with sizes that are all different, and what makes a batch."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_key_value_heads": 2}
    return llama(**{**sizes, **changes}), lambda seed: ((ids(seed, 32, 2, 8),), {"labels": ids(seed + 9, 32, 2, 8)})


def classifier():
    """With a batch norm, whose statistics a training step changes."""
    return Classifier(nn.BatchNorm2d), lambda seed: ((floats(seed, 2, 3, 8, 8), ids(seed, 4, 2)), {})


class Structures(nn.Cell):
    """Tuples, lists and dicts in and out, None, `*args`, `**kwargs`, non-tensors, one tensor twice."""

    def construct(self, pair, table, *more, scale=1.0, nothing=None, **named):
        first, (second, third) = pair
        assert nothing is None
        x = first * scale + second - third + table["bias"]
        for extra in more:
            x = x + extra
        return [x, (x, named["other"])], {"size": x.shape, "dims": x.ndim, "none": None, "in": table["bias"]}


def structures():
    def around(self, x, y):
        table = {"bias": y, "name": "table"}
        (a, (b, c)), facts = self.inner((x, [y, x]), table, y, y, other=x, scale=2.0)
        return a + b, c, facts

    return cell_of(around, inner=Structures()), lambda seed: ((floats(seed, 2, 3), floats(seed + 1, 2, 3)), {})


class Shared(nn.Cell):
    """One Cell at two places and called several times with several shapes, one parameter in two Cells, a CellDict."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(4, 4)
        self.again = self.first
        self.parts = nn.CellDict({"a": nn.Dense(4, 4, has_bias=False), "b": nn.Tanh()})
        self.parts["a"].weight = self.first.weight
        scales = Parameter(Tensor([2.0], ms.float32), name="s0"), Parameter(Tensor([3.0], ms.float32), name="s1")
        self.scales = ParameterTuple(scales)
        self.table = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))

    def construct(self, x, index):
        y = self.first(x) * self.scales[0]
        y = self.again(y.reshape(-1, 4)).reshape(x.shape) + self.parts["b"](self.parts["a"](y)) * self.scales[1]
        return y + self.table[index] + ops.matmul(y, self.parts["a"].weight) + self.table[1]


def shared():
    return Shared(), lambda seed: ((floats(seed, 2, 3, 4), ids(seed, 3, 2, 3)), {})


class Closure(nn.Cell):
    """Passes a tensor on by an attribute, and one by a list that the other Cell fills."""

    def __init__(self):
        super().__init__()
        self.reader, self.writer = Reader(), Writer()

    def construct(self, x):
        kept = []
        y = self.writer(x * 2, kept, self.reader)
        return self.reader(y) + kept[0]


class Writer(nn.Cell):
    def construct(self, x, kept, reader):
        kept.append(ops.exp(x))
        reader.seen = ops.sin(x)
        return x + 1


class Reader(nn.Cell):
    def __init__(self):
        super().__init__()
        self.seen = None

    def construct(self, x):
        return x * self.seen


class Passing(nn.Cell):
    """Gives its arguments back."""

    def construct(self, x, y=None):
        return x if y is None else (x, y)


def built(example):
    """A model of `models`, and what makes a batch."""
    return example.make(), example.inputs


MODELS = {name: partial(built, example) for name, example in EXAMPLES.items()} | {
    "small llama": small_llama,
    "tied llama": lambda: small_llama(tie_word_embeddings=True),
    "batch norm": classifier,
    "structures": structures,
    "shared": shared,
    "closure": lambda: (Closure(), lambda seed: ((floats(seed, 2, 3),), {})),
}
