"""Scans and largest elements along a cut dim: as authors call them, verified on simulated ranks."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from support.verified_calls import Sample, numbers, stopped

X, CUBE, AROUND = numbers(4, 8), numbers(4, 8, 4), numbers(4, 8) - 1.2
DISTINCT = np.random.default_rng(3).permutation(32).reshape(4, 8).astype(np.float32)
TIES = np.float32([[1, 3, 3, 0, 3, 3, 1, 4], [2] * 8, [0, 1] * 4, [4, 1, 2, 4, 0, 0, 4, 5]])
SOME_NAN = np.where((TIES == 4) | (TIES == 1), np.float32(np.nan), TIES)
MIXED = (False, True)


def whole_numbers(x):
    return ops.cast(x, ms.int32)


def integer_sums(x):
    return [ops.cumsum(x, 1), x.cumsum(0), ops.cumprod(x, 1)]


SCANS = (
    Sample("cumsum", lambda x: [ops.cumsum(x, 1), x.cumsum(0), mint.cumprod(x, -1)], (X,)),
    Sample("cumsum_of_cube", lambda x: [ops.cumsum(x, 1), ops.cumsum(x, 0), ops.cumsum(x, -1)], (CUBE,)),
    *(
        Sample(f"sums_{out}_{back}", lambda x, kind=(out, back): ops.CumSum(*kind)(x, 1), (AROUND,))
        for out in MIXED
        for back in MIXED
    ),
    *(
        Sample(f"products_{out}_{back}", lambda x, kind=(out, back): ops.CumProd(*kind)(x, 1), (AROUND,))
        for out in MIXED
        for back in MIXED
    ),
    Sample("logarithms in front", lambda x: ops.CumulativeLogsumexp(False, True)(x, Tensor(1)), (AROUND,), ["cut_0_1"]),
    Sample("logcumsumexp", lambda x: [ops.logcumsumexp(x, 1), x.logcumsumexp(0)], (100 * AROUND,)),
    Sample("cumprod", lambda x: [ops.cumprod(x, 1), x.cumprod(0)], (CUBE,)),
    Sample("cumsum_of_integers", lambda x: [*integer_sums(whole_numbers(x)), x * 2.0], (TIES,), terms=False),
    Sample("cummax", stopped(lambda x: [*ops.cummax(x, 1), *x.cummax(0)]), (TIES,), terms=False),
    Sample("cummin", stopped(lambda x: [*ops.cummin(x, 1), *x.cummin(0)]), (TIES,), terms=False),
    Sample("cummax_of_nan", stopped(lambda x: ops.cummax(x, 1)), (SOME_NAN,), terms=False),
    Sample("cummin_of_nan", stopped(lambda x: ops.cummin(x, 1)), (SOME_NAN,), terms=False),
    Sample("cummax_of_integers", lambda x: [*ops.cummax(whole_numbers(x), 1), x * 2.0], (TIES,), terms=False),
)
TOP_K = (
    Sample("topk", lambda x: [*ops.topk(x, 3, dim=1), *x.topk(2, dim=0)], (DISTINCT,), terms=False),
    Sample("topk_of_more_than_a_part", lambda x: [*ops.topk(x, 7), ops.topk(x, 8)[0]], (DISTINCT,), terms=False),
    Sample("smallest", lambda x: [*ops.topk(x, 2, 1, False), ops.topk(x, 1, 0, False)[0]], (DISTINCT,), terms=False),
    Sample("topk_of_ties", lambda x: ops.topk(x, 5, 1)[0], (TIES,), terms=False),
)
BYTES = (
    ("cumsum", lambda x: ops.cumsum(x, 1), "sends 16 B forward"),
    ("cumprod", lambda x: ops.cumprod(x, 1), "sends 16 B forward"),
    ("top 8, values and positions", lambda x: ops.topk(x, 8)[0], "sends 256 B forward"),
)
WITHOUT_KERNEL = (
    Sample("mint_topk", lambda x: [*mint.topk(x, 3, 1), *mint.topk(x, k=2, dim=0, largest=False)], (X,)),
    Sample("kthvalue", lambda x: [*mint.kthvalue(x, 2, 1), *x.kthvalue(2, 1, True)], (X,), ["cut_0_1"]),
    Sample("mint_cumsum", lambda x: [mint.cumsum(x, 1), x.cumsum(dim=0)], (X,)),
    Sample("mint_cummin", lambda x: mint.cummin(x, 1), (X,)),
)
SAMPLES = (*SCANS, *TOP_K)
SOME = (*SCANS[::3], *TOP_K)
