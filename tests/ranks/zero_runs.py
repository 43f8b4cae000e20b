"""Small trainings under `hsdp()`, and the same on one card: what the cases of ZeRO compare."""

from dataclasses import dataclass, replace
from functools import cache

import mindspore as ms
import numpy as np
from mindspore import Tensor
from models import TINY_LLAMA
from truth import once

from mindformers_core.communication import world
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.optimizers.grouped import GroupedOptimizer
from mindformers_core.optimizers.settings import AdamWSettings
from mindformers_core.recipe.sections import Parallelism
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import shard
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.zero import hsdp, value_and_grad

CONFIG = LlamaConfig(**TINY_LLAMA, num_hidden_layers=2)
SEQUENCES, LENGTH = 16, 8  # of the whole batch of a step
NORM = 0.3  # gradients' global norm that clipping leaves: all steps are clipped


@dataclass(frozen=True)
class Trained:
    """What a training gave: losses and norms by step, gradients of the first step and parameters by path."""

    losses: list
    norms: list
    gradients: dict
    parameters: dict


def llama(**changes):
    """The model with all values drawn from a seed; `changes` are made to its configuration."""
    net = LlamaForCausalLM(replace(CONFIG, **changes))
    random = np.random.default_rng(0)
    for path, parameter in net.parameters_and_names():
        drawn = random.normal(size=parameter.shape) * 0.1 + ("norm" in path)
        parameter.set_data(Tensor(drawn.astype(np.float32), parameter.dtype))
    return net


@cache
def batches(steps):
    """Ids and labels of every step, the whole batch."""
    random = np.random.default_rng(1)
    return [tuple(random.integers(0, 64, (2, SEQUENCES, LENGTH)).astype(np.int32)) for _ in range(steps)]


def adamw(parameters):
    """A function of the number of a step, from 1, and its gradients; updates the parameters."""
    optimizer = GroupedOptimizer(parameters, AdamWSettings(eps=1e-6, weight_decay=0.1))
    return lambda step, gradients: optimizer(gradients, *optimizer.scalars(step, 1e-3))


def train_alone(net, steps, max_norm=0, optimizer=adamw):
    """Train on this rank alone, as MindSpore does it, with nothing of ours but the optimizer."""
    parameters = net.trainable_params()
    gradient_of = ms.value_and_grad(net, None, ms.ParameterTuple(parameters))
    return _train(net, parameters, lambda *batch: gradient_of(*map(Tensor, batch)), steps, max_norm, optimizer)


@once
def alone(steps, max_norm=0, **changes):
    """`train_alone` of a Llama, once."""
    return train_alone(llama(**changes), steps, max_norm)


def train_parts(net, mesh, steps, max_norm=0, optimizer=adamw, compiled=False, loss_scale=None):
    """Train a Cell under `hsdp()`; every rank takes its share of the batch, in as many micro-steps as it was told."""
    gradient_of = value_and_grad(net, compiled, loss_scale)

    def step(*batch):
        for micro_batch in micro_batches(net, mesh, batch):
            loss, gradients = gradient_of(*micro_batch)
            losses.append(float(loss))
        return np.mean([losses.pop() for _ in range(len(losses))]), gradients

    losses = []
    return _train(net, net.trainable_params(), step, steps, max_norm, optimizer)


def micro_batches(net, mesh, batch):
    """This rank's part of a batch for each micro-step, as tensors."""
    count = tree_of(net).storage.settings.accumulate_grad_step
    dp, place = mesh.axis_size("dp"), mesh.group_index(world().rank, ("dp",))
    return [[Tensor(np.split(entry, dp * count)[part * dp + place]) for entry in batch] for part in range(count)]


def _train(net, parameters, gradient_of, steps, max_norm, optimizer):
    clip, update = ClipByGlobalNorm(parameters, max_norm), optimizer(parameters)
    paths = {id(parameter): path for path, parameter in net.parameters_and_names()}
    losses, norms, first = [], [], {}
    for number, batch in enumerate(batches(steps), 1):
        loss, gradients = gradient_of(*batch)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype), paths[id(parameter)]
            first.setdefault(paths[id(parameter)], gradient.asnumpy().copy())
        gradients, norm = clip(gradients)
        update(number, gradients)
        losses.append(float(loss))
        norms.append(float(norm))
    values = {path: parameter.asnumpy().copy() for path, parameter in net.parameters_and_names()}
    return Trained(losses, norms, first, values)


def sharded_llama(mesh, mode="generated", changes=(), **settings):
    """A Llama under `hsdp()` on a mesh of dp and tp, where there is tp with sequence parallel."""
    tp = mesh.axis_size("tp")
    net = shard(llama(**dict(changes)), mesh, Parallelism(tensor_parallel=tp, sequence_parallel=tp > 1), mode=mode)
    return hsdp(net, **{"threshold": 0, **settings})


def mesh_of_all(tp=1):
    """All ranks on the axes dp and tp."""
    return init_device_mesh((world().size // tp, tp), ("dp", "tp"))


def compare(net, found, expected, label, rtol=1e-5, atol=1e-5, gradients=(1e-4, 1e-6)):
    """Each rank's parts, which together are everything, are those of one card; so are losses and norms.

    `gradients` are relative and absolute tolerance of the first step's gradients, which are smaller than weights.
    """
    layouts = {path: parameter for path, parameter in net.parameters_and_names()}
    np.testing.assert_allclose(found.losses, expected.losses, rtol, err_msg=f"losses, {label}")
    np.testing.assert_allclose(found.norms, expected.norms, rtol=10 * rtol, err_msg=f"norms, {label}")
    for what, ours, theirs, tolerances in (
        ("gradient", found.gradients, expected.gradients, gradients),
        ("weight", found.parameters, expected.parameters, (rtol, atol)),
    ):
        assert ours.keys() == theirs.keys()
        for path, value in ours.items():
            part = layouts[path]
            mine = theirs[path][part.layout.local_slices(part.global_shape, world().rank)]
            np.testing.assert_allclose(value, mine, *tolerances, err_msg=f"{what} {path}, {label}")
