"""One call of an operator: its name, arguments, and what it computes, in NumPy."""

import zlib
from dataclasses import dataclass, field

import numpy as np

__all__ = [
    "CUBE", "SCALAR", "Call", "Draw", "X", "Y", "Z", "bools", "f", "ints", "is_many", "local", "one", "p", "positive",
    "increasing", "shaped",
]  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """An array that is drawn for every call that has it: `draw` takes a generator and the shape."""

    shape: tuple
    draw: object

    def then(self, function):
        """What a function makes of it, elementwise."""
        return Draw(self.shape, lambda random, shape: function(self.draw(random, shape)))

    def __truediv__(self, number):
        return self.then(lambda array: array / number)

    def __add__(self, number):
        return self.then(lambda array: array + number)


def f(*shape):
    """Random numbers, none near 0."""
    return Draw(shape, lambda random, shape: random.uniform(0.5, 2, shape) * random.choice([-1, 1], shape))


def positive(*shape):
    """Random positive numbers, none near 0."""
    return f(*shape).then(np.abs)


def increasing(*shape):
    """Random numbers, each row in its order."""
    return f(*shape).then(np.sort)


def p(*shape):
    """Probabilities."""
    return Draw(shape, lambda random, shape: random.uniform(0.1, 0.9, shape))


def ints(high, *shape):
    """Random ints below `high`."""
    return Draw(shape, lambda random, shape: random.integers(0, high, shape))


def bools(*shape):
    """Random truth values."""
    return Draw(shape, lambda random, shape: random.random(shape) > 0.5)


X, Y, Z, CUBE = f(4, 8), f(2, 4, 8), f(4, 4, 8), f(4, 8, 2)
SCALAR = np.array(3.0)


@dataclass
class Call:
    """One call: arrays stand for tensors. Those that are drawn are seeded by the call's text.

    Attributes:
        function: takes the operator's arguments and computes it.
        runs: where MindSpore can run it here: "CPU"; "meta" where only shapes are inferred; "" nowhere.
        broken: why what it gives on CPU is no measure, whatever form it is written in.
        gradient: why its gradient isn't compared.
    """

    name: str
    args: list
    function: object
    named: dict = field(default_factory=dict)
    runs: str = "CPU"
    broken: str = ""
    gradient: str = ""

    def __post_init__(self):
        random = np.random.default_rng(zlib.crc32(str(self).encode()))
        self.args = _drawn(list(self.args), random)
        self.named = {name: _drawn(value, random) for name, value in self.named.items()}

    def __str__(self):
        shown = [*map(_show, self.args), *(f"{name}={_show(value)}" for name, value in self.named.items())]
        return f"{self.name}({', '.join(shown)})"


def _drawn(value, random):
    if isinstance(value, (tuple, list)):
        return type(value)([_drawn(each, random) for each in value])
    return value.draw(random, value.shape) if isinstance(value, Draw) else value


def _show(value):
    if is_many(value):
        return "[" + ", ".join(map(_show, value)) + "]"
    return str(list(value.shape)) if isinstance(value, (Draw, np.ndarray)) else str(value)


def is_many(value):
    """Whether an argument is a tuple or list of tensors."""
    return isinstance(value, (tuple, list)) and bool(value) and isinstance(value[0], (Draw, np.ndarray))


def local(array):
    """An array as MindSpore takes it on CPU: floats and indices of 32 bits."""
    array = np.asarray(array)
    narrow = {"f": np.float32, "i": np.int32 if array.ndim else array.dtype}
    return array.astype(narrow.get(array.dtype.kind, array.dtype))


def one(values):
    """The values, which may be given as one tuple."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else tuple(values)


def shaped(*shapes):
    """A function that gives zeros of these shapes: of an operator whose numbers nobody compares."""
    return lambda *_, **__: tuple(map(np.zeros, shapes)) if len(shapes) > 1 else np.zeros(shapes[0])
