"""Experts on real ranks: tokens go to them and back, as many rows as there are, in PyNative and compiled."""

import mindspore as ms
import numpy as np
from mindspore import Tensor
from support.launch import on_ranks
from support.routed_layer import Config, Layer, valued
from zero_towers import adam, assert_equal, train_tower

from mindformers_core.communication import count_collectives, world
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import clip_by_global_norm, shard
from mindformers_core.zero import hsdp, value_and_grad


def clipped(gradient_of, parameters):
    """A gradient function whose gradients' norm is 0.5 at most."""

    def gradients(x):
        loss, found = gradient_of(x)
        return loss, clip_by_global_norm(found, parameters, 0.5)[0]

    return gradients


@on_ranks(2)
def case_experts_train_as_on_one_card():
    """20 steps of clipped gradients and Adam: top-2 of 8 experts with biases, a shared one, and all losses."""
    mesh = init_device_mesh((2,), ("dp",))
    whole = np.random.default_rng(5).normal(size=(6, 4, 8)).astype(np.float32)  # 3 rows a rank
    mine = Tensor(np.split(whole, 2)[world().rank])
    for compiled, capacity, steps in ((False, None, 20), (True, None, 3), (False, (2, 4), 3)):
        alone = valued(Layer("softmax", capacity))
        weights = ms.ParameterTuple(alone.trainable_params())
        gradient_of = clipped(ms.value_and_grad(alone, None, weights), weights)
        expected, first = train_tower(alone, gradient_of, Tensor(whole), adam, steps)
        plan = {"": {"input": {"x": layout("dp", None, None)}}}
        net = valued(Layer("softmax", capacity))
        net = hsdp(shard(net, mesh, Config(("dp",)), plan), 2, threshold=0)
        weights = net.trainable_params()
        with count_collectives() as counts:
            found, gradients = train_tower(
                net, clipped(value_and_grad(net, compiled=compiled), weights), mine, adam, steps
            )
        label = f"compiled {compiled}, capacity {capacity}"
        assert ("exchange", ("dp",)) in counts or compiled or capacity, (label, dict(counts))
        assert_equal(net, gradients, first, label)
        assert_equal(net, found, expected, label)
