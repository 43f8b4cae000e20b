"""Collectives of large tensors in graphs, between the ranks of one host, through memory that they share.

A graph on CPU calls functions of Python in an order that differs from rank to rank, so that they can't wait for each
other; the order of its all-reduces doesn't. So a function copies the tensor into a segment of this rank's memory, an
all-reduce tells all ranks the places of the segments of all, and another function makes the result of what is there.
"""

import numpy as np
from mindspore import dtype as mstype, nn, ops

from mindformers_core.communication.local import part_length
from mindformers_core.communication.shared_memory import PAGE, free_segment, segment_like
from mindformers_core.redistribution.arrays import exchanged

_DIMS = {"all_gather": ("longer",), "reduce_scatter": ("shorter",), "all_to_all": ("longer", "shorter")}


class BySegments(nn.Cell):
    """A collective in a graph.

    Args:
        shared: the `SharedGroup` of its ranks.
        kind, arguments: as of `RawCollective`.
        reduce: MindSpore's all-reduce sum of these ranks.
    """

    def __init__(self, shared, kind, arguments, reduce):
        super().__init__(auto_prefix=False)
        index, size, others = shared.index, shared.size, shared.connections.keys()
        self.reduce = reduce

        def write(x):
            places = np.zeros(size, np.float32)  # in which all pages of the memory have exact numbers
            places[index] = shared.segments.write([_bytes(x)], others) // PAGE
            return places

        def read(places, x):
            offsets = [int(place) * PAGE for place in places]
            tensors = [
                x if place == index else segment_like(shared.reserved[place], offset, x)
                for place, offset in enumerate(offsets)
            ]
            result = exchanged(kind, tensors, index, *arguments)
            result = result.copy() if kind == "permute" else result  # which is a segment itself
            for place in others:
                free_segment(shared.reserved[place], offsets[place], index)
            return result

        def shape_of(_, shape):
            return _shape(kind, arguments, size, shape)

        self.write = ops.Custom(write, lambda _: [size], lambda _: mstype.float32, "pyfunc")
        self.read = ops.Custom(read, shape_of, lambda _, dtype: dtype, "pyfunc")

    def construct(self, x):
        if x.dtype == mstype.bfloat16:  # which MindSpore passes to no function
            return ops.cast(self._carried(ops.cast(x, mstype.float32)), x.dtype)
        return self._carried(x)

    def _carried(self, x):
        return self.read(self.reduce(self.write(x)), x)


def _bytes(x):
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _shape(kind, arguments, size, shape):
    """The shape of a collective's result, for that of its tensor."""
    shape = list(shape)
    for what, dim in zip(_DIMS.get(kind, ()), arguments):
        shape[dim] = shape[dim] * size if what == "longer" else part_length(shape, size, dim)
    return shape
