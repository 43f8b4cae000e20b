"""`ops.shard()`: the mesh and layouts that strategies mean, and errors. Its numbers: `ranks/case_functional.py`."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.ops import shard
from mindformers_core.propagation.strategies import layouts_of, mesh_of
from mindformers_core.tensor_parallel import prepare, programs


@pytest.mark.parametrize(
    ("strategies", "size", "shape", "dims"),
    [
        ([(8, 1), (1, 8)], 8, (8,), [["d0", ""], ["", "d0"]]),
        ([(2, 4), (4, 1), (8, 1)], 8, (2, 2, 2), [["d0", "d1 d2"], ["d1 d2", ""], ["d0 d1 d2", ""]]),
        ([(3, 2), (2, 3)], 6, (3, 2), [["d0", "d1"], ["d1", "d0"]]),
        ([(2, 2), None, (2, 1)], 8, (2, 2, 2), [["d0", "d1"], None, ["d0", ""]]),
        ([(1, 1)], 1, (1,), [["", ""]]),
    ],
)
def test_strategies_become_axes(strategies, size, shape, dims):
    """A number that came before has its axes again; the mesh has an axis for each prime."""
    mesh = mesh_of({"in_strategy": strategies}, size)
    assert mesh.shape == shape
    (found,) = layouts_of({"in_strategy": strategies}, mesh)
    assert [each and [" ".join(dim) for dim in each.dims] for each in found] == dims


def test_layouts_bring_their_mesh():
    given = Layout((2, 4), ("dp", "tp"))("dp", "tp")
    assert mesh_of({"in_strategy": [given, None, (2, 1)]}, 8) == given.mesh
    with pytest.raises(ValueError, match="is on no mesh yet"):
        mesh_of({"in_strategy": [layout("dp")]}, 8)
    with pytest.raises(ValueError, match=r"in_strategy\[0\]: strategy \(3, 1\): dim 0 can't be cut into 3 parts"):
        layouts_of({"in_strategy": [(3, 1)]}, init_device_mesh((2, 2), ("a", "b")))


class Net(nn.Cell):
    """Shards a method of its own."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def part(self, x):
        return self.dense(x)

    def closure(self):
        def function(x):
            return self.dense(x)

        return function


def product(x, y):
    return ops.matmul(x, y)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error"),
    [
        ((3, ((1,),)), {}, "takes a Cell or a function, not 3"),
        ((Net().part, ((1, 1),)), {}, "not part, a method of a Net: give the Cell"),
        ((Net().closure(), ((1, 1),)), {}, "function closes over 'self', a Net, all of which would be sharded"),
        ((product, (1, 1)), {}, r"in_strategy\[0\]: 1 is no layout"),
        ((product, ((1, 1),) * 3), {}, "in_strategy has 3 entries, and the arguments are x, y"),
        ((product, ((1, 1),)), {"device": "Ascend"}, "device='Ascend'.: this process computes on CPU"),
        ((product, ((1, 1),)), {"level": 3}, "level=3.: choose one of 0, 1, 2"),
        ((product, ((1, 1),)), {"parameter_plan": {"w": (1, 1)}}, "a function has no Parameters"),
        (
            (Net(), ((1, 1),)),
            {"parameter_plan": {"dense.weigth": (1, 1)}},
            "'fn.dense'.*'weigth'.*mean 'weight'",
        ),
        ((product, ((1, 1),)), {"dataset_strategy": "full"}, "dataset_strategy='full'.*full_batch"),
    ],
)
def test_errors(arguments, keywords, error, one_rank):
    with pytest.raises((TypeError, ValueError), match=error):
        shard(*arguments, **keywords)


def test_a_function_of_one_card(one_rank):
    """Names of Parameters stay; a call with keywords; a Parameter that the function closes over is an error."""
    net, weight = Net(), Parameter(Tensor(np.eye(4, dtype=np.float32) * 2), name="own")
    dense, names = net.dense, [parameter.name for parameter in net.get_parameters()]
    x = Tensor(np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))
    expected = (dense(x) * 0.5).asnumpy()
    parallel = shard(lambda x, scale=1.0: dense(x) * scale, (None,))
    np.testing.assert_allclose(parallel(x, scale=0.5).asnumpy(), expected, 1e-6)
    assert [parameter.name for parameter in net.get_parameters()] == names
    assert parallel.cell.trainable_params() == net.trainable_params()
    with pytest.raises(ValueError, match="parameter 'own' .*belongs to no Cell"):
        shard(lambda x: ops.matmul(x, weight), (None,))(x)


def test_samples_are_cut_over_all_ranks(rank_0_of_4):
    parallel = shard(product, ((2, 2), (2, 1)), dataset_strategy=(None, (1, 1)))
    prepare(parallel.cell, tensor_meta((2, 8), "float32"), tensor_meta((8, 4), "float32"))
    (program,) = programs(parallel.cell)
    assert [value.shape for value in program.inputs] == [(8, 8), (8, 4)]
    assert [str(each.layout) for each in program.results] == ["[(d0, d1), -]"]
