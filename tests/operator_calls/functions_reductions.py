"""Reductions: as authors call them, verified on simulated ranks."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from support.verified_calls import Sample, numbers

X, CUBE, AROUND = numbers(4, 4), numbers(2, 4, 4), numbers(4, 4) - 1.2
SOME_ZEROS = X * np.float32([[1, 0, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
A_ZERO_ROW = X * np.float32([[1], [0], [1], [1]])
SOME_NAN = np.where(X < 0.8, np.float32(np.nan), X)
TIES = np.float32([[1, 3, 3, 0], [2, 2, 2, 2], [0, 1, 0, 1], [4, 1, 2, 4]])
LENGTHS = Tensor(np.int32([1, 2, 3, 4]))
ORDERS = (1, 2, 3, 0.5, -1, np.inf, -np.inf, 0)

REDUCTIONS = (
    *(Sample(f"norm_{order}", lambda x, p=order: ops.norm(x, p, dim=1), (AROUND,)) for order in ORDERS),
    Sample("norm_of_all", lambda x: [ops.norm(x), x.norm()], (AROUND,)),
    Sample("norm_kept", lambda x: [x.norm(2, 1, True), ops.norm(x, 3, 0, True)], (AROUND,)),
    Sample("norms_of_cube", lambda x: [ops.LpNorm((0, 2), 2, True)(x), ops.LpNorm(1, 3)(x)], (CUBE,)),
    Sample("norm_of_zeros", lambda x: ops.norm(x, 2, dim=1), (A_ZERO_ROW,)),
    Sample("l2_loss", ops.L2Loss(), (X,)),
    Sample("prod", lambda x: [ops.prod(x), ops.prod(x, 1), x.prod(0), ops.prod(x, 1, True)], (X,)),
    Sample("prod_of_cube", lambda x: [mint.prod(x, 2), ops.ReduceProd()(x, (0, 1)), x.prod(1, True)], (CUBE,)),
    Sample("prod_of_zeros", lambda x: [ops.prod(x), x.prod(1)], (SOME_ZEROS,), terms=False),
    Sample("var", lambda x: [x.var(), x.var(1), x.var(axis=0, ddof=1, keepdims=True), ops.var(x, 1, 1)], (X,)),
    Sample("mint_var", lambda x: [mint.var(x), mint.var(x, 1, correction=0, keepdim=True), x.var(dim=1)], (X,)),
    Sample("std", lambda x: [x.std(axis=1), x.std(1, 1, True), ops.std(x, 0), ops.std(x), ops.std(x, 1, 1)], (X,)),
    Sample("std_with_correction", lambda x: [x.std(dim=1, correction=0), x.std(dim=0, correction=1)], (X,)),
    Sample("var_mean", lambda x: [*ops.var_mean(x, 1), *ops.std_mean(x, (0, 1), 1, True)], (X,)),
    Sample("var_of_cube", lambda x: [x.var((0, 2)), ops.std(x, (1, 2), 1)], (CUBE,)),
    Sample("std_by_device", lambda x: x.std(1), (X,), ["cut_0_1"]),
    Sample("max", lambda x: [x.max(axis=1), x.max(axis=(0, 1)), x.max(axis=0, keepdims=True)], (TIES,), terms=False),
    Sample("min", lambda x: [x.min(axis=1), x.min(axis=0, keepdims=True), x.ptp(1)], (TIES,), terms=False),
    Sample("max_indices", lambda x: x.max(axis=1, return_indices=True), (TIES,), terms=False),
    Sample("min_indices", lambda x: x.min(axis=0, keepdims=True, return_indices=True), (TIES,), terms=False),
    Sample("aminmax", lambda x: [*ops.aminmax(x, axis=1), *x.aminmax(axis=0)], (X,)),
    Sample("nansum", lambda x: [mint.nansum(x), x.nansum(axis=1), ops.nansum(x, 0)], (SOME_NAN,), terms=False),
    Sample("nansum_of_terms", lambda x: x.nansum(axis=1, keepdims=True), (X,)),
    Sample("nanmean", lambda x: [ops.nanmean(x, 1), x.nanmean(axis=0)], (SOME_NAN,), terms=False),
    Sample("count", lambda x: [x.count_nonzero(axis=1), ops.count_nonzero(x), x * 2.0], (SOME_ZEROS,)),
    Sample("in_top_k", lambda x: [ops.intopk(x, Tensor(np.int32([1, 2, 3, 0])), 2), x * 2.0], (X,), ["cut_0_1"]),
    Sample("median", lambda x: [*ops.median(x, 1), *x.median(axis=1, keepdims=True)], (X,), ["cut_0_1"]),
    Sample("nanmedian", lambda x: ops.nanmedian(x, 0), (X,), ["cut_0_0"]),
    Sample("normalize", lambda x: x / ops.clamp(ops.norm(x, 2, 1, True), 1e-12), (AROUND,)),
    Sample("l2_normalize", ops.L2Normalize(1), (X,), ["cut_0_1"]),
    Sample("renorm", lambda x: ops.renorm(x, 2, 1, 1.5), (CUBE,), ["cut_0_0", "cut_0_2"]),
    Sample("reverse_sequence", lambda x: ops.reverse_sequence(x, LENGTHS, 1, 0), (X,), ["cut_0_1"]),
    Sample("nn_norm", nn.Norm(1), (AROUND,)),
    Sample("position_in_a_vector", lambda x: [x.argmax(), ops.argmin(x), x * 2.0], (X.ravel(),), terms=False),
)

vector_norm = mint.linalg.vector_norm
QUANTILES = Tensor(np.float32([0.2, 0.5]))
WITHOUT_KERNEL = (
    *(Sample(f"vector_norm_{order}", lambda x, p=order: vector_norm(x, p, dim=1), (X,)) for order in ORDERS),
    Sample("vector_norm_with_dtype", lambda x: vector_norm(x, 2, dim=1, dtype=ms.float32), (X,), ["cut_0_1"]),
    Sample("mint_norm", lambda x: [mint.norm(x), mint.norm(x, 1, dim=1, keepdim=True)], (CUBE,)),
    Sample("matrix_norm", mint.linalg.matrix_norm, (CUBE,)),
    Sample("normalize", lambda x: mint.nn.functional.normalize(x, dim=1), (X,)),
    Sample("mint_std", lambda x: [mint.std(x, dim=(0, 1)), *mint.var_mean(x, 1), *mint.std_mean(x)], (X,)),
    Sample("mint_median", lambda x: mint.median(x, 1, True), (X,), ["cut_0_1"]),
    Sample("mint_median_of_all", mint.median, (X,), ["cut_0_0", "cut_0_1"]),
    Sample("quantile", lambda x: ops.quantile(x, 0.5, 1), (X,), ["cut_0_1"]),
    Sample("quantiles", lambda x: ops.nanquantile(x, QUANTILES, 0, True), (X,), ["cut_0_0"]),
    Sample("mint_count", lambda x: [mint.count_nonzero(x, (0, 1)), mint.count_nonzero(x)], (X,)),
)
SAMPLES = REDUCTIONS
SOME = REDUCTIONS[::4]
