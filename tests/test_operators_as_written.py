"""Functions as authors call them: each dim of each tensor cut in turn, and terms of sums, against one card."""

import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from operator_calls import (
    functions_elementwise,
    functions_matrices,
    functions_reductions,
    functions_scans,
    functions_scatter as scatter,
)
from support.nightly import daily
from support.small_cells import cell_of
from support.verified_calls import MESH, MESH_OF_4, Sample, eager, planned, verified

from mindformers_core import shard
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import layout
from mindformers_core.lowering.einsum import contract
from mindformers_core.sharding.inspecting import explain

FAMILIES = functions_elementwise, functions_matrices, functions_reductions, functions_scans
SAMPLES = [sample for family in FAMILIES for sample in family.SAMPLES]
WITHOUT_KERNEL = [sample for family in FAMILIES for sample in family.WITHOUT_KERNEL]
SOME = [sample for family in FAMILIES for sample in family.SOME]
EINSUMS = [(case,) for case in functions_matrices.EINSUMS]


EVERY = [*SAMPLES, *scatter.SAMPLES, *scatter.BY_NIGHT]


@pytest.mark.parametrize("sample", daily(EVERY[: -len(scatter.BY_NIGHT) : 8], EVERY), ids=str)
def test_parts_give_what_one_card_gives(sample):
    found = verified(sample)
    assert sample.gathered is None or found == sample.gathered


@pytest.mark.parametrize("sample", [*WITHOUT_KERNEL, *scatter.WITHOUT_KERNEL], ids=str)
def test_plans_without_a_kernel(sample):
    found = planned(sample)
    assert sample.gathered is None or found == sample.gathered


@pytest.mark.parametrize("sample", daily(SOME[::3], SOME), ids=str)
def test_operator_by_operator(sample):
    eager(sample)


@pytest.mark.parametrize("sample", daily(SOME[::12], SOME), ids=str)
def test_two_axes(sample):
    """Every dim cut over both axes of a mesh of 4."""
    verified(sample, MESH_OF_4)


@pytest.mark.parametrize("case", daily(EINSUMS[::3], EINSUMS), ids=lambda case: case[0])
def test_einsum(case):
    equation, *operands = case
    verified(Sample(equation, lambda *given: (ops.einsum(equation, *given), mint.einsum(equation, *given)), operands))
    found = contract(list(map(Tensor, operands)), equation).asnumpy()
    wanted = np.einsum(equation, *operands)
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-4)


@pytest.mark.parametrize("name, function, told", functions_scans.BYTES)
def test_what_is_sent_does_not_grow_with_the_dim(name, function, told):
    """Of 4 rows of 1,024 or 4,096 elements, cut in two."""
    for size in (1024, 4096):
        with rank_of(2, 0):
            net = shard(cell_of(lambda self, x: function(x)), MESH, plan={"": {"input": {"x": layout(None, "a")}}})
            text = explain(net, Tensor(np.zeros((4, size // 2), np.float32)))
        assert told in text, text
