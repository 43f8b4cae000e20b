"""Rules of operators of matrices: batch dims, and columns that are computed alone, stay cut; matrices are whole."""

from functools import partial

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import along, as_dims, dim_names, integers, unary
from mindformers_core.operators.rules.elementwise import elementwise
from mindformers_core.operators.saved import NOTHING, UNMEASURED
from mindformers_core.operators.signature import Signature, is_float, tensor_meta, tensors_in

# Names of operators, and the dims of their inputs and outputs behind the batch dims; an output that begins with a dot
# has no batch dims. Columns that don't depend on each other are in capitals; all other factors are whole. `n` and `n'`
# are of one size, and an output's `s` is the smaller one of `m` and `n`.
_EQUATIONS = {
    "Cholesky CholeskyInverse CholeskyTrsm MatrixExp MatrixInverse MatrixInverseExt MatrixPower": "n n' -> n n'",
    "Eigh": "n n' -> n, n n'",
    "DetTriangle MatrixDeterminant": "n n' -> ",
    "LogMatrixDeterminant": "n n' -> , ",
    "CholeskySolve": "n K, n n' -> n K",
    "MatrixSolve": "n n', n K -> n K",
    "TriangularSolve": "n K, n n' -> n K, n n'",
    "LuSolve": "n K, n n', n -> n K",
    "LuUnpack": "m n, t -> m m', m s, s n",
    "Lstsq": "m n, m K -> n K",
    "Geqrf": "m n -> m n, s",
    "Orgqr": "m n, t -> m n",
    "Ormqr": "m n, t, p q -> p q",
}
_LINEAR = {"CholeskySolve": ({0},), "LuSolve": ({0},), "MatrixSolve": ({1},)}  # in the right-hand side
_ALONE = ("CholeskyInverse", "Eigh")  # MindSpore's results for several matrices are wrong


def _names(side):
    return [part.split() for part in side.split(",")]


def _batched(equation, *tensors, linear=(), **sizes):
    """The `Signature` of an operator, by an equation as in `_EQUATIONS`; `sizes` are those of factors of outputs."""
    left, right = map(_names, equation.split("->"))
    for dims, tensor in zip(left, tensors, strict=True):
        if tensor.ndim < len(dims):
            raise ValueError(f"a tensor of shape {tensor.shape} has no dims {' '.join(dims)}")
        for name, size in zip(dims, tensor.shape[tensor.ndim - len(dims) :]):
            if sizes.setdefault(name.rstrip("'"), size) != size:
                shown = ", ".join(str(each.shape) for each in tensors)
                raise ValueError(f"shapes {shown} don't fit {equation}: '{name}' is {size} and {sizes[name[0]]}")
    plain = elementwise(*[tensor_meta(x.shape[: x.ndim - len(dims)], x.dtype) for dims, x in zip(left, tensors)])
    inputs = [(*batch, *((name,) for name in dims)) for dims, batch in zip(left, plain.inputs)]
    outputs = [(*plain.outputs[0] * (dims[:1] != ["."]), *((n,) for n in dims if n != ".")) for dims in right]
    used = {name for dims in (*left, *right) for name in dims} - {"."}
    sizes = {"s": min(sizes.get("m", 0), sizes.get("n", 0))} | sizes
    sizes = plain.sizes | {name: sizes[name.rstrip("'")] for name in used}
    whole = frozenset(name for name in used if not name.isupper())
    return Signature(tuple(inputs), tuple(outputs), sizes, whole=whole, linear=linear)


def _matrices(name, equation, *args, **named):
    tensors = tensors_in([*args, *named.values()])
    if name in _ALONE and tensors[0].ndim != 2:
        raise ValueError(f"MindSpore computes this of one matrix, not of {tensors[0].shape}")
    return _batched(equation, *tensors, linear=_LINEAR.get(name, ()))


for _operators, _equation in _EQUATIONS.items():
    for _name in _operators.split():
        _rule, _source = partial(_matrices, _name, _equation), ".inverse" if _name == "MatrixInverseExt" else ""
        register_operator(_name, saves=UNMEASURED, operations=100, source=_source)(_rule)


def _mode_by_name(name, args, kwargs):
    return name, (args[0], ("reduced", "complete", "r")[args[1]]), kwargs


@register_operator("Qr", saves=UNMEASURED, operations=100)
@register_operator("LinalgQr", saves=UNMEASURED, operations=100, rewrite=_mode_by_name)
def orthogonal_triangular(x, mode=0):
    """Two factors; by `mode` 1, or True, of all columns; by 2 the second one alone, and an empty tensor."""
    rows, columns = x.shape[-2:]
    if mode is not True and mode == 2:
        return _batched("m n -> . e, s n", x, e=0)
    return _batched("m n -> m q, q n", x, q=rows if mode else min(rows, columns))


@register_operator("Svd", saves=UNMEASURED, operations=100)
def singular_values(x, full_matrices=False, compute_uv=True):
    """Singular values, and the vectors of both sides, in place of which there may be tensors of one element."""
    if not compute_uv:
        return _batched("m n -> s, . o, . o", x, o=1)
    rows, columns = x.shape[-2:]
    least = min(rows, columns)
    return _batched("m n -> s, m u, n v", x, u=rows if full_matrices else least, v=columns if full_matrices else least)


@register_operator("Eig", saves=UNMEASURED, operations=100)
def eigenvalues(x, compute_v=False):
    """Eigenvalues, and the vectors, or a tensor without dims."""
    return _batched("n n' -> n, n n'" if compute_v else "n n' -> n, .", x)


