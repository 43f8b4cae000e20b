"""Batches of matrices, products, bands: as authors call them, verified on simulated ranks."""

import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.ops.operations.linalg_ops import Eigh
from support.verified_calls import Sample, numbers, stopped

X, Y, CUBE = numbers(4, 4), numbers(4, 4), numbers(2, 4, 4)
SQUARES = (CUBE + 4 * np.eye(4)).astype(np.float32)
DEFINITE = (CUBE @ CUBE.transpose(0, 2, 1) + 4 * np.eye(4)).astype(np.float32)
LOWER = np.linalg.cholesky(DEFINITE).astype(np.float32)
PIVOTS = np.tile(np.arange(1, 5, dtype=np.int32), (2, 1))
BATCH = ["cut_0_1", "cut_0_2"]


def _of_definite(name, function, **more):
    return Sample(name, function, (DEFINITE,), BATCH, **more)


def _projections(x):
    """Eigenvalues, and the projections onto the eigenvectors, whose signs depend on the alignment of memory."""
    values, vectors = Eigh()(x)
    return values, ops.expand_dims(vectors, 1) * ops.expand_dims(vectors, 0)


MATRICES = (
    Sample("inverse", ops.inverse, (SQUARES,), BATCH),
    Sample("methods", lambda x: [x.det(), x.logdet(), *x.slogdet()], (DEFINITE,), BATCH),
    Sample("determinant", lambda x: ops.det(x) * 1e-2, (SQUARES,), BATCH),
    Sample("slogdet", ops.slogdet, (SQUARES,), BATCH),
    Sample("logdet", ops.logdet, (DEFINITE,), BATCH),
    Sample("matrix_power", lambda x: ops.matrix_power(x, 3), (CUBE,), BATCH),
    Sample("inverse_power", lambda x: ops.matrix_power(x, -1), (SQUARES,), BATCH),
    _of_definite("cholesky", stopped(ops.cholesky), terms=False),
    Sample("cholesky_inverse", ops.cholesky_inverse, (DEFINITE[0],), ["cut_0_0", "cut_0_1"]),
    _of_definite("svd", ops.svd),
    _of_definite("svd_whole", lambda x: ops.svd(x, full_matrices=True)),
    _of_definite("pinv", ops.pinv),
    Sample("qr", stopped(ops.qr), (numbers(2, 4, 2),), BATCH),
    Sample("qr_complete", stopped(lambda x: ops.qr(x, "complete")), (numbers(2, 4, 2),), BATCH),
    Sample("geqrf", stopped(ops.geqrf), (numbers(2, 4, 2),), BATCH),
    Sample("orgqr", stopped(ops.orgqr), (numbers(2, 4, 2), numbers(2, 2)), ["cut_0_1", "cut_0_2", "cut_1_1"]),
    Sample("eigh", stopped(_projections), (DEFINITE[0],), ["cut_0_0", "cut_0_1"], terms=False),
    Sample("eig", stopped(lambda x: [ops.abs(part) for part in ops.eig(x)]), (DEFINITE,), BATCH),
    Sample("matrix_solve", stopped(ops.matrix_solve), (SQUARES, CUBE), ["cut_0_1", "cut_0_2", "cut_1_1"]),
    Sample("cholesky_solve", ops.cholesky_solve, (CUBE, LOWER), ["cut_0_1", "cut_1_1", "cut_1_2"]),
    Sample("lstsq", stopped(ops.lstsq), (numbers(4, 2), X), ["cut_0_0", "cut_0_1", "cut_1_0"]),
    Sample(
        "lu_solve",
        stopped(lambda b, lu: ops.lu_solve(b, lu, Tensor(PIVOTS))),
        (CUBE, SQUARES),
        ["cut_0_1", "cut_1_1", "cut_1_2"],
    ),
    Sample("lu_unpack", lambda lu: ops.lu_unpack(lu, Tensor(PIVOTS)), (SQUARES,), BATCH),
    Sample("cdist", ops.cdist, (CUBE, CUBE + numbers(2, 4, 4)), ["cut_0_2", "cut_1_2"]),
    Sample("cdist_of_1", lambda x, y: mint.cdist(x, y, 1.0), (X, Y + 2), ["cut_0_1", "cut_1_1"]),
    Sample("pdist", ops.pdist, (X,), ["cut_0_0", "cut_0_1"]),
    Sample("cross", lambda x, y: ops.cross(x, y, dim=1), (numbers(4, 3, 2), numbers(4, 3, 2))),
    Sample("cross_by_default", mint.cross, (numbers(4, 3), numbers(4, 3))),
    Sample("meshgrid", lambda x, y: ops.meshgrid(x, y), (numbers(2), numbers(4))),
    Sample("meshgrid_ij", lambda x, y: mint.meshgrid(x, y, indexing="ij"), (numbers(2), numbers(4))),
    Sample("ger", ops.ger, (numbers(2), numbers(4))),
    Sample("outer", lambda x, y: x.outer(y), (numbers(2), numbers(4))),
    Sample("kron", ops.kron, (X, Y), ["Mul", "Mul"]),
    Sample("addmv", lambda x, a, b: x.addmv(a, b, beta=2, alpha=3), (numbers(4), X, numbers(4))),
    Sample("addbmm", lambda x, a, b: x.addbmm(a, b, beta=2, alpha=3), (X, CUBE, CUBE)),
    Sample("addbmm_row", lambda x, a, b: x.addbmm(a, b), (numbers(1, 4), CUBE, CUBE), ["terms_0"]),
    Sample("baddbmm", lambda x, a, b: x.baddbmm(a, b, beta=2), (X, CUBE, CUBE), ["terms_0"]),
    Sample("addmm", lambda x, a, b: x.addmm(a, b, alpha=2), (numbers(4), X, Y), ["terms_0"]),
    Sample("addr", ops.addr, (X, numbers(4), numbers(4))),
    Sample("cov", ops.cov, (X,), ["Div"]),
    Sample("norms", lambda x: [ops.norm(x, order, dim=(0, 1)) for order in ("fro", 1, np.inf)], (X,)),
)
BANDS = (
    Sample("triu", lambda x: [ops.triu(x, k) for k in (-1, 0, 2)], (CUBE,)),
    Sample("tril", lambda x: [ops.tril(x, k) for k in (-2, 0, 1)], (X,)),
    Sample("tril_method", lambda x: [x.tril(), x.tril(diagonal=1), x.triu(1), ops.Triu(1)(x), mint.triu(x, 1)], (X,)),
    Sample("oblong", lambda x: [ops.triu(x, 3), ops.tril(x, -1)], (numbers(4, 8),)),
    Sample("band_part", lambda x: [ops.matrix_band_part(x, *pair) for pair in ((1, 0), (-1, 1), (0, -1))], (CUBE,)),
    Sample("trace", lambda x: [ops.trace(x), x.trace(), x.trace(1, 0, 1), x.trace(-2, 1, 0)], (X,)),
    Sample("trace_of_cube", lambda x: [x.trace(), x.trace(1, 2, 0), x.trace(0, 0, 2)], (numbers(4, 4, 4),)),
    Sample("diagonal", lambda x: ops.diagonal(x, 1, 0, 2), (numbers(4, 4, 4),), ["cut_0_0", "cut_0_2"]),
    Sample("diag", ops.diag, (numbers(4),), ["cut_0_0"]),
    Sample("fill_diagonal", stopped(lambda x: x.fill_diagonal(2.0)), (X,), ["cut_0_0", "cut_0_1"]),
)

