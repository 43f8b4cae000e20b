"""Draws: the numbers of one card on every mesh, seeded or not, by both engines and compiled."""

from contextlib import contextmanager
from importlib import import_module

import mindspore as ms
import numpy as np
from launch import on_ranks
from mindspore import Tensor, mint, nn, ops

from mindformers_core.communication import world
from mindformers_core.dtensor.interception import draws_by_position
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import jit, shard

SHAPE = (8, 16)
MESHES = {2: [((2,), ("dp",))], 4: [((4,), ("dp",)), ((2, 2), ("dp", "tp"))]}
SEEDS = (0, 5)  # 0: the generator's state at the start of a process


class Noisy(nn.Cell):
    def construct(self, x):
        plain = mint.zeros(x.shape)
        drawn = plain.normal_() + mint.rand_like(mint.zeros(x.shape))
        return x * 0 + ops.standard_normal(x.shape) + ops.rand(*x.shape) + drawn


@contextmanager
def nothing_seeded():
    """As if `ms.set_seed` hadn't been called: MindSpore's own draws differ from process to process then."""
    module, before = import_module("mindspore.common.seed"), ms.get_seed()
    module._GLOBAL_SEED = None
    try:
        yield
    finally:
        module._GLOBAL_SEED = before


def drawn(net, x, seed):
    """The whole result for a state of the generator."""
    ms.manual_seed(seed)
    found = net(x)
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).asnumpy()


@on_ranks(2, 4)
def case_draws_without_tensors_are_those_of_one_card():
    """In every mode; those of a mesh of one rank are in `test_draws`."""
    with nothing_seeded():
        with draws_by_position():
            truth = [drawn(Noisy(), Tensor(np.zeros(SHAPE, np.float32)), seed) for seed in SEEDS]
        assert abs(truth[0] - truth[1]).max() > 0.1
        for place, given in enumerate(MESHES[world().size]):
            mesh = init_device_mesh(*given)
            cut = Layout.on(mesh, [(axis,) for axis in mesh.axis_names] + [()] * (2 - mesh.ndim))
            plan = {"": {"input": {"x": cut}, "output": Layout.on(mesh, [(), ()])}}
            part = Tensor(np.zeros(cut.local_shape(SHAPE), np.float32))
            for mode in ("generated", "jit") if place else ("generated", "jit", "eager"):
                net = shard(Noisy(), mesh, plan=plan, mode=mode.replace("jit", "generated"))
                net = jit(net) if mode == "jit" else net
                for seed, expected in zip(SEEDS, truth):
                    found = drawn(net, part, seed)
                    np.testing.assert_allclose(found, expected, 1e-5, 1e-5, err_msg=f"{mesh}, {mode}, {seed}")
