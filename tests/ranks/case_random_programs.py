"""Random programs: compositions of operators on tensors that lie at random equal one card, gradients included."""

import numpy as np
from accepted import AXES, layouts_of
from launch import on_ranks
from mindspore import Tensor, ops
from one_card import check, draw

from mindformers_core.mesh import init_device_mesh

PROGRAMS = 40
CHOICES = 2  # of layouts for each program
SIZE = 8  # values are (4, 8) or (4, 4, 8): what an operator makes of them is brought back to one of these

UNARY = {
    "tanh": ops.tanh,
    "half": lambda x: x * 0.5,
    "square": lambda x: x * x * 0.25,
    "shifted": lambda x: x + 1.0,
    "softmax": lambda x: ops.softmax(x, -1) * SIZE,
    "softmax of rows": lambda x: ops.softmax(x, 0) * 4,
    "normed": lambda x: (x - ops.mean(x, -1, True)) * ops.rsqrt(ops.mean(ops.square(x), -1, True) + 1.0),
    "less the largest": lambda x: x - ops.amax(x, -1, True),
    "less a sum": lambda x: x - ops.sum(x, 0, keepdim=True) * 0.25,
    "positive": lambda x: ops.where(x > 0, x, ops.zeros_like(x)),
    "masked": lambda x: ops.masked_fill(x, x > 1.0, 0.0),
    "halves swapped": lambda x: ops.cat((x[..., SIZE // 2 :], x[..., : SIZE // 2]), -1),
    "halves added": lambda x: ops.tile(sum(ops.split(x, SIZE // 2, -1)), (1,) * (x.ndim - 1) + (2,)) * 0.5,
    "reshaped": lambda x: ops.reshape(ops.reshape(x, (-1, 2, SIZE // 2)) * 1.5, x.shape),
    "merged": lambda x: ops.reshape(ops.tanh(ops.reshape(x, (-1,))), x.shape),
    "stepped": lambda x: ops.stack((x[..., ::2], x[..., 1::2]), -1).reshape(x.shape),
    "accumulated": lambda x: ops.cumsum(x, -1) * 0.3,
    "picked": lambda x: x[..., Tensor(np.int32([1, 0, 3, 2, 7, 6, 5, 4]))],
    "first row": lambda x: x + x[0] * 0.5,
    "transposed": lambda x: ops.swapaxes(ops.swapaxes(x, 0, -1) * 1.1, 0, -1),
    "best": lambda x: x + ops.max(x, -1, True)[0] * 0.2,
}
BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - 2 * y,
    "mul": lambda x, y: x * y * 0.5,
    "gated": lambda x, y: ops.silu(x) * y,
    "maximum": ops.maximum,
    "chosen": lambda x, y: ops.where(x > y, x, y * 0.5),
    "attention": lambda x, y: ops.matmul(ops.softmax(ops.matmul(x, ops.swapaxes(y, -1, -2)) * 0.2, -1), y),
    "joined": lambda x, y: ops.concat([x, y], 0)[2:6],
    "scaled": lambda x, y: x * ops.mean(y),
}
WEIGHTED = {
    "matmul": lambda x, w: ops.matmul(x, w) * 0.3,
    "dense": lambda x, w: ops.dense(x, w) * 0.3,
    "low rank": lambda x, w: ops.matmul(ops.matmul(x, w[:, :4]), w[4:]) * 0.2,
    "row of a table": lambda x, w: x + ops.gather(w, Tensor(np.int32([7, 0, 4, 4])), 0),
}


def random_program(random):
    """A function of two values and two weights, and its description."""
    steps = []
    for _ in range(random.integers(5, 9)):
        table = (UNARY, BINARY, WEIGHTED)[random.choice(3, p=[0.5, 0.3, 0.2])]
        name = list(table)[random.integers(len(table))]
        steps.append((table, name, random.integers(0, 100), random.integers(0, 100)))

    def program(x, y, first, second):
        values, weights = [x, y], (first, second)
        for table, name, left, right in steps:
            # the latest value is always used, so that no step is in vain
            other = weights[right % 2] if table is WEIGHTED else values[left % len(values)]
            values.append(table[name](values[-1]) if table is UNARY else table[name](values[-1], other))
        return values[-1] + values[2]

    return program, " > ".join(name for _, name, _, _ in steps)


@on_ranks(4)
def case_random_programs_equal_one_card():
    """All failures are collected: ranks fail alike, and run on in step."""
    mesh = init_device_mesh((2, 2), AXES)
    failures = []
    for seed in range(PROGRAMS):
        random = np.random.default_rng(seed)
        program, description = random_program(random)
        shapes = [(4, 8) if seed % 2 else (4, 4, 8)] * 2 + [(8, 8)] * 2
        values = [draw(random, shape) for shape in shapes]
        every = [layouts_of(shape, True, mesh) for shape in shapes]
        choices = [[layouts[random.integers(len(layouts))] for layouts in every] for _ in range(CHOICES)]
        try:
            check(f"program {seed}: {description}", program, values, choices, 1e-4, 1e-4)
        except Exception as error:
            failures.append(f"program {seed}, {description}: {type(error).__name__}: {error}"[:900])
            print(failures[-1], flush=True)
    assert not failures, f"{len(failures)} of {PROGRAMS} programs fail:\n" + "\n".join(failures)
