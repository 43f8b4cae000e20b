"""What the tests know of a model that was written without any thought of parallelism: `Example`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, nn

from mindformers_core.layout import layout

__all__ = ["Axes", "Example", "axes_of", "columns", "first", "floats", "ids", "rows"]


@dataclass(frozen=True)
class Axes:
    """Names of mesh axes by what they are for, as `layout` takes them; None where the mesh has none.

    Attributes:
        batch: cuts the batch.
        tensor: cuts weights.
        sequence: cuts sequences.
    """

    batch: str | None
    tensor: str | tuple | None
    sequence: str | None


def axes_of(mesh):
    """The `Axes` of a mesh whose axes are called dp, cp, tp, tp2."""
    names = mesh.axis_names
    tensor = tuple(name for name in names if name.startswith("tp"))
    return Axes("dp" if "dp" in names else None, tensor or None, "cp" if "cp" in names else None)


def whole(result):
    """The loss of a model that returns nothing else."""
    return result


def first(result):
    """The loss of a model that returns a tuple."""
    return result[0]


@dataclass(frozen=True)
class Example:
    """A model, its inputs, and the layouts that are declared from outside.

    Attributes:
        make: builds the Cell, with values.
        inputs: seed -> (arguments, named arguments): tensors of the global shapes.
        plan: `Axes` -> plan for `shard()`; None where the model is for capture only.
        loss: what the Cell returns -> its loss. `@ms.jit` parses it: a function of its own, no lambda.
        config: `Axes` -> what the Cell's own hooks are given.
    """

    make: Callable[[], nn.Cell]
    inputs: Callable[[int], tuple]
    plan: Callable[[Axes], dict] | None = None
    loss: Callable = whole
    config: Callable[[Axes], object] = lambda axes: None


def floats(seed, *shape):
    """Normal numbers."""
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def ids(seed, high, *shape):
    """Numbers of words, classes, …, below `high`."""
    return Tensor(np.random.default_rng(seed).integers(0, high, shape).astype(np.int32))


def columns(axes, bias=True):
    """A linear layer whose outputs are cut."""
    weight = {"weight": layout(axes.tensor, None)}
    return {"weight": {**weight, "bias": layout(axes.tensor)} if bias else weight}


def rows(axes):
    """A linear layer whose inputs are cut, and whose result is whole again."""
    return {"weight": {"weight": layout(None, axes.tensor)}}