@register_operator("Cdist", saves=UNMEASURED)
def distances(x, y, p=2.0):
    """The distance of every row of `x` from every row of `y`."""
    return _batched("P m, R m -> P R", x, y)


@register_operator("FillDiagonal", saves=UNMEASURED)
def filled_diagonal(x):
    """A number on the diagonal."""
    return unary(x, whole=range(x.ndim))


@register_operator("Pdist", saves=UNMEASURED)
def own_distances(x):
    """The distances between the rows of a matrix."""
    return unary(x, [("pair",)], sizes={"pair": x.shape[0] * (x.shape[0] - 1) // 2}, whole=range(x.ndim))


@register_operator("Cross", saves=UNMEASURED)
def cross_product(x, y, dim=-65530):
    """Of vectors of three elements along `dim`; by default the first dim of that size."""
    if x.ndim != y.ndim:
        raise ValueError(f"shapes {x.shape} and {y.shape} have not equally many dims")
    dim = x.shape.index(3) if dim in (None, -65530) and 3 in x.shape else along(x, dim)
    return elementwise(x, y, linear=({0}, {1}), whole=frozenset({f"d{dim}"}))


@register_operator("Meshgrid", saves=UNMEASURED)
def grid(vectors, indexing=0):
    """Each vector along a dim of its own; with `indexing` 1, "xy", the first two dims are swapped."""
    names = [(f"v{number}",) for number, _ in enumerate(vectors)]
    output = (*names[1::-1], *names[2:]) if indexing in (1, "xy") else tuple(names)
    sizes = {name: vector.shape[0] for (name,), vector in zip(names, vectors)}
    return Signature(tuple((name,) for name in names), (output,) * len(names), sizes)


def _band(x, low, high):
    """Zero outside of the diagonals from `low` to `high`; a part of the rows or columns knows where it begins."""
    if x.ndim < 2:
        raise ValueError(f"a triangle needs 2 dims, not {x.shape}")
    cut = {f"d{dim}": "band" for dim in (x.ndim - 2, x.ndim - 1)}
    return unary(x, linear=({0},), distributed=cut, arguments=(x, low, high))


@register_operator("Triu", saves=NOTHING)
def upper_triangle(x, diagonal=0):
    """Zero below a diagonal of the last two dims."""
    return _band(x, *integers((diagonal,), "a diagonal"), None)


@register_operator("Tril", saves=NOTHING, attributes=("diagonal",))
@register_operator("TrilExt", saves=NOTHING, source=".tril")
def lower_triangle(x, diagonal=0):
    """Zero above a diagonal of the last two dims."""
    return _band(x, None, *integers((diagonal,), "a diagonal"))


@register_operator("MatrixBandPart", saves=UNMEASURED)
def band_part(x, lower, upper):
    """So many diagonals below and above the main one; a negative number is all."""
    lower, upper = integers((lower, upper), "a band")
    return _band(x, None if lower < 0 else -lower, None if upper < 0 else upper)


@register_operator("Trace", "TraceExt", "TraceV2", saves=UNMEASURED)
def trace(x, offset=0, axis1=0, axis2=1, dtype=None):
    """The sum of a diagonal: parts of rows or columns hold terms of it."""
    dims = as_dims((axis1, axis2), x.ndim)
    factors, rest = [f"d{dim}" for dim in dims], [names for dim, names in enumerate(dim_names(x)) if dim not in dims]
    if not is_float(x.dtype) or dtype is not None:
        return unary(x, rest, whole=dims)
    more = {"distributed": dict.fromkeys(factors, "trace"), "reduced": dict.fromkeys(factors, "sum")}
    return unary(x, rest, linear=({0},), arguments=(x, offset, *dims), **more)


@register_operator("Diagonal", saves=UNMEASURED)
def diagonal(x, offset=0, dim1=0, dim2=1):
    """A diagonal of the matrices in two dims, as the last dim."""
    dims = as_dims((dim1, dim2), x.ndim)
    below, right = max(-offset, 0), max(offset, 0)
    size = max(0, min(x.shape[dims[0]] - below, x.shape[dims[1]] - right))
    rest = [names for dim, names in enumerate(dim_names(x)) if dim not in dims]
    return unary(x, [*rest, ("entry",)], sizes={"entry": size}, whole=dims, linear=({0},))


@register_operator("Diag", saves=UNMEASURED)
def diagonal_of_dims(x):
    """The elements on the diagonal of twice as many dims: all is whole."""
    names = [(f"o{dim}",) for dim in range(2 * x.ndim)]
    return unary(
        x, names, sizes=dict(zip((name for (name,) in names), x.shape * 2)), whole=range(x.ndim), linear=({0},)
    )


@register_operator("DiagExt", saves=UNMEASURED, source=".diag")
def diagonal_matrix(x, diagonal=0):
    """A matrix with the vector `x` on a diagonal, or the diagonal of a matrix: all is whole."""
    if x.ndim not in (1, 2):
        raise ValueError(f"a diagonal is of a vector or a matrix, not of {x.shape}")
    if x.ndim == 1:
        output, sizes = ("row", "column"), dict.fromkeys(("row", "column"), x.shape[0] + abs(diagonal))
    else:
        below, right = max(-diagonal, 0), max(diagonal, 0)
        output, sizes = ("entry",), {"entry": max(0, min(x.shape[0] - below, x.shape[1] - right))}
    return unary(x, [(factor,) for factor in output], sizes=sizes, whole=range(x.ndim), linear=({0},))
