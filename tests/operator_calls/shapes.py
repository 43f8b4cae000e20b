"""Operators that reshape, join and cut."""

import numpy as np

from operator_calls.call import SCALAR, Call, X, Y, Z, f, one


def _strided(x, begin, end, strides, begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0):
    index = []
    for i, step in enumerate(strides):
        has = [bool(mask >> i & 1) for mask in (begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask)]
        bounds = slice(None if has[0] else begin[i], None if has[1] else end[i], step)
        index.append(... if has[2] else None if has[3] else begin[i] if has[4] else bounds)
    return x[tuple(index)]


def _slice(x, begin, size):
    return x[tuple(slice(b, None if s == -1 else b + s) for b, s in zip(begin, size))]


def _narrow(x, dim, start, length):
    return np.moveaxis(np.moveaxis(x, dim, 0)[start:][:length], 0, dim)


def _split(x, size, dim=0, **named):
    dim = named.get("axis", dim)
    cuts = np.cumsum(size)[:-1] if isinstance(size, (tuple, list)) else range(size, x.shape[dim], size)
    return tuple(np.split(x, list(cuts), dim))


def _squeeze(x, dim=None):
    dims = [d % x.ndim for d in one((dim,))] if dim not in (None, ()) else range(x.ndim)
    return x.reshape([size for d, size in enumerate(x.shape) if size != 1 or d not in dims])


def _tile(x, *counts, **named):
    return np.tile(x, one(counts or tuple(named.values())))


def _expand(x, *shape):
    shape = one(shape)
    new = len(shape) - x.ndim
    return np.broadcast_to(x, [x.shape[d - new] if size == -1 else size for d, size in enumerate(shape)])


def _padded(x, padding, value):
    pairs = list(zip(padding[::2], padding[1::2]))[::-1]
    return np.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs, constant_values=value)


