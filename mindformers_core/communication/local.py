"""The local halves of differentiable collectives: what a rank does alone. Plain, without gradient."""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_core.communication.raw import chunk, placed

__all__ = ["Keep", "Pad", "Scale", "Slice", "SliceOfGradient", "Then"]


# unlike `ops.zeros_like` without branches, which a graph's backward can't always compile
_ZEROS_LIKE = ops.ZerosLike()


class _Local(nn.Cell):
    """A Cell that PyNative calls directly: it has no hooks and no parameters."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def __call__(self, x):
        return self.construct(x)


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
    """As `Slice`, but contiguous: MindSpore's gradient of some splits takes every gradient for that."""

    def __call__(self, x):
        part = self.construct(x)
        return part if part.is_contiguous() and not part.storage_offset() else ops.cat((part,), self.dim)


class Pad(_Local):
    """This rank's part along `dim` of an otherwise zero tensor."""

    def __init__(self, group, dim):
        super().__init__()
        self.index = group.index
        self.size = group.size
        self.dim = dim
        self.zero = Tensor(0, mstype.float32)

    def construct(self, x):
        return placed(x, self.index, self.size, self.dim, self.zero)


class Keep(_Local):
    """The tensor on the rank at place `index` of the group, zeros on the others."""

    def __init__(self, group, index):
        super().__init__()
        self.keeps = Tensor(group.index == index)

    def construct(self, x):
        return ops.select(self.keeps, x, _ZEROS_LIKE(x))


class Scale(_Local):
    """The tensor times a constant. Floats only: the average of integers is none."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def construct(self, x):
        if x.dtype in (mstype.int8, mstype.int16, mstype.int32, mstype.int64, mstype.uint8, mstype.bool_):
            raise TypeError("avg over ranks needs floats, but the tensor holds integers: cast it, or use sum")
        return x * self.factor


class Then(_Local):
    """One Cell after the other."""

    def __init__(self, first, second):
        super().__init__()
        self.first = first
        self.second = second

    def construct(self, x):
        return self.second(self.first(x))
