"""A layer of experts that gives a loss, and its training, on one card and on the ranks of a mesh, real or simulated."""

from dataclasses import dataclass, field

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Normal

from mindformers_core import recompute
from mindformers_core.communication import world
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models.experts import MixtureOfExperts, RoutedExperts, Router, RouterConfig
from mindformers_core.optimizers.grouped import GroupedOptimizer
from mindformers_core.optimizers.settings import AdamWSettings
from mindformers_core.sharding.shard import shard
from mindformers_core.tensor_parallel import clip_by_global_norm
from mindformers_core.tensor_parallel.layers import Linear
from mindformers_core.zero import hsdp, value_and_grad

__all__ = ["CASES", "Case", "Config", "Layer", "check_here", "train_alone", "valued"]

TOLERANCE = 1e-5  # of losses and norms; of gradients and parameters, relative to the largest
_NORM, _RATE = 0.5, 3e-3  # gradients are clipped
_OPTIMIZER = AdamWSettings(eps=1e-4, weight_decay=0.1)  # a smaller eps would make rounding of small gradients large


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
        output, loss, *_ = self.moe(hidden)
        return ops.mean(ops.square(hidden + output)) + loss


@dataclass(frozen=True)
class Config:
    """What the hooks read."""

    expert_parallel: tuple = ()
    expert_tensor_parallel: tuple = ()


@dataclass(frozen=True)
class Case:
    """A mesh, and what its axes cut.

    Attributes:
        sizes: axes and their sizes, as "dp2 tp4".
        rows: axes of the batch, and of the sequence.
        each, inner: those of the experts, and inside of them.
        zero: settings of `hsdp`, whose axes are all but tp.
        capacity, scores: as of `Layer`.
    """

    sizes: str
    rows: tuple
    each: tuple = ()
    inner: tuple = ()
    zero: dict = field(default_factory=dict)
    capacity: tuple | None = None
    scores: str = "softmax"

    def __str__(self):
        shown = (
            f"{self.sizes}, ep {'.'.join(self.each)}, etp {'.'.join(self.inner)}, {self.zero.get('optimizer_level')}"
        )
        return f"{shown}, capacity {self.capacity}, {self.scores}"

    @property
    def mesh(self):
        """The `DeviceMesh`."""
        names, counts = zip(*((part[:2], int(part[2:])) for part in self.sizes.split()))
        return DeviceMesh(counts, names)

    @property
    def shape(self):
        """That of a batch, of three rows for each rank that has others."""
        axes = self.rows[0] or ()
        return 3 * self.mesh.axis_size(*((axes,) if isinstance(axes, str) else axes)), 4, 8

    def build(self, mesh, layer=None, recomputed=False):
        """The layer of a rank; `recomputed`: router and experts in the backward pass."""
        plan = {"": {"input": {"x": layout(*self.rows, None)}}}
        net = shard(layer or Layer(self.scores, self.capacity), mesh, Config(self.each, self.inner), plan)
        net = recompute(net, select=["moe"]) if recomputed else net
        axes = tuple(axis for axis in mesh.axis_names if axis != "tp")
        return hsdp(net, axis=axes, **{"shard_size": 1, "threshold": 0, **self.zero})


CASES = [
    Case("dp2", ("dp", None), ("dp",), zero={"shard_size": 2}),
    Case("dp2 tp2", ("dp", None), ("tp",)),  # own experts of all tokens
    Case("dp2 tp2", ("dp", "tp"), (), ("tp",), capacity=(1, 2)),
    Case("dp2 tp2", ("dp", None), ("dp",), ("tp",), {"shard_size": 2}),
    Case("dp2 tp2", ("dp", "tp"), ("dp", "tp"), (), {"shard_size": 2, "optimizer_level": "level2"}),
    Case("dp2 cp2", ("dp", "cp"), ("cp", "dp"), (), {"shard_size": 4, "optimizer_level": "level3"}, None, "sigmoid"),
    Case("dp2 cp2", ("dp", "cp"), ("cp",), (), {"shard_size": 4, "optimizer_level": "level3"}),
    Case("cp2 tp2", (None, "cp"), ("cp",), ("tp",), {"shard_size": 2}, (2, 2), "sigmoid"),
    Case("dp2 ep2", (("dp", "ep"), None), ("ep",), (), {"shard_size": 4}),  # 4 ranks of data, in two copies of experts
    Case("dp2 cp2 tp2", ("dp", "cp"), ("dp", "cp"), ("tp",), {"shard_size": 2, "optimizer_level": "level2"}, (1, 2)),
    Case("dp2 cp2 tp2", ("dp", "cp"), ("tp", "dp"), (), {"shard_size": 4}),
    Case("dp4 tp2", ("dp", "tp"), ("dp",), (), {"shard_size": 2}, (2, 2)),
    Case("dp8", ("dp", None), ("dp",), (), {"shard_size": 8, "optimizer_level": "level3"}),  # an expert a rank
]


def valued(layer):
    """The layer with drawn values."""
    random = np.random.default_rng(7)
    for parameter in layer.trainable_params():
        parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32) * 0.5))
    return layer


def batch(step, shape):
    """Inputs of a step: in the second of three all tokens choose the same experts, in the third all scores are equal,
    so that the first two experts get all."""
    random = np.random.default_rng([5, step])
    drawn = random.normal(size=shape if step % 3 == 0 else shape[-1:]).astype(np.float32)
    return np.broadcast_to(drawn * (step % 3 != 2), shape)


def train_alone(case, steps):
    """On one card: the first gradients, the losses and norms of all steps, and the parameters after them, by path."""
    net = valued(Layer(case.scores, case.capacity))
    gradient_of = ms.value_and_grad(net, None, ms.ParameterTuple(net.trainable_params()))
    return _train(net, gradient_of, lambda whole: whole, case, steps)


def check_here(case, mesh, steps, expected, compiled=False):
    """Train on this rank of the mesh, and compare with what `train_alone` gives."""
    net = case.build(mesh, valued(Layer(case.scores, case.capacity)))
    mine = layout(*case.rows, None).bind(mesh, 3).local_slices(case.shape, world().rank)
    first, of_steps, values = _train(net, value_and_grad(net, compiled=compiled), lambda x: x[mine], case, steps)
    np.testing.assert_allclose(of_steps, expected[1], 1e-5, err_msg=str(case))
    for path, parameter in net.parameters_and_names():
        part = parameter.layout.local_slices(parameter.global_shape, world().rank)
        for found, whole in ((values, expected[2]), (first, expected[0]))[: 1 + parameter.requires_grad]:
            limit = TOLERANCE * abs(whole[path]).max()
            np.testing.assert_allclose(found[path], whole[path][part], 0, limit, err_msg=f"{path}, {case}")


def _train(net, gradient_of, part, case, steps):
    parameters, of_steps = net.trainable_params(), []
    optimizer, paths = GroupedOptimizer(parameters, _OPTIMIZER), {id(p): path for path, p in net.parameters_and_names()}
    for step in range(steps):
        loss, gradients = gradient_of(Tensor(np.ascontiguousarray(part(batch(step, case.shape)))))
        if step == 0:
            first = {paths[id(p)]: g.asnumpy().copy() for p, g in zip(parameters, gradients, strict=True)}
        gradients, norm = clip_by_global_norm(gradients, parameters, _NORM)
        of_steps.append((float(loss.asnumpy()), float(norm.asnumpy())))
        optimizer(gradients, *optimizer.scalars(step + 1, _RATE))
    return first, np.array(of_steps), {path: each.asnumpy().copy() for path, each in net.parameters_and_names()}
