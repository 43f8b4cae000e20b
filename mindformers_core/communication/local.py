"""The local parts of collectives, without gradient and without communication: cuts, paddings, scales, identities."""

import numpy as np
from mindspore import Tensor, dtype as mstype, nn, ops
from mindspore.ops import constexpr

from mindformers_core.mindspore_private import outside_of_meta

# unlike `ops.zeros_like` and `ops.pad` without branches, which a graph's backward can't always compile
_ZEROS_LIKE = ops.ZerosLike()
_PAD = ops.PadV3()
_SCATTER = ops.TensorScatterElements()


@constexpr
def part_length(shape, count, dim):
    """The size of each of `count` equal parts along `dim`; computed while a graph is compiled.

    MindSpore can't compile a function with a branch that a forward pass and a `bprop` share, if PyNative differentiates
    the graph, as pipeline stages do. Here the graph has none.
    """
    if shape[dim] % count != 0:
        raise ValueError(f"a tensor of shape {shape} can't be cut along dim {dim} into {count} equal parts")
    return shape[dim] // count


def chunk(x, index, count, dim):
    """Part `index` of `count` equal parts of `x` along `dim`."""
    length = part_length(x.shape, count, dim)
    before = (0,) * dim
    after = x.shape[dim + 1 :]
    return ops.slice(x, before + (index * length,) + (0,) * len(after), x.shape[:dim] + (length,) + after)


def pad_part(x, index, count, dim, fill):
    """`x` as part `index` of `count` equal parts along `dim`; the others hold the scalar tensor `fill`."""
    length = x.shape[dim]
    paddings = (0, 0) * (len(x.shape) - 1 - dim) + (index * length, (count - 1 - index) * length)
    return _PAD(x, paddings, ops.cast(fill, x.dtype))


def parts_of_rows(x, counts, ranks, length):
    """Parts of so many rows, at whose begin are as many of x (rows, …), in turn, as `counts` float32 (1, ranks) says.

    Behind them are any.
    """
    places, _ = _places(counts, ranks, length)
    return ops.gather(x, ops.reshape(ops.minimum(places, x.shape[0] - 1), (-1,)), 0)


def rows_of_parts(x, counts, ranks, rows):
    """The inverse: x (rows, …), of which those behind all counts are zeros."""
    total = x.shape[0]
    places, is_row = _places(counts, ranks, total // ranks)
    places = ops.reshape(ops.where(is_row, places, rows), (-1,))
    taken = _SCATTER(filled(rows + 1, total), places, first_numbers(total))[:rows]
    found = ops.gather(x, ops.minimum(taken, total - 1), 0)
    is_filled = ops.reshape(ops.less(taken, total), (-1, *[1] * (len(x.shape) - 1)))
    return ops.where(is_filled, found, ops.cast(0, x.dtype))


def _places(counts, ranks, length):
    """For each row of each part (ranks, length) its place in turn; and whether there is such a row."""
    counts = ops.cast(ops.reshape(counts, (ranks, 1)), mstype.int32)
    numbers = ops.reshape(first_numbers(length), (1, length))
    return ops.cumsum(counts, 0) - counts + numbers, ops.less(numbers, counts)


@constexpr
def first_numbers(count):
    """0 … count - 1; `ops.arange` and its cast take CPU as long as a product of the numbers' rows."""
    with outside_of_meta():
        return Tensor(np.arange(count, dtype=np.int32))


@constexpr
def filled(shape, value):
    """An int32 tensor of a shape, or of so many."""
    with outside_of_meta():
        return Tensor(np.full(shape, value, np.int32))


class _Local(nn.Cell):
    """A Cell that PyNative calls directly: it has no hooks and no parameters."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def __call__(self, x):
        return self.construct(x)


class Identity(_Local):
    """The collectives over one rank."""

    def __call__(self, x):
        return x

    def construct(self, x):
        # an operator, which the compiler removes: a Cell with a bprop that returns a Parameter itself
        # returns the one of its first call at every later one
        return ops.cast(x, x.dtype)


class Alias(Identity):
    """An identity for a forward pass: the result is a new tensor in the same memory.

    An input that a Cell with a `bprop` returns is a view for PyNative, and operators that save a view save a copy.
    """

    def __call__(self, x):
        return ops.stop_gradient(x)


class Reshape(_Local):
    """The elements in dims of these sizes."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def construct(self, x):
        return ops.reshape(x, self.shape)


class Slice(_Local):
    """This rank's part along `dim`."""

    def __init__(self, group, dim):
        super().__init__()
        self.index = group.index
        self.size = group.size
        self.dim = dim

    def construct(self, x):
        return chunk(x, self.index, self.size, self.dim)


class SliceOfGradient(Slice):
    """A contiguous `Slice`: MindSpore's gradients of some split operators assume contiguous gradients."""

    def __call__(self, x):
        part = self.construct(x)
        return part if part.is_contiguous() and not part.storage_offset() else ops.cat((part,), self.dim)


class Pad(Slice):
    """This rank's part along `dim` of an otherwise zero tensor."""

    def __init__(self, group, dim):
        super().__init__(group, dim)
        self.zero = Tensor(0, mstype.float32)

    def construct(self, x):
        return pad_part(x, self.index, self.size, self.dim, self.zero)


class Keep(_Local):
    """The tensor on the first rank of the group, zeros on the others."""

    def __init__(self, group):
        super().__init__()
        self.keeps = Tensor(group.index == 0)

    def construct(self, x):
        return ops.select(self.keeps, x, _ZEROS_LIKE(x))


class Scale(_Local):
    """The result of a Cell times a constant. Floats only: the average of integers is none."""

    def __init__(self, cell, factor):
        super().__init__()
        self.cell = cell
        self.factor = factor

    def construct(self, x):
        if x.dtype in (mstype.int8, mstype.int16, mstype.int32, mstype.int64, mstype.uint8, mstype.bool_):
            raise TypeError("avg over ranks needs floats, but the tensor holds integers: cast it, or use sum")
        return self.cell(x) * self.factor
