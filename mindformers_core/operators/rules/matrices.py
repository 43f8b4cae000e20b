"""Rules of operators of matrices: batch dims, and columns that are computed alone, stay cut; matrices are whole."""

from functools import partial

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import along, as_dims, dim_names, equation, integers, unary
from mindformers_core.operators.rules.elementwise import elementwise
from mindformers_core.operators.saved import NOTHING
from mindformers_core.operators.signature import LocalCall, is_float, tensors_in, whole_signature
from mindformers_core.operators.words import word

_EQUATIONS = {  # names of operators, and the equation of each: `S` is the smaller one of `M` and `N`
    "Cholesky CholeskyInverse CholeskyTrsm": "... N N' -> ... N N'",
    "MatrixExp MatrixInverse MatrixInverseExt MatrixPower": "... N N' -> ... N N'",
    "Eigh": "... N N' -> ... N, ... N N'",
    "DetTriangle MatrixDeterminant": "... N N' -> ...",
    "LogMatrixDeterminant": "... N N' -> ..., ...",
    "CholeskySolve": "... N k, ... N N' -> ... N k",
    "MatrixSolve": "... N N', ... N k -> ... N k",
    "TriangularSolve": "... N k, ... N N' -> ... N k, ... N N'",
    "LuSolve": "... N k, ... N N', ... N -> ... N k",
    "LuUnpack": "... M N, ... T -> ... M M', ... M S, ... S N",
    "Lstsq": "... M N, ... M k -> ... N k",
    "Geqrf": "... M N -> ... M N, ... S",
    "Orgqr": "... M N, ... T -> ... M N",
    "Ormqr": "... M N, ... T, ... P Q -> ... P Q",
}
_LINEAR = {"CholeskySolve": ({0},), "LuSolve": ({0},), "MatrixSolve": ({1},)}  # in the right-hand side
_ALONE = ("CholeskyInverse", "Eigh")  # MindSpore's results for several matrices are wrong


def _matrices(name, text, *args, **named):
    tensors = tensors_in([*args, *named.values()])
    if name in _ALONE and tensors[0].ndim != 2:
        raise ValueError(f"MindSpore computes this of one matrix, not of {tensors[0].shape}")
    return equation(text, *tensors, sizes={"S": min(tensors[0].shape[-2:])}, linear=_LINEAR.get(name, ()))


for _operators, _equation in _EQUATIONS.items():
    for _name in _operators.split():
        _rule, _source = partial(_matrices, _name, _equation), ".inverse" if _name == "MatrixInverseExt" else ""
        register_operator(_name, operations=100, source=_source)(_rule)


def _mode_by_name(name, args, kwargs):
    return name, (args[0], word("mode of Qr", args[1])), kwargs


@register_operator("Qr", operations=100)
@register_operator("LinalgQr", operations=100, rewrite=_mode_by_name)
def orthogonal_triangular(x, mode=0):
    """Two factors; by `mode` 1, or True, of all columns; by 2 the second one alone, and an empty tensor."""
    least = min(x.shape[-2:])
    if mode is not True and mode == 2:
        return equation("... M N -> E, ... S N", x, sizes={"E": 0, "S": least})
    return equation("... M N -> ... M Q, ... Q N", x, sizes={"Q": x.shape[-2] if mode else least})


@register_operator("Svd", operations=100)
def singular_values(x, full_matrices=False, compute_uv=True):
    """Singular values, and the vectors of both sides, in place of which there may be tensors of one element."""
    least = min(x.shape[-2:])
    if not compute_uv:
        return equation("... M N -> ... S, 1, 1", x, sizes={"S": least})
    rows, columns = x.shape[-2:] if full_matrices else (least, least)
    return equation("... M N -> ... S, ... M U, ... N V", x, sizes={"S": least, "U": rows, "V": columns})


@register_operator("Eig", operations=100)
def eigenvalues(x, compute_v=False):
    """Eigenvalues, and the vectors, or a tensor without dims."""
    return equation("... N N' -> ... N, ... N N'" if compute_v else "... N N' -> ... N, ", x)


@register_operator("Cdist")
def distances(x, y, p=2.0):
    """The distance of every row of `x` from every row of `y`."""
    return equation("... p M, ... r M -> ... p r", x, y)