EINSUMS = (
    ("bij,bjk->bik", CUBE, CUBE),
    ("ij,jk", X, Y),
    ("i,j->ij", numbers(4), numbers(2)),
    ("bhqd,bhkd->bhqk", numbers(2, 2, 4, 4), numbers(2, 2, 4, 4)),
    ("...ij,...jk->...ik", CUBE, CUBE),
    ("ij->ji", X),
    ("ij->", X),
    ("i,i", numbers(4), numbers(4)),
    ("ij,kl->i", X, Y),
    ("bij,bik->jk", CUBE, CUBE),
    ("b...,b...->...", X, Y),
    ("bij,jk,kl->bil", CUBE, X, numbers(4, 2)),
    (
        "bcln,bcsn,bhcls,bcshp->bclhp",
        *(numbers(*shape) for shape in ((2, 2, 4, 2),) * 2 + ((2, 2, 2, 4, 4), (2, 2, 4, 2, 2))),
    ),
)
WITHOUT_KERNEL = (
    Sample("mint_inverse", mint.inverse, (SQUARES,), BATCH),
    *(
        Sample(f"linalg_qr_{mode}", lambda x, m=mode: mint.linalg.qr(x, m), (numbers(2, 4, 2),), BATCH)
        for mode in ("reduced", "complete", "r")
    ),
    Sample("triangular_solve", mint.triangular_solve, (CUBE, SQUARES), ["cut_0_1", "cut_1_1", "cut_1_2"]),
    Sample("matrix_exp", ops.matrix_exp, (CUBE,), BATCH),
    Sample("singular_values", lambda x: ops.svd(x, compute_uv=False), (DEFINITE,), BATCH),
    Sample("eigvals", lambda x: ops.abs(ops.eigvals(x)), (DEFINITE,), BATCH),
    Sample("norm_2", lambda x: ops.norm(x, 2, dim=(0, 1)), (X,), ["ToDtype", "ToDtype"]),
    Sample("ormqr", ops.ormqr, (numbers(2, 4, 2), numbers(2, 2), CUBE), None),
    Sample("determinant", nn.MatDet(), (DEFINITE,), BATCH),
    Sample("inverse_of_cholesky", nn.MatInverse(), (DEFINITE,), BATCH),
    Sample("mint_trace", mint.trace, (X,)),
    Sample("mint_tril", lambda x: mint.tril(x, 1), (X,)),
    Sample("mint_addmv", mint.addmv, (numbers(4), X, numbers(4))),
    Sample("mint_addbmm", mint.addbmm, (X, CUBE, CUBE)),
)
SAMPLES = (*MATRICES, *BANDS)
SOME = (*MATRICES[::5], *BANDS[::2])
