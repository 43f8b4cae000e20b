"""Random programs: compositions of operators on tensors that lie at random equal one card, gradients included."""

from unittest import mock

import numpy as np
from accepted import AXES, layouts_of
from mindspore import Tensor, mint
from one_card import check
from random_cells import SIZE, execute, leaves, random_block, random_shapes
from support.launch import on_ranks

from mindformers_core.mesh import init_device_mesh

PROGRAMS, DAILY = 12, 4
CHOICES = 2  # of layouts for each program


@on_ranks(4)
def case_random_programs_equal_one_card(seeds=range(DAILY)):
    """All failures are collected: ranks fail alike, and run on in step. One card has no right `mint.split`."""
    mesh = init_device_mesh((2, 2), AXES)
    failures = []
    for seed in seeds:
        random = np.random.default_rng(9000 + seed)
        block = random_block(random, 0, random_shapes(random))
        values = [Tensor(random.normal(size=shape).astype(np.float32)) for shape in block.inputs]
        values += list(map(Tensor, block.weights))
        every = [layouts_of(shape, True, mesh) for shape in (*block.inputs, (SIZE, SIZE), (SIZE, SIZE))]
        choices = [[layouts[random.integers(len(layouts))] for layouts in every] for _ in range(CHOICES)]

        def program(x, y, *weights, block=block):
            return tuple(leaves(execute(block, (x, y), weights, None)))

        try:
            with mock.patch.object(mint, "split", lambda x, size, dim: x.split(size, dim)):
                check(f"program {seed}: {block}", program, values, choices, 1e-4, 1e-4)
        except Exception as error:
            failures.append(f"program {seed}, {block}: {type(error).__name__}: {error}"[:900])
            print(failures[-1], flush=True)
    assert not failures, f"{len(failures)} of {len(seeds)} programs fail:\n" + "\n".join(failures)


@on_ranks(nightly=(4,))
def case_more_random_programs_equal_one_card():
    case_random_programs_equal_one_card(range(DAILY, PROGRAMS))
