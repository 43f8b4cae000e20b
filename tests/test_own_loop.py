"""docs/own_loop.md: a loop of one's own has one card's curve on any mesh, and goes on where another mesh stopped."""

import re
import sys

import numpy as np
import pytest
from mindspore import DeviceCtx, Parameter, ParameterTuple, Tensor, nn, ops
from support.launch import ROOT

from mindformers_core import init_device_mesh, shard
from mindformers_core.checkpoint import Checkpointer
from mindformers_core.commands.compare import read_losses
from mindformers_core.communication import world
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.trainer.trainer import Trainer
from mindformers_core.zero import hsdp

sys.path.insert(0, str(ROOT / "examples"))
import own_loop  # noqa: E402


def train(ranks, *given):
    with custom_gradients():
        curve, *others = SimulatedRanks(ranks, plans={}).run(lambda rank: own_loop.train(world(), *given))
    assert all(other == curve for other in others)
    return curve


@pytest.mark.long
def test_the_curve_is_one_cards_through_three_meshes(tmp_path):
    expected = train(1, str(tmp_path / "one"), 30)
    curve = [*train(4, str(tmp_path / "run"), 10, 2), *train(2, str(tmp_path / "run"), 20)]
    curve += train(4, str(tmp_path / "run"), 30)
    np.testing.assert_allclose(curve, expected, 1e-5)
    assert expected[-1] < 0.5 * expected[0]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir()) == ["step_20", "step_30"]


