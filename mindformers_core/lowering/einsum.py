"""`einsum` by products of batches of matrices, from left to right: MindSpore has it on one kind of device each."""

from math import prod

from mindspore import ops

from mindformers_core.operators.rules.matmul import einsum_names


@ops.constexpr
def _plan(equation, shapes):
    """What `contract` does, as tuples: the dims of the first operand that it sums; for every further one what
    `_product` takes; the order of the dims of the result, and its shape. Dims of size 1 go first, and come last."""
    terms, output = einsum_names(equation, [len(shape) for shape in shapes])
    sizes = {name: size for term, shape in zip(terms, shapes) for name, size in zip(term, shape) if size != 1}
    needed = [set(output).union(*terms[number + 1 :]) for number in range(len(terms))]
    first, names = _summed(terms[0], needed[0], shapes[0])
    steps = []
    for term, shape, later in zip(terms[1:], shapes[1:], needed[1:]):
        other_dims, other = _summed(term, later | set(names), shape)
        dims, names = _summed(names, later | set(other), [sizes[name] for name in names])
        both = [name for name in names if name in other]
        batch, contracted = [n for n in both if n in later], [n for n in both if n not in later]
        rows, columns = [n for n in names if n not in both], [n for n in other if n not in both]
        counts = tuple(prod(sizes[name] for name in part) for part in (batch, rows, contracted, columns))
        orders = _order([*batch, *rows, *contracted], names), _order([*batch, *contracted, *columns], other)
        names = [*batch, *rows, *columns]
        steps.append((dims, other_dims, orders, counts, tuple(sizes[name] for name in names)))
    order = _order([name for name in output if name in names], names)
    return first, tuple(steps), order, tuple(sizes.get(name, 1) for name in output) or (1,)


def _summed(names, needed, shape):
    """The dims that nobody else needs, or of size 1, and the names of the others."""
    dims = tuple(dim for dim, (name, size) in enumerate(zip(names, shape)) if name not in needed or size == 1)
    return dims, [name for dim, name in enumerate(names) if dim not in dims]


def _order(wanted, names):
    return tuple(names.index(name) for name in wanted)


def contract(operands, equation):
    """The sums of products that an equation names, as `mindspore.ops.einsum`: of shape (1,) for a single number.

    Args:
        operands: tensors.
        equation: as `"bij,bjk->bik"`, also with `...`.
    """
    first, steps, order, shape = _plan(equation, tuple(operand.shape for operand in operands))
    result = _without(operands[0], first)
    for place, step in enumerate(steps):
        result = _product(result, operands[place + 1], *step)
    return ops.reshape(_ordered(result, order), shape)


def _product(x, y, dims, other_dims, orders, counts, shape):
    """The product of two operands, each without some dims, as batches of matrices of `counts` rows and columns."""
    batch, rows, contracted, columns = counts
    x = ops.reshape(_ordered(_without(x, dims), orders[0]), (batch, rows, contracted))
    y = ops.reshape(_ordered(_without(y, other_dims), orders[1]), (batch, contracted, columns))
    return ops.reshape(x * y if contracted == 1 else ops.bmm(x, y), shape)


def _ordered(x, order):
    return ops.transpose(x, order) if order != tuple(range(len(order))) else x


def _without(x, dims):
    return ops.sum(x, dims) if dims else x
