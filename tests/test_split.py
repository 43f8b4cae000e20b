"""`split_layer`: the three cases of Paddle's `split`, and what both refuse. `split` on ranks: `ranks/case_split.py`."""

import numpy as np
import pytest
from mindspore import Tensor
from mindspore.common.initializer import Normal

from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mindformers_core.tensor_parallel.splitting import split, split_layer


def test_column_parallel():
    layer = split_layer((6, 4), "linear", axis=1, weight_attr=Normal(1.0), bias_attr="ones")
    x = np.ones((2, 3, 6), np.float32)
    assert type(layer) is ColumnParallelLinear and layer.weight.shape == (4, 6)
    np.testing.assert_allclose(layer(Tensor(x)).asnumpy(), x @ layer.weight.asnumpy().T + 1, rtol=1e-5)
    assert layer.shard()[1:] == (layout(..., None), {"weight": layout("tp", None), "bias": layout("tp")})
    assert split_layer((6, 4), "linear", axis=1, gather_out=False).shard()[1] == layout(..., "tp")


def test_row_parallel():
    layer = split_layer([6, 4], "linear", bias_attr=False)
    assert type(layer) is RowParallelLinear and layer.weight.shape == (4, 6) and layer.bias is None
    assert layer.shard() == (layout(..., "tp"), layout(..., None), {"weight": layout(None, "tp")})
    assert split_layer((6, 4), "linear", gather_out=False).shard()[1] is None
    assert (split_layer((6, 4), "linear").bias.asnumpy() == 0).all()


def test_embedding():
    layer = split_layer((6, 4), "embedding", weight_attr=0.5)
    assert type(layer) is VocabParallelEmbedding and (layer.weight.asnumpy() == np.full((6, 4), 0.5)).all()
    assert layer.shard() == (None, layout(..., None), {"weight": layout("tp", None, pad=True)})


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"num_partitions": 4}, ValueError, "num_partitions: 4 should be 2, the size of axis 'tp' of .dp=1, tp=2."),
        ({"num_partitions": "2"}, TypeError, "num_partitions: expected an int, not '2'"),
        ({"mesh": DeviceMesh((2,), ("dp",)), "num_partitions": 2}, ValueError, "unknown mesh axis 'tp'"),
        ({"size": (8, 4), "num_partitions": 2}, ValueError, r"x of shape \(2, 6\): .* size\[0\] = 8"),
    ],
)
def test_refused_splits(arguments, kind, message):
    mesh = DeviceMesh((1, 2), ("dp", "tp"))
    with pytest.raises(kind, match=message):
        split(Tensor(np.ones((2, 6), np.float32)), **{"size": (6, 4), "operation": "linear", "mesh": mesh, **arguments})