def test_the_page_shows_the_example():
    page = (ROOT / "docs" / "own_loop.md").read_text(encoding="utf-8")
    code = (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")
    shown = code[code.index("def train(") : code.index("\n\n\nif __name__")]
    assert f"```python\n{shown}\n```" in page
    documents = {"", *re.search(r'""".*?"""', code, re.S)[0].splitlines()}
    lines = [line.strip() for line in code.splitlines() if line not in documents]
    assert len([line for line in lines if not line.startswith('"""')]) <= 60


class Counter(nn.Cell):
    """An optimizer of a user's: a number of steps, and a sum of gradients for each parameter."""

    def __init__(self, parameters):
        super().__init__()
        self.parameters = tuple(parameters)
        self.steps = Parameter(Tensor(0), name="steps")
        self.sums = ParameterTuple([Parameter(ops.zeros_like(p), name=f"sum.{p.name}") for p in parameters])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_async", [False, True])
def test_state_of_ones_own(tmp_path, is_async):
    """All Parameters of an optimizer, and a dict; weights alone; nothing yet; a tensor that isn't finite."""
    net, other = nn.Dense(2, 3), nn.Dense(2, 3)
    optimizers = [Counter(each.trainable_params()) for each in (net, other)]
    with Checkpointer(str(tmp_path), net, optimizers[0], async_save=is_async) as checkpointer:
        assert checkpointer.load() == 0 and checkpointer.state == {}
        with pytest.raises(FileNotFoundError, match="neither a checkpoint"):
            checkpointer.load(str(tmp_path))
        optimizers[0].steps.set_data(Tensor(7))
        optimizers[0].sums[0].set_data(ops.ones_like(optimizers[0].sums[0]))
        folder = checkpointer.save(7, {"scale": {"value": 2.5}})
    again = Checkpointer(str(tmp_path), other, optimizers[1])
    assert again.load(weights_only=True) == 0 and optimizers[1].steps.item() == 0 and again.state == {}
    np.testing.assert_array_equal(other.weight.asnumpy(), net.weight.asnumpy())
    assert again.load(folder) == 7 and again.state == {"scale": {"value": 2.5}} and optimizers[1].steps.item() == 7
    np.testing.assert_array_equal(optimizers[1].sums[0].asnumpy(), np.ones((3, 2)))
    other.bias.set_data(Tensor(np.array([1, np.nan, 2], np.float32)))
    with pytest.raises(FloatingPointError, match="bias: not finite after step 8, which is not saved"):
        again.save(8)


@pytest.mark.ranks
def test_the_same_command_goes_on(tmp_path):
    """`training.resume=auto`: begins, goes on at the newest checkpoint, and has the curve of one run."""
    recipe = str(ROOT / "configs" / "llama_tiny_cpu_1p.yaml")
    small = (
        "train_dataset.seq_length=16", "train_dataset.max_bytes=20000", "model.hidden_size=16", "monitor.plot=false",
        "model.num_hidden_layers=1", "checkpoint.enable_save=true", "checkpoint.save_interleaved_steps=2",
        f"train_dataset.cache_dir={tmp_path}/cache",
    )  # fmt: skip
    given = f"training.output_dir={tmp_path}/run", "training.resume=auto"
    for steps in (2, 4):
        Trainer(load_recipe(recipe, [*small, *given, f"training.steps={steps}"])).run()
    Trainer(load_recipe(recipe, [*small, f"training.output_dir={tmp_path}/whole", "training.steps=4"])).run()
    curves = [read_losses(str(tmp_path / name)) for name in ("run", "whole")]
    assert list(curves[0]) == [1, 2, 3, 4] and curves[0][1] == curves[1][1]
    assert Trainer(load_recipe(recipe, [*small, *given, "training.steps=4"])).run() is None  # complete
    with pytest.raises(ValueError, match="training.steps: 3, but .*step_4 already has 4 steps"):
        Trainer(load_recipe(recipe, [*small, *given, "training.steps=3"]))


class Holder(nn.Cell):
    """An optimizer with these Parameters, in a dict."""

    def __init__(self, parameters, states):
        super().__init__(auto_prefix=False)
        self.parameters, self.states = tuple(parameters), dict(enumerate(states))


def test_states_that_no_name_places(tmp_path):
    """Of a part's shape, of one name, and different on ranks: errors; a dict's Parameters are saved, rates are not."""

    def named(name, shape=(), value=0.0):
        return Parameter(Tensor(np.full(shape, value, np.float32)), name=name)

    def work(rank):
        mesh = init_device_mesh((2,), ("dp",))
        with DeviceCtx("meta"):
            net = nn.Dense(4, 4, has_bias=False)
        shard(net, mesh, seed=0)
        weights = hsdp(net, 2, 0).trainable_params()

        def save(*states):
            return Checkpointer(str(tmp_path), net, Holder(weights, states), mesh).save(1)

        with pytest.raises(ValueError, match="'weight.m' of Holder has the shape .2, 4. of this rank's part"):
            save(named("weight.m", (2, 4)))
        with pytest.raises(ValueError, match="Holder has two Parameters 'steps'"):
            save(named("steps"), named("steps"))
        with pytest.raises(ValueError, match="the optimizer's 'rows' differs on ranks 0 and 1"):
            save(named("rows", (3,), rank))
        save(named("m.weight", (2, 4), rank + 1), named("steps", value=7), named("learning_rate_group_0"))
        found = named("m.weight", (2, 4)), named("steps"), named("learning_rate_group_0", value=0.5)
        assert Checkpointer(str(tmp_path), net, Holder(weights, found), mesh).load() == 1
        assert [each.asnumpy().flat[0] for each in found] == [rank + 1, 7, 0.5]

    with custom_gradients():
        SimulatedRanks(2).run(work)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_async", [False, True])
def test_parameters_that_come_later_and_errors_in_the_block(tmp_path, is_async):
    net, state = nn.Dense(2, 2), Parameter(Tensor(1.0), name="late")
    optimizer = Holder(net.trainable_params(), [])

    def loop():
        with Checkpointer(str(tmp_path), net, optimizer, async_save=is_async) as checkpointer:
            checkpointer.save(1)
            with pytest.raises(ValueError, match="key 'step', which a checkpoint has itself"):
                checkpointer.save(2, {"step": 3})
            optimizer.states[0] = state
            checkpointer.save(2)
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        loop()
    state.set_data(Tensor(0.0))
    (tmp_path / "model.safetensors").write_bytes(b"exported beside the run")
    assert Checkpointer(str(tmp_path), net, optimizer).load() == 2 and state.item() == 1.0