CALLS = [
    Call("Reshape", [Y, (8, 8)], lambda x, *s: x.reshape(one(s))),
    Call("Reshape", [Y, 2, -1], lambda x, *s: x.reshape(one(s))),
    Call("Reshape", [Z, (4, 2, 2, 2, 4)], lambda x, *s: x.reshape(one(s))),
    Call("Reshape", [f(6, 4), (4, 6)], lambda x, *s: x.reshape(one(s))),
    Call("Reshape", [f(1, 4, 1, 12), (4, 4, 3, 1)], lambda x, *s: x.reshape(one(s))),
    Call("Reshape", [Z], lambda x, *s, shape=(): x.reshape(one(s or (shape,))), {"shape": (16, -1)}),
    Call("Reshape", [SCALAR, (1, 1)], lambda x, *s: x.reshape(one(s))),
    Call("ViewAs", [Z, f(16, 8)], lambda x, other: x.reshape(other.shape)),
    Call("Flatten", [Z], lambda x: x.reshape(x.shape[0], -1)),
    Call("FlattenExt", [Z, 1], lambda x, start_dim, end_dim=-1: x.reshape(x.shape[0], -1)),
    Call("FlattenExt", [Z], lambda x, end_dim=-1: x.reshape(-1, x.shape[-1]), {"end_dim": 1}),
    Call("Transpose", [Y, (2, 0, 1)], lambda x, *order: x.transpose(one(order))),
    Call("Transpose", [Y, 0, -1, 1], lambda x, *order: x.transpose(one(order))),
    Call("TransposeExtView", [Y], lambda x, dim0, dim1: x.swapaxes(dim0, dim1), {"dim0": 0, "dim1": -1}),
    Call("TExt", [X], np.transpose),
    Call("ExpandDims", [X, -1], np.expand_dims),
    Call("Squeeze", [f(1, 4, 1, 8)], _squeeze),
    Call("Squeeze", [f(1, 4, 1, 2), ()], _squeeze),
    Call("Squeeze", [f(2, 4)], _squeeze),
    Call("Squeeze", [f(2, 4, 1), (0, -1)], _squeeze),
    Call("BroadcastTo", [f(4, 1), (2, -1, 8)], _expand),
    Call("BroadcastTo", [X, 2, 4, 8], _expand),
    Call("ExpandAs", [f(4, 1), Y], lambda x, other: np.broadcast_to(x, other.shape)),
    Call("Tile", [X, (2, 1)], _tile),
    Call("Tile", [X], _tile, {"dims": (4, 1, 2)}),
    Call("Tile", [Y, (2,)], _tile),
    Call("RepeatInterleaveInt", [X, 2, 0], np.repeat),
    Call("DeprecatedRepeatInterleave", [X, 2], np.repeat),
    Call("ReverseV2", [X, (0,)], np.flip),
    Call("Roll", [X, 1, 1], np.roll, runs="meta"),
    Call("Concat", [(Y, f(2, 2, 8)), 1], lambda parts, dim: np.concatenate(parts, dim)),
    Call("StackExt", [[X, f(4, 8)], -1], lambda parts, dim: np.stack(parts, dim), runs="meta"),
    Call("Split", [X, 1, 2], lambda x, dim, number: tuple(np.split(x, number, dim))),
    Call("SplitTensor", [X, 3, 1], _split),
    Call("SplitWithSize", [X, (2, 6), -1], _split),
    Call("DeprecatedSplit", [X, 4], _split, {"axis": 1}),
    Call("Chunk", [X, 3, 1], lambda x, number, dim: _split(x, 3, dim)),
    Call("DeprecatedChunk", [X, 3, 1], lambda x, number, dim: _split(x, 3, dim)),
    Call("UnstackExtView", [Y, 0], lambda x, dim: tuple(x)),
    Call("Unstack", [Y], lambda x, axis: tuple(np.moveaxis(x, axis, 0)), {"axis": 1}),
    Call("StridedSlice", [X, (0, 2), (4, 8), (1, 2), 0, 0, 0, 0, 0], _strided),
    Call("StridedSlice", [X, (0, 1), (4, 2), (1, 1), 1, 1, 0, 0, 2], _strided),
    Call(
        "StridedSlice",
        [Y, (-2, 0, 0, -1), (2, 0, 0, 9), (1, 1, 1, 1), 0, 0, 2, 4, 0],
        _strided,
        broken="more entries than dims",
    ),
    Call("StridedSlice", [Y, (1,), (2,), (1,)], _strided),
    Call("Slice", [X, (0, 2), (4, -1)], _slice, gradient="MindSpore's gradient takes no -1"),
    Call("Narrow", [X, 1, 0, 4], _narrow),
    Call("Narrow", [X, 0, 0, 4], _narrow),
    Call("SliceExt", [X, 1, 2, 8, 2], lambda x, dim, start, end, step: x[:, start:end:step]),
    Call("SliceExt", [X, 1, 0, 100, 1], lambda x, dim, start, end, step: x[:, start:end:step]),
    Call("SelectExtView", [Y, 1, 2], lambda x, dim, index: np.take(x, index, dim)),
]
OTHERS = [
    Call("LinSpace", [np.array(1.0), np.array(4.0), 4], np.linspace, gradient="it has none"),
    Call("BroadcastToView", [X, (2, 4, 8)], np.broadcast_to),
    Call("ChunkView", [X, 2, 1], lambda x, number, dim: tuple(np.split(x, number, dim))),
    Call("SplitTensorView", [X, 4, 1], lambda x, size, dim: tuple(np.split(x, 2, dim))),
    Call("SplitWithSizeView", [X, (2, 6), 1], lambda x, sizes, dim: tuple(np.split(x, [2], dim))),
    Call("DeprecatedSplit", [X, (2, 6)], lambda x, sizes, axis: tuple(np.split(x, [2], axis)), {"axis": 1}),
    Call("ExpandDimsView", [X, 1], np.expand_dims),
    Call("DeprecatedUnsqueeze", [X, 1], np.expand_dims),
    Call("DeprecatedTranspose", [Y, 2, 0, 1], lambda x, *order: x.transpose(order)),
    Call("TransposeView", [X, (1, 0)], np.transpose),
    Call("View", [X, (8, 4)], np.reshape),
    Call("Repeat", [X, 2, 1], lambda x, *counts: np.tile(x, counts)),
    Call("RepeatInterleaveInt", [X, 2, 1, None], lambda x, count, dim, _: np.repeat(x, count, dim)),
    Call("Stack", [[X, f(4, 8)], 1], np.stack),
    Call("NarrowView", [X, 1, 0, 4], lambda x, dim, start, length: x[:, start : start + length]),
    Call("SelectExtView", [X, -1, -1], lambda x, dim, index: x[:, -1]),
    Call("SliceExtView", [X, 1, 2, 8, 2], lambda x, dim, start, end, step: x[:, start:end:step]),
    Call("SliceExt", [X, 0, 1, 3], lambda x, dim, start, end: x[start:end]),
    *(
        Call(name, [Y, *given], _padded, runs=runs)
        for name, runs in (("ConstantPadND", "meta"), ("PadV3", "CPU"))
        for given in (((1, 2), 0.0), ((0, 0, 2, 2), 1.5))
    ),
]
