"""Bytes foretold by the plan are the bytes counted, of every dtype, by both engines; compiled: `case_collectives`."""

import mindspore as ms
import pytest
from support.dtype_programs import DTYPES, WITH_GRADIENT, foretold, loss_of, sharded

from mindformers_core.communication import count_collectives
from mindformers_core.communication.world import rank_of
from mindformers_core.mesh import DeviceMesh

MESH = DeviceMesh((4,), ("tp",))


@pytest.mark.parametrize("mode", ["generated", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_plan_foretells_is_counted(dtype, mode):
    with rank_of(4, 0):
        expected = foretold(dtype, MESH)
        cell, x = sharded(dtype, MESH, mode)
        with count_collectives() as counts:
            if dtype in WITH_GRADIENT:
                ms.value_and_grad(lambda x: loss_of(cell(x)), None, cell.trainable_params())(x)
            else:
                cell(x)
    assert counts == expected
