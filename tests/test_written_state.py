"""Parameters that a Cell writes: verified in every setting, or an error."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.launch import ROOT
from support.nightly import daily
from support.written_models import MODELS, Residual, batches, built

from mindformers_core import recompute, shard, verify
from mindformers_core.capture.traced import CaptureError
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.zero import hsdp, value_and_grad

MESH = DeviceMesh((2, 2), ("dp", "tp"))
X, Y = (np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32) for seed in range(2))


@pytest.mark.long
@pytest.mark.parametrize("name", daily(("statistics cut", "sums cut"), MODELS))
def test_written_state_is_verified(name):
    kind, plan = MODELS[name]
    cell = built(kind)
    before = [parameter.asnumpy().copy() for parameter in cell.get_parameters()]
    check = verify(cell, MESH, Tensor(batches()[0]), plan=plan)
    assert not check.faults, check.report()
    for parameter, array in zip(cell.get_parameters(), before, strict=True):
        np.testing.assert_array_equal(parameter.asnumpy(), array)
    assert {"steps", "norm.moving_mean"} <= set(check.truth.written[0, 0, 0]) or kind is not Residual


class Shifted(nn.Cell):
    """Reads a counter, then writes it."""

    def __init__(self):
        super().__init__()
        self.dense, self.steps = nn.Dense(8, 8), Parameter(Tensor(0.5), requires_grad=False)

    def construct(self, x, y):
        shifted = self.dense(x) + self.steps
        self.steps *= 3
        return ops.tanh(ops.exp(shifted)) * y


def test_what_runs_again_reads_the_old_value():
    def make():
        return recompute(shard(Shifted(), MESH), select=["shifted", "*.Exp", "dense"])

    check = verify(make, MESH, Tensor(X), Tensor(Y))
    assert not check.faults, check.report()


class Loss(nn.Cell):
    """The mean square of a written model's result."""

    def __init__(self, kind):
        super().__init__()
        self.net = built(kind)

    def construct(self, x):
        return ops.square(self.net(x)).mean()


def _split(**settings):
    cell = shard(Loss(Residual).set_train(), MESH, plan={"": {"input": MODELS["batch norm"][1][""]["input"]}})
    return hsdp(cell, shard_size=2, **settings)


@pytest.mark.long
def test_micro_steps_of_replicas_write_in_their_order():
    mesh = DeviceMesh((4,), ("dp",))
    plan = {"": {"input": MODELS["batch norm"][1][""]["input"]}}

    def build():
        return hsdp(shard(Loss(Residual).set_train(), mesh, plan=plan), shard_size=2, accumulate_grad_step=2)

    check = verify(build, mesh, Tensor(batches()[0]))
    assert not check.faults, check.report()
    first, second = (check.truth.written[0, step, 0]["net.norm.moving_mean"] for step in range(2))
    assert not np.allclose(first, second)


def _split_alone():
    """Replicas that know nothing of each other."""
    return hsdp(Loss(Residual).set_train(), mesh=MESH, axis="dp", shard_size=2)


def _split_by_operator():
    cell = shard(Loss(Residual).set_train(), MESH, mode="eager")
    return hsdp(cell, shard_size=2, optimizer_level="level3", threshold=0)


REFUSED = {
    "level 3": (
        lambda: _split(optimizer_level="level3", threshold=0),
        "'net.norm.moving_mean' is written by a Cell, and hsdp.* updates a copy of it: leave it whole.*threshold",
    ),
    "replicas": (_split_alone, "'net.steps' is written by a Cell, and hsdp.* a value, of its own: have its axis in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hsdp_refuses_parameters_that_differ_or_are_copies(name):
    make, expected = REFUSED[name]
    with pytest.raises(CaptureError, match=f"^rank .: in Cell 'net.*written_models.py:[0-9]+: parameter {expected}"):
        verify(make, MESH, Tensor(batches()[0]))


@pytest.mark.usefixtures("rank_0_of_4")
def test_operator_by_operator_it_is_refused_too():
    with pytest.raises(ValueError, match="^in Cell 'net.norm' .*: parameter 'net.norm.moving_mean' is written by"):
        _split_by_operator()(Tensor(batches()[0]))


COMPILED = {
    "alone": (
        "net.first", r"^Cell 'net' .*written_models.py:\d+: a Parameter is written in a Cell that is compiled alone, "
        "which MindSpore can't do: compile the whole, or run in PyNative$",
    ),
    "again": (
        "net.norm", r"^recompute: Cell 'net.norm' writes Parameters \(net.norm.moving_mean\), .* would write them "
        "twice: exclude it, or run in PyNative",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_parts_refuse_to_write(name):
    selected, expected = COMPILED[name]
    net = recompute(shard(Loss(Residual).set_train(), init_device_mesh((1,), ("dp",))), select=selected)
    with pytest.raises(ValueError, match=expected):
        value_and_grad(hsdp(net), compiled=True)(Tensor(batches()[0]))


MESHES = {
    "pipeline": (
        "parallelism.pipeline_parallel=2", "parallelism.pipeline_parallel_microbatch_size=2",
        "parallelism.data_parallel_shard=1", "training.global_batch_size=4",
    ),
    "ZeRO 3 and recompute": ("parallelism.zero_level=3", "recompute.full=true", "training.global_batch_size=16"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", daily(("pipeline",), MESHES))
def test_recipes_write_as_one_card_does(name):
    """Micro-batches in their order, and what runs again once."""
    given = "training.local_batch_size=4", "training.global_batch_size=8"
    given += ("model.name=support.normalised_model:CLASSIFIER",)
    check = verify_recipe(load_recipe(str(ROOT / "examples" / "own_model.yaml"), [*given, *MESHES[name]]))
    assert not check.faults, check.report()
    states = [state["blocks.1.norm.moving_mean"] for state in check.truth.written.values()]
    assert len(states) > 1 and not np.allclose(states[0], states[1])
