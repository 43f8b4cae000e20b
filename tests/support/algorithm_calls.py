"""Functions whose operators need a distributed algorithm where they are cut, by kind; each gives one tensor."""

import numpy as np
from mindspore import Tensor, mint, nn, ops

NUMBERS = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
TIES = np.float32(
    [[1, 3, 3, 2, 3, 0, 3, 1], [3, 0, 1, 3, 0, 0, 0, 0], [0, 0, 0, 0, -1, 0, 0, 0], [7] * 8]
)  # the largest twice in a shard, in several, everywhere
TABLE = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)  # large: else it is gathered before
INDICES = np.int32([[0, 1], [2, 3], [3, 0], [1, 1]])
LABELS = np.int32([7, 3, 0, 3])


class Several(nn.Cell):
    """What several functions of the same one or two tensors give."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def construct(self, x, y=None):
        return tuple([function(x) if y is None else function(x, y) for function in self.functions.values()])


SOFTMAX = {
    "softmax": lambda x: ops.softmax(x, 1),
    "log_softmax": lambda x: ops.log_softmax(x, -1),
    "logsumexp": lambda x: ops.logsumexp(x, 1),
    "logsumexp kept": lambda x: ops.logsumexp(x, 1, True),
    "logsumexp of all": lambda x: ops.logsumexp(x, (0, 1)),
}
EXTREMES = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: ops.amax(x, 1),
    "amax of both": lambda x: ops.amax(x, (0, 1), keepdims=True),
    "amin": lambda x: ops.amin(x, 1, keepdims=True),
    "ReduceMax": lambda x: ops.ReduceMax(keep_dims=True)(x, 1),
    "ops.max": lambda x: ops.max(x, 1)[0],
    "ops.min": lambda x: ops.min(x, 1, True)[0],
    "mint.max": lambda x: mint.max(x, 1)[0],
    "mint.min": lambda x: mint.min(x, 1, keepdim=True)[0],
    "ArgMaxWithValue": lambda x: ops.ArgMaxWithValue(1, True)(x)[1],
}
POSITIONS = {
    "argmax": lambda x: ops.argmax(x, 1),
    "argmin": lambda x: ops.argmin(x, 1, True),
    "method": lambda x: x.argmax(0),
    "of max": lambda x: ops.max(x, 1)[1],
    "of mint.min": lambda x: mint.min(x, 1)[1],
    "all": lambda x: ops.all(x > -3, 1),
    "any": lambda x: ops.any(x > 2.5),
}
MEANS = {
    "mean": lambda x: ops.mean(x, 1),
    "mean of all": lambda x: x.mean(),
    "mint.mean": lambda x: mint.mean(x, 0, keepdim=True),
    "sum": lambda x: ops.sum(x, 1),
}
LOOKUPS = {
    "gather": lambda x, i: ops.gather(x, i, 0),
    "gather columns": lambda x, i: ops.gather(x, i, 1),
    "gather_elements": lambda x, i: ops.gather_elements(x, 1, i),
    "index_select": lambda x, i: ops.index_select(x, 1, i[0]),
    "take": lambda x, i: x.take(i, 0),
    "slice": lambda x, i: x[1:2, 3:7],
}


def _one_hot(labels):
    return ops.one_hot(labels, 8, Tensor(1.0), Tensor(0.0))


LOSSES = {
    "cross_entropy": lambda x, labels: ops.cross_entropy(x, labels),
    "summed": lambda x, labels: ops.cross_entropy(x, labels, reduction="sum"),
    "ignoring": lambda x, labels: ops.cross_entropy(x, labels, ignore_index=3),
    "smoothed": lambda x, labels: ops.cross_entropy(x, labels, label_smoothing=0.1),
    "weighted": lambda x, labels: ops.cross_entropy(x, labels, Tensor(NUMBERS[0] ** 2)),
    "nll": lambda x, labels: ops.nll_loss(x, labels),
    "sparse": lambda x, labels: ops.SparseSoftmaxCrossEntropyWithLogits()(x, labels),
    "dense": lambda x, labels: ops.SoftmaxCrossEntropyWithLogits()(x, _one_hot(labels))[0],
    "NLLLoss": lambda x, labels: ops.NLLLoss("mean")(x, labels, Tensor(NUMBERS[0] ** 2))[0],
}
STATISTICS = {
    "norms": lambda x: ops.norm(x, 2, dim=1) + ops.norm(x, 3, dim=1, keepdim=True),
    "norm of all": lambda x: ops.LpNorm((0, 1), 1, True)(x),
    "products": lambda x: ops.prod(x, 1, True) + ops.prod(x),
    "var": lambda x: x.var(1) + x.var(axis=0, ddof=1, keepdims=True)[0, 0],
    "std": lambda x: x.std(axis=1) + ops.std(x, (0, 1)),
    "largest": lambda x: x.max(axis=1) * x.min(axis=1) + x.max(axis=1, return_indices=True)[0],
    "smallest": lambda x: x.min(axis=1, keepdims=True, return_indices=True)[0],
}
BANDS = {
    "triu": lambda x: ops.triu(x, 1) + ops.triu(x, -1),
    "tril": lambda x: ops.tril(x, 2) + ops.tril(x, -2),
    "band_part": lambda x: ops.matrix_band_part(x, 1, 2),
    "trace": lambda x: ops.trace(x) + x.trace(2, 1, 0),
}
SCANS = {
    "cumsum": lambda x: ops.cumsum(x, 1) + x.cumsum(-1),
    "sums behind": lambda x: ops.CumSum(True, True)(x, 1),
    "cumprod": lambda x: ops.cumprod(x, 1),
    "products in front": lambda x: ops.CumProd(True)(x, 1),
    "logarithms": lambda x: ops.logcumsumexp(x, 1),
    "cummax": lambda x: ops.cummax(ops.stop_gradient(x), 1)[0],
    "place of cummin": lambda x: ops.cummin(ops.stop_gradient(x), 1)[1],
    "topk": lambda x: ops.topk(x, 3)[0],
    "places of topk": lambda x: ops.topk(x, 3)[1],
    "more than a part": lambda x: ops.topk(x, 6, 1, False)[0],
}
IMAGES = np.random.default_rng(2).normal(size=(2, 4, 8, 4)).astype(np.float32)
KERNELS = np.random.default_rng(3).normal(size=(4, 4, 3, 3)).astype(np.float32)
WINDOWS = {
    "conv2d": lambda x, w: ops.conv2d(x, w, pad_mode="same"),
    "every second": lambda x, w: ops.conv2d(x, w, None, 2, "pad", 1),
    "wide": lambda x, w: ops.conv2d(x, w, None, 1, "pad", 5, 5),
    "max_pool2d": lambda x, w: ops.max_pool2d(x, 3, 1, 1),
    "places": lambda x, w: ops.max_pool2d(x, 3, 1, 1, return_indices=True)[1],
    "MaxPool": lambda x, w: ops.MaxPool(3, 2, "same")(x),
    "avg_pool2d": lambda x, w: ops.avg_pool2d(x, 3, 1, 1),
    "group_norm": lambda x, w: ops.group_norm(x, 2),
    "nearest": lambda x, w: ops.interpolate(x, size=(16, 8), mode="nearest"),
}
SEGMENTS = Tensor(np.int32([2, 0, 1, 0, 2, 2, 1, 0] * 8))
ROWS = TABLE[:, 0:1].repeat(16, 1).round(1)  # every extreme of a segment several times
SCATTERS = {
    "elements": lambda x, i: ops.tensor_scatter_elements(x, i[:, :1].broadcast_to((4, 16)), x[4:8], 0, "add"),
    "elements of columns": lambda x, i: mint.scatter(x, 1, i[:1].broadcast_to((64, 2)), x[:, 3:5]),
    "slices": lambda x, i: (x * 2).index_add(0, i[:, 1], ops.tanh(x[:4])),
    "coordinates": lambda x, i: ops.tensor_scatter_update(x, i[:3], x[0, :3]),
    "added coordinates": lambda x, i: ops.tensor_scatter_add(x, i, x[0, :4]),
    "several": lambda x, i: x.index_put((i[:, 0], i[:, 1]), x[0, :4], accumulate=True),
    "looked up": lambda x, i: x[i[:, 0], i[:, 1]],
    "largest": lambda x, i: ops.unsorted_segment_max(x, SEGMENTS, 3),
    "smallest": lambda x, i: ops.unsorted_segment_min(x, SEGMENTS, 4)[:3],
    "sums": lambda x, i: ops.unsorted_segment_sum(x, SEGMENTS, 4),
}
CASES = {  # name -> functions, and their inputs
    "softmax": (SOFTMAX, [NUMBERS]),
    "extremes": (EXTREMES, [TIES]),
    "positions": (POSITIONS, [TIES]),
    "positions from below": (POSITIONS, [-TIES]),
    "means": (MEANS, [NUMBERS]),
    "lookups in rows": (LOOKUPS, [TABLE, INDICES]),
    "lookups in columns": (LOOKUPS, [TABLE[:4], INDICES]),
    "scatters": (SCATTERS, [ROWS, INDICES]),
    "losses": (LOSSES, [NUMBERS, LABELS]),
    "statistics": (STATISTICS, [NUMBERS]),
    "bands": (BANDS, [NUMBERS]),
    "scans": (SCANS, [NUMBERS]),
}
