"""A layer of experts that gives a loss, for tests on simulated and on real ranks."""

from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Normal

from mindformers_core.models.experts import MixtureOfExperts, RoutedExperts, Router, RouterConfig
from mindformers_core.tensor_parallel.layers import Linear

__all__ = ["Config", "Layer", "valued"]


class Layer(nn.Cell):
    """What lies below the experts, a router with all its losses, top-2 of 8 experts, and a shared one."""

    def __init__(self, scores, capacity):
        super().__init__()
        sigmoid = {"n_group": 4, "topk_group": 2, "has_bias": True} if scores == "sigmoid" else {}
        losses = {"aux_loss_coef": 0.3, "seq_aux_loss_coef": 0.2, "z_loss_coef": 0.1}
        config = RouterConfig(8, 2, scores, routed_scaling_factor=1.5, **sigmoid, **losses)
        weight_init = Normal(0.5)
        self.below = Linear(8, 8, weight_init=weight_init)
        experts = RoutedExperts(8, 8, 4, has_bias=True, capacity=capacity, weight_init=weight_init)
        shared = Linear(8, 8, weight_init=weight_init)
        self.moe = MixtureOfExperts(Router(8, config, weight_init), experts, shared)

    def construct(self, x):
        hidden = x + ops.tanh(self.below(x))
        output, loss, _ = self.moe(hidden)
        return ops.mean(ops.square(hidden + output)) + loss


@dataclass(frozen=True)
class Config:
    """What the hooks read."""

    expert_parallel: tuple = ()
    expert_tensor_parallel: tuple = ()


def valued(layer):
    """The layer with drawn values."""
    random = np.random.default_rng(7)
    for parameter in layer.trainable_params():
        parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32) * 0.5))
    return layer
