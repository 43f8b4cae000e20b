"""Rules of the matmul family: contractions by their equations."""

from functools import partial
from math import prod

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rewrites import product_with_a_gradient
from mindformers_core.operators.rules.dims import broadcast_shape, equation
from mindformers_core.operators.saved import INPUTS, NOTHING, OTHER_OPERAND, UNMEASURED, SavedByOperator


def contraction(text, *tensors, linear=None, added=()):
    """The `Signature` of a tensor contraction, by an `equation`.

    Args:
        text, tensors: as of `equation`: in capitals are factors that are whole, others are summed where the output
            lacks them.
        linear: groups of inputs through which partial sums pass; default: each one alone (multilinear).
        added: inputs that are added to the result.

    Raises:
        ValueError: sizes of one factor that disagree.
    """
    linear = tuple({index} for index in range(len(tensors))) if linear is None else linear
    return equation(text, *tensors, linear=linear, added=added)


def einsum_names(equation, ndims):
    """The names of the dims of every operand of an `einsum`, and of its result; `...` stands for `e1 e0`, or more.

    Raises:
        ValueError: an equation that doesn't fit the numbers of dims, or takes a diagonal.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    spare = [ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims)]
    counts = [count if "..." in term else 0 for term, count in zip(terms, spare)]
    names = [_expanded(term, count) for term, count in zip(terms, counts)]
    if not arrow:
        letters = sorted(letter for letter in {*left} - {*",."} if left.count(letter) == 1)
        right = "..." * ("..." in left) + "".join(letters)
    output = _expanded(right, max(counts))
    known = {name for term in names for name in term}
    fits = len(terms) == len(ndims) and [len(term) for term in names] == list(ndims) and known.issuperset(output)
    if not fits or any(len(set(term)) < len(term) for term in (*names, output)):
        raise ValueError(f"'{equation}' doesn't fit tensors of {ndims} dims, or names a dim of one of them twice")
    return names, output


def _expanded(term, count):
    before, dots, after = term.partition("...")
    return [*before, *(f"e{place}" for place in reversed(range(count if dots else 0))), *after]


def _operations(sizes):
    """A multiplication and an addition for every combination of factors."""
    return 2 * prod(sizes.values())


@register_operator("MatMul", saves=OTHER_OPERAND, operations=_operations, product="x @ w")
@register_operator("BatchMatMul", saves=INPUTS, operations=_operations, product="x @ w")
@register_operator("BatchMatMulExt", saves=INPUTS, operations=_operations)
@register_operator(
    "MatMulExt", saves=OTHER_OPERAND, operations=_operations, product="x @ w", rewrite=product_with_a_gradient
)
@register_operator("Mm", saves=OTHER_OPERAND, operations=_operations, product="x @ w", rewrite="MatMulExt")
@register_operator("Mv", "Vdot", saves=OTHER_OPERAND, operations=_operations, rewrite="MatMulExt")
def matmul(a, b, transpose_a=False, transpose_b=False):
    """`a @ b`, either side transposed in its last two dims on request, as `mindspore.ops.matmul` defines it.

    1-D arguments lose their dim, and batch dims broadcast.
    """
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError(f"shapes {a.shape} and {b.shape}: a matmul needs at least one dim on each side")
    first = "k" if a.ndim == 1 else "... k m" if transpose_a else "... m k"
    second = "k" if b.ndim == 1 else "... n k" if transpose_b else "... k n"
    return contraction(f"{first}, {second} -> ... {'m' * (a.ndim > 1)} {'n' * (b.ndim > 1)}", a, b)


@register_operator("DeprecatedMatmul", saves=OTHER_OPERAND, operations=_operations, product="x @ w", source=".matmul")
def matmul_method(x, tensor2):
    """`x.matmul(tensor2=…)`."""
    return matmul(x, tensor2)


def _copies(operands, results):
    """Each operand is saved for the gradient of the other."""
    first, second = operands
    return [second.nbytes] * first.needs + [first.nbytes] * second.needs


@register_operator(
    "TensorDot", saves=SavedByOperator(internal=_copies), operations=_operations, source="ops.tensor_dot(x1, x2, axes)"
)
def tensor_dot(a, b, axes):
    """The product over the last dim of `a` and the first of a matrix or vector `b`, a rewrite of `MatMulExt`."""
    if axes != 1 or b.ndim > 2:
        raise ValueError(f"axes={axes!r} of {a.shape} and {b.shape}: only axes=1 with a matrix: use matmul")
    return matmul(a, b)


@register_operator("Dense", saves=SavedByOperator((0, 1)), operations=_operations, product="x @ w.T")
def dense(x, weight, bias=None):
    """`x @ weight.T + bias`."""
    rows = "n" * (weight.ndim - 1)
    if bias is None:
        return contraction(f"... k, {rows} k -> ... {rows}", x, weight)
    return contraction(f"... k, {rows} k, {rows} -> ... {rows}", x, weight, bias, linear=({0, 2}, {1, 2}), added=(2,))


@register_operator("BiasAdd", saves=NOTHING)
def bias_add(x, bias, data_format=0, *_):
    """`x + bias` along dim 1 (NCHW, and matrices): linear in both together."""
    if x.ndim < 2 or bias.shape != (x.shape[1],):
        raise ValueError(f"a bias of shape {bias.shape} doesn't fit dim 1 of {x.shape}")
    return contraction("n c ..., c -> n c ...", x, bias, linear=({0, 1},))


def _add_product(text, x, *operands, beta=1, alpha=1, **named):
    """`beta * x + alpha * (a @ b)` of matrices, vectors, or batches of them, where `x` may be broadcast."""
    a, b = (*operands, *named.values())[:2]
    names, (shape,) = text.split("->")[1].split(), contraction(text, a, b).output_shapes
    if broadcast_shape([x.shape, shape]) != shape:
        raise ValueError(f"shapes {x.shape}, {a.shape} and {b.shape} don't fit an addition to a product")
    start = len(shape) - x.ndim
    added = " ".join(name if own == size else "1" for name, size, own in zip(names[start:], shape[start:], x.shape))
    return contraction(f"{added}, {text}", x, a, b, linear=({0, 1}, {0, 2}), added=(0,))


for _name, _equation, _places in (
    ("Addmm", "m k, k n -> m n", {1: (2,), 2: (1,)}),
    ("Baddbmm", "b m k, b k n -> b m n", {1: (1, 2), 2: (1, 2)}),
    ("Addmv", "m k, k -> m", None),
    ("Addbmm", "b m k, b k n -> m n", None),
):
    _saves = SavedByOperator(inputs_by_need=_places) if _places else UNMEASURED
    _facts = {"saves": _saves, "operations": _operations, "source": f".{_name.lower()}"}
    register_operator(_name, **_facts)(partial(_add_product, _equation))


def _first_as_column(operands, results):
    return [operand.nbytes for operand in operands[:1] if any(other.needs for other in operands if other.place == 1)]


@register_operator("Ger")
@register_operator("Outer", saves=SavedByOperator(inputs_by_need={0: (1,)}, internal=_first_as_column), source=".outer")
def outer(a, b):
    """All products of the elements of two vectors."""
    return contraction("m, n -> m n", a, b)


@register_operator("Einsum", operations=_operations, attributes=("equation",))
def einsum(operands, equation):
    """A contraction by its equation, of shape (1,) for a number."""
    names, output = einsum_names(equation, [operand.ndim for operand in operands])
    sizes = {name: size for term, x in zip(names, operands) for name, size in zip(term, x.shape) if size != 1}
    terms = [
        " ".join(f"i{name}" if size == sizes.get(name, 1) else "1" for name, size in zip(term, x.shape))
        for term, x in zip(names, operands)
    ]
    return contraction(f"{', '.join(terms)} -> {' '.join(f'i{name}' for name in output) or '1'}", *operands)