@register_operator("Cross")
def cross_product(x, y, dim=-65530):
    """Of vectors of three elements along `dim`; by default the first dim of that size."""
    if x.ndim != y.ndim:
        raise ValueError(f"shapes {x.shape} and {y.shape} have not equally many dims")
    dim = x.shape.index(3) if dim in (None, -65530) and 3 in x.shape else along(x, dim)
    return elementwise(x, y, linear=({0}, {1}), whole=frozenset({f"d{dim}"}))


@register_operator("Meshgrid")
def grid(vectors, indexing=0):
    """Each vector along a dim of its own; with `indexing` 1, "xy", the first two dims are swapped."""
    names = [f"v{number}" for number, _ in enumerate(vectors)]
    grid = " ".join([*names[1::-1], *names[2:]] if word("indexing", indexing) == "xy" else names)
    return equation(f"{', '.join(names)} -> {', '.join([grid] * len(names))}", *vectors)


def _band(x, low, high):
    """Zero outside of the diagonals from `low` to `high`; a part of the rows or columns knows where it begins."""
    if x.ndim < 2:
        raise ValueError(f"a triangle needs 2 dims, not {x.shape}")
    integers([[bound for bound in (low, high) if bound is not None]], "a band")
    cut = {f"d{dim}": "band" for dim in (x.ndim - 2, x.ndim - 1)}
    return unary(x, linear=({0},), distributed=cut, local=LocalCall((x, low, high)))


_BAND = {"saves": NOTHING, "algorithms": ("band",)}
register_operator("Triu", **_BAND)(lambda x, diagonal=0: _band(x, diagonal, None))
for _name, _facts in (("Tril", {"attributes": ("diagonal",)}), ("TrilExt", {"source": ".tril"})):
    register_operator(_name, **_BAND, **_facts)(lambda x, diagonal=0: _band(x, None, diagonal))


@register_operator("MatrixBandPart", algorithms=("band",))
def band_part(x, lower, upper):
    """So many diagonals below and above the main one; a negative number is all."""
    lower, upper = integers((lower, upper), "a band")
    return _band(x, None if lower < 0 else -lower, None if upper < 0 else upper)


@register_operator("Trace", "TraceExt", "TraceV2", algorithms=("trace",))
def trace(x, offset=0, axis1=0, axis2=1, dtype=None):
    """The sum of a diagonal: parts of rows or columns hold terms of it."""
    dims = as_dims((axis1, axis2), x.ndim)
    factors, rest = [f"d{dim}" for dim in dims], dict.fromkeys(dims, [])
    if not is_float(x.dtype) or dtype is not None:
        return unary(x, rest, whole=dims)
    more = {"distributed": dict.fromkeys(factors, "trace"), "reduced": dict.fromkeys(factors, "sum")}
    return unary(x, rest, linear=({0},), local=LocalCall((x, offset, *dims)), **more)


def _entries(rows, columns, offset):
    """The number of elements on a diagonal."""
    return max(0, min(rows + min(offset, 0), columns - max(offset, 0)))


@register_operator("Diagonal")
def diagonal(x, offset=0, dim1=0, dim2=1):
    """A diagonal of the matrices in two dims, as the last dim."""
    dims = as_dims((dim1, dim2), x.ndim)
    output = [*(names for dim, names in enumerate(dim_names(x)) if dim not in dims), ("entry",)]
    sizes = {"entry": _entries(x.shape[dims[0]], x.shape[dims[1]], offset)}
    return unary(x, output, sizes=sizes, whole=dims, linear=({0},))


@register_operator("DiagExt", source=".diag")
def diagonal_matrix(x, diagonal=0):
    """A matrix with the vector `x` on a diagonal, or the diagonal of a matrix: all is whole."""
    if x.ndim not in (1, 2):
        raise ValueError(f"a diagonal is of a vector or a matrix, not of {x.shape}")
    shape = (x.shape[0] + abs(diagonal),) * 2 if x.ndim == 1 else (_entries(*x.shape, diagonal),)
    return whole_signature((x,), (shape,), ({0},))


# whole inputs: a number on the diagonal, distances between the rows, and a diagonal of twice as many dims
register_operator("FillDiagonal")(lambda x: whole_signature((x,), (x.shape,)))
register_operator("Pdist")(lambda x: whole_signature((x,), ((x.shape[0] * (x.shape[0] - 1) // 2,),)))
register_operator("Diag")(lambda x: whole_signature((x,), (x.shape * 2,), ({0},)))
