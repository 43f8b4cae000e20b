"""Random Cells that call each other, of random operators on tensors of any shapes, and random plans for them.

All that is drawn is data (`Block`), so that a Cell can be built anew, and run as a function, too.
"""

from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace

import numpy as np
from accepted import layouts_of
from mindspore import Parameter, Tensor, mint, nn, ops
from one_card import draw

from mindformers_core.layout import Layout

SIZE = 8  # rows and columns of a weight
SHAPES = (4, 8), (4, 4, 8), (4, 6, 4), (2, 1, 8), (4, 1), (8,), (1, 4, 8)
LARGEST = 600  # elements of a tensor
GENTLE = 0.3
ODD = 0.0137  # where numbers meet that are equal but for rounding, a comparison would be another one on a mesh


def _even(x, dim=-1):
    return x.ndim > 0 and x.shape[dim] % 2 == 0


def _some(x, least=1):
    return x.ndim >= least


# name -> function of a tensor and a number, for which tensors there is one
UNARY = {
    "tanh": (lambda x, n: ops.tanh(x), None),
    "half": (lambda x, n: x * 0.5, None),
    "square": (lambda x, n: ops.tanh(x) * x * 0.5, None),
    "shifted": (lambda x, n: x + 1.0, None),
    "softmax": (lambda x, n: ops.softmax(x, n % x.ndim) * 4, lambda x: _some(x) and 1 not in x.shape),
    "normed": (lambda x, n: (x - ops.mean(x, -1, True)) * ops.rsqrt(ops.mean(ops.square(x), -1, True) + 1.0), _some),
    "less the largest": (lambda x, n: x - ops.amax(_distinct(x, n % x.ndim), n % x.ndim, True), _some),
    "less a sum": (lambda x, n: x - ops.sum(x, 0, keepdim=True) * 0.25, _some),
    "positive": (lambda x, n: ops.where(x > ODD, x, ops.zeros_like(x)), None),
    "masked": (lambda x, n: ops.masked_fill(x, x > 1 + ODD, 0.0), None),
    "accumulated": (lambda x, n: ops.cumsum(x, n % x.ndim) * GENTLE, _some),
    "flipped": (lambda x, n: ops.flip(x, (n % x.ndim,)), _some),
    "transposed": (lambda x, n: ops.swapaxes(x, n % x.ndim, -1), lambda x: _some(x, 2)),
    "merged": (lambda x, n: ops.reshape(x, (-1,)), None),
    "paired": (lambda x, n: ops.reshape(x, (*x.shape[:-1], 2, -1) if n % 2 else (*x.shape[:-1], -1, 2)), _even),
    "wider": (lambda x, n: ops.expand_dims(x, n % (x.ndim + 1)), lambda x: x.ndim < 4),
    "squeezed": (lambda x, n: ops.squeeze(x), lambda x: 1 in x.shape),
    "mean": (lambda x, n: ops.mean(x), None),
    "mean over one dim": (lambda x, n: ops.mean(x, -1, n % 2 == 0), None),
    "sum over the last": (lambda x, n: ops.sum(x, -1) * GENTLE, None),
    "sum over one dim": (lambda x, n: ops.sum(x, n % max(x.ndim, 1), n % 3 == 0) * GENTLE, None),
    "largest": (lambda x, n: ops.max(_distinct(x, n % x.ndim), n % x.ndim)[0], _some),
    "all but the first": (lambda x, n: x[1:], lambda x: _some(x) and x.shape[0] > 1),
    "later columns": (lambda x, n: x[..., x.shape[-1] // 2 :], _even),
    "one column": (lambda x, n: x[..., n % x.shape[-1]], _some),
    "one row": (lambda x, n: x[n % x.shape[0]], _some),
    "narrowed": (lambda x, n: mint.narrow(x, n % x.ndim, x.shape[n % x.ndim] - 1, 1), _some),
    "narrowed by half": (lambda x, n: x.narrow(-1, x.shape[-1] // 2, x.shape[-1] // 2), _even),
    "every second": (lambda x, n: x[..., 1::2], _even),
    "tiled": (lambda x, n: ops.tile(x, (2,) + (1,) * (x.ndim - 1)), _some),
    "repeated": (lambda x, n: ops.repeat_interleave(x, 2, n % x.ndim), _some),
    "stacked": (lambda x, n: ops.stack((x, x * 0.5), n % (x.ndim + 1)), lambda x: x.ndim < 4),
    "broadcast": (lambda x, n: ops.broadcast_to(x, (2, *x.shape)), lambda x: x.ndim < 4),
    "picked": (lambda x, n: x[..., Tensor(np.int32([1, 0, 1]))], lambda x: _some(x) and x.shape[-1] > 1),
    "halves swapped": (lambda x, n: ops.cat((x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1), _even),
    "glu": (lambda x, n: mint.split(x, x.shape[-1] // 2, -1)[0] * ops.sigmoid(ops.chunk(x, 2, -1)[1]), _even),
}
BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y * 0.5,
    "mul": lambda x, y: x * ops.tanh(y),
    "gated": lambda x, y: ops.silu(x) * ops.sigmoid(y),
    "maximum": lambda x, y: ops.maximum(x, y * 0.9 + ODD),
    "chosen": lambda x, y: ops.where(x > y + ODD, x, y * 0.5),
    "joined": lambda x, y: ops.concat([x, y], -1) if x.ndim else x + y,
    "side by side": lambda x, y: ops.stack((x, y), -1) * 0.5,
    "state": lambda x, y: (ops.expand_dims(x, -1) * ops.tanh(ops.expand_dims(y, -2))).sum(-1) * GENTLE if x.ndim else x,
    "attention": lambda x, y: _attention(x, y) if x.ndim > 1 and x.shape[-2] > 1 else x * ops.tanh(y),
}
WEIGHTED = {
    "matmul": lambda x, w: ops.matmul(x, w[: x.shape[-1]]) * GENTLE,
    "dense": lambda x, w: ops.dense(x, w[:, : x.shape[-1]]) * GENTLE,
    "low rank": lambda x, w: ops.matmul(ops.matmul(x, w[: x.shape[-1], :4]), w[4:]) * 0.2,
    "row of a table": lambda x, w: ops.gather(w, Tensor(np.int32([7, 0, 4, 4])), 0) + ops.mean(x),
    "gated block": lambda x, w: _gated(ops.matmul(x, w[: x.shape[-1]]), w),
}
SEVERAL = {  # name -> pieces of a tensor along a dim
    "split by count": lambda x, dim: ops.split(x, max(1, x.shape[dim] // 2), dim),
    "split view": lambda x, dim: mint.split(x, max(1, x.shape[dim] // 2), dim),
    "split by lengths": lambda x, dim: mint.split(x, (1, x.shape[dim] - 1), dim),
    "method by lengths": lambda x, dim: x.split((x.shape[dim] - 1, 1), dim),
    "chunk": lambda x, dim: ops.chunk(x, 2, dim),
    "chunk view": lambda x, dim: mint.chunk(x, 3, dim),
    "unstack": lambda x, dim: ops.unstack(x, dim),
    "unbind": lambda x, dim: ops.unbind(x, dim),
    "top": lambda x, dim: _as_floats(*ops.topk(_distinct(x, -1), 2)),
    "sorted": lambda x, dim: _as_floats(*ops.sort(_distinct(x, dim), dim)),
    "extreme": lambda x, dim: _as_floats(*ops.max(_distinct(x, dim), dim)),
}


def _distinct(x, dim):
    """`x` plus a slope along `dim`, so that the order of what is equal but for rounding is one."""
    slope = np.float32(np.arange(x.shape[dim]) * ODD)
    return x + ops.reshape(Tensor(slope), (1,) * (dim % x.ndim) + (-1,) + (1,) * (x.ndim - 1 - dim % x.ndim))


def _attention(x, y):
    return ops.matmul(ops.softmax(ops.matmul(x, ops.swapaxes(y, -1, -2)) * 0.2, -1), y)


def _gated(x, w):
    u, z = ops.chunk(x, 2, -1)
    y = ops.dense(ops.silu(u), w[:4, :4])
    return (ops.expand_dims(y, -1) * ops.expand_dims(u, -1)).sum(-1) * ops.silu(z)


def _as_floats(values, indices):
    return values, ops.cast(indices, values.dtype) * 0.1


def fitted(x, shape):
    """`x` as it broadcasts to `shape`: the mean, or the last part, of what is larger."""
    while x.ndim > len(shape):
        x = ops.mean(x, 0)
    for dim in range(-x.ndim, 0):
        if x.shape[dim] > shape[dim] > 1:
            x = mint.narrow(x, dim, x.shape[dim] - shape[dim], shape[dim])
        elif x.shape[dim] != shape[dim] and x.shape[dim] > 1:
            x = ops.mean(x, dim, True)
    return x


def filled(x, shape):
    """`x` in `shape`."""
    x = fitted(x, shape)
    return x if tuple(x.shape) == tuple(shape) else ops.broadcast_to(x, shape)


@dataclass
class Block:
    """What a Cell is made of; steps are `(table, name, place of an operand, place of another one, number)`."""

    inputs: tuple
    weights: list
    trained: list
    children: list
    structure: str
    steps: list = field(default_factory=list)
    results: list = field(default_factory=list)

    def __str__(self):
        inner = "".join(f" [{child}]" for child in self.children)
        return (
            f"{self.inputs} {' > '.join(f'{n} {i} {j} {k}' for _, n, i, j, k in self.steps)} = {self.structure}{inner}"
        )


def operate(step, pool, weights, call):
    """What a step appends to the pool; None where its operator takes no such tensor."""
    table, name, left, right, number = step
    x, y = pool[left % len(pool)], pool[right % len(pool)]
    if table == "unary":
        function, fits = UNARY[name]
        return [function(x, number)] if fits is None or fits(x) else None
    if table == "binary":
        return [BINARY[name](x, filled(y, x.shape))]
    if table == "weighted":
        fits = _even(x) and 4 <= x.shape[-1] <= SIZE and (x.ndim < 3 or prod(x.shape[:-1]) > 1)  # docs/mindspore.md
        return [WEIGHTED[name](x, weights[number % 2])] if fits else None
    if table == "call":
        return leaves(call(number, x, y))
    if not x.ndim or x.shape[number % x.ndim] < 2 or (name == "top" and x.shape[-1] < 2):
        return None
    pieces = SEVERAL[name](x, number % x.ndim)
    return [pieces[0], pieces[-1]]


def execute(block, inputs, weights, call):
    """The block's results, in its structure."""
    pool = list(inputs)
    for step in block.steps:
        pool += operate(step, pool, weights, call)
    last, other = pool[-1], pool[-2]
    structures = {"tensor": last, "tuple": (last, other), "dict": {"one": last, "two": other}}
    return structures.get(block.structure, (last, {"again": last, "two": other}))


def leaves(result):
    """The tensors of a structure, each once."""
    if isinstance(result, (tuple, list, dict)):
        entries = result.values() if isinstance(result, dict) else result
        found = {id(leaf): leaf for entry in entries for leaf in leaves(entry)}
        return list(found.values())
    return [result]


def random_block(random, depth, shapes, count=None):
    """A Block of inputs of these shapes, whose children call others down to `depth`."""
    children = [random_block(random, depth - 1, random_shapes(random)) for _ in range(2 if depth else 0)]
    weights = [draw(random, (SIZE, SIZE)).asnumpy() for _ in range(2)]
    structure = ("tensor", "tuple", "dict", "nested")[random.integers(4)]
    block = Block(shapes, weights, [bool(random.random() < 0.8) for _ in range(2)], children, structure)
    plain = list(map(Cell, children))
    tensors = list(map(Tensor, weights))

    def call(number, x, y):
        return called(plain, number, x, y)

    pool, wanted = [draw(random, shape) for shape in shapes], count or random.integers(4, 8)
    tables = {"unary": UNARY, "binary": BINARY, "weighted": WEIGHTED, "several": SEVERAL} | (
        {"call": [""]} if depth else {}
    )
    weight = np.array([0.3, 0.2, 0.2, 0.2, 0.25][: len(tables)])
    while len(block.steps) < wanted or len(pool) < 4:
        table = list(tables)[random.choice(len(tables), p=weight / weight.sum())]
        name = list(tables[table])[random.integers(len(tables[table]))]
        left = len(pool) - 1 - min(int(random.geometric(0.6)) - 1, len(pool) - 1)  # mostly a late one
        step = (table, name, left, int(random.integers(len(pool))), int(random.integers(12)))
        made = operate(step, pool, tensors, call)
        if made and all(0 < prod(tensor.shape) <= LARGEST and tensor.ndim < 5 for tensor in made):
            pool += made
            block.steps.append(step)
    block.results = [tuple(leaf.shape) for leaf in leaves(execute(block, pool[:2], tensors, call))]
    return block


def random_shapes(random):
    """Of two inputs."""
    return tuple(SHAPES[random.integers(len(SHAPES))] for _ in range(2))


def called(children, number, x, y):
    """A child's result, for inputs in its shapes."""
    child = children[number % len(children)]
    first, second = child.block.inputs
    return child(filled(x, first), y=filled(y, second))


class Cell(nn.Cell):
    """The Cell of a Block."""

    def __init__(self, block):
        super().__init__()
        self.block = block
        self.first, self.second = (
            Parameter(Tensor(weight), name=name, requires_grad=trained)
            for name, weight, trained in zip(("first", "second"), block.weights, block.trained)
        )
        self.inner = nn.CellList([Cell(child) for child in block.children])

    def construct(self, x, y=None):
        return execute(self.block, (x, y), (self.first, self.second), lambda *given: called(self.inner, *given))


class Loss(nn.Cell):
    """A number of all that a Cell gives, and for some of them what it gives besides."""

    def __init__(self, block, slopes, aside):
        super().__init__()
        self.body = Cell(block)
        self.slopes, self.aside = list(map(Tensor, slopes)), aside

    def construct(self, x, y):
        found = leaves(self.body(x, y))
        loss = sum(ops.mean(ops.tanh(leaf) * slope) for leaf, slope in zip(found, self.slopes, strict=True))
        return (loss, found[0], found[0], found[-1]) if self.aside else loss


def random_cell(seed):
    """A random Cell: `make()` builds it; its `block`; `inputs`, arrays; `places` of those with gradients; `aside`."""
    random = np.random.default_rng(seed)
    block = random_block(random, (0, 0, 0, 1, 1, 1, 1, 2)[random.integers(8)], random_shapes(random))
    slopes = [random.normal(size=shape).astype(np.float32) for shape in block.results]
    inputs = [draw(random, shape).asnumpy() for shape in block.inputs]
    places = ((0, 1), (0, 1), (0,), (1,), None)[random.integers(5)]
    if not (places or any(map(any, _trained(block)))):
        places = (0, 1)
    aside = bool(random.random() < 0.3)

    def make():
        cell = Loss(block, slopes, aside)
        cell.update_parameters_name(f"cell{seed}.")  # a compiled function knows its parameters by name
        return cell

    return SimpleNamespace(make=make, block=block, inputs=inputs, places=places, aside=aside)


def _trained(block):
    return [block.trained, *(trained for child in block.children for trained in _trained(child))]


def random_plan(seed, mesh, block):
    """Layouts of the inputs and of the weights, and some of what goes in and out of inner Cells."""
    random = np.random.default_rng([seed, mesh.size])

    def any_of(shape, often=1.0):
        layouts = layouts_of(shape, random.random() < 0.15, mesh)
        return layouts[random.integers(len(layouts))] if random.random() < often else None

    def declare(block, path, often):
        weights = {"first": any_of((SIZE, SIZE)), "second": any_of((SIZE, SIZE))}
        plan[path] = {"weight": {name: given.replace(partial=(), varying=()) for name, given in weights.items()}}
        plan[path]["input"] = {name: any_of(shape, often) for name, shape in zip("xy", block.inputs)}
        if block.structure == "tensor" or (block.structure == "tuple" and len(block.results) == 2):
            plan[path]["output"] = tuple(any_of(shape, often) for shape in block.results)
        for place, child in enumerate(block.children):
            declare(child, f"{path}.inner.{place}", often)

    plan = {"": {"input": {name: _unmarked(any_of(shape)) for name, shape in zip("xy", block.inputs)}}}
    declare(block, "body", (0.0, 0.3, 0.6)[random.integers(3)])
    return plan


def _unmarked(layout):
    return Layout.on(layout.mesh, layout.dims)
