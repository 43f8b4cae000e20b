"""docs/fine_tuning.md: adapters of a Hugging Face Llama on any mesh, resumed, merged and generated from."""

import json
import shutil
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from safetensors.numpy import load_file
from support.launch import ROOT
from support.nightly import daily
from support.small_generation import mesh

from mindformers_core import init_device_mesh, shard
from mindformers_core.checkpoint import Checkpointer
from mindformers_core.checkpoint.folders import find_checkpoint
from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.checkpoint.parts import Ranks
from mindformers_core.checkpoint.tensors import load_parameters, model_parts
from mindformers_core.commands.command_line import main
from mindformers_core.commands.generating import continue_prompts
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.data.datasets import dataset_of
from mindformers_core.layout import layout
from mindformers_core.models import add_adapters, merge_adapters
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import recipe_mesh
from mindformers_core.trainer.cells import build_model
from mindformers_core.trainer.trainer import Trainer

RECIPE, BASE = str(ROOT / "examples" / "fine_tuning.yaml"), str(ROOT / "tests" / "golden" / "llama_untied")
SMALL = (
    "training.steps=6", "training.local_batch_size=2", "training.global_batch_size=4", "training.max_norm=0.5",
    f"checkpoint.load_path={BASE}", "train_dataset.options.path=" + str(ROOT / "examples" / "fine_tuning.jsonl"),
)  # fmt: skip
sys.path.insert(0, str(ROOT / "examples"))


def recipe_of(folder, *overrides):
    return load_recipe(RECIPE, [*SMALL, f"training.output_dir={folder}", *overrides])


def train(folder, *overrides, steps=2):
    """Losses and norms of some steps, which are saved, and the saved adapters."""
    recipe = recipe_of(folder, *overrides)

    def work(rank):
        trainer = Trainer(recipe, mesh=recipe_mesh(recipe))
        rows = [trainer.train_step() for _ in range(steps)]
        trainer.save()
        return [[float(row[key]) for row in rows] for key in ("loss", "gradient_norm")]

    with custom_gradients():
        curves = SimulatedRanks(recipe_mesh(recipe).size, plans={}).run(work)
    assert all(curve == curves[0] for curve in curves)
    return curves[0], load_file(f"{find_checkpoint(str(folder))}/adapter_model.safetensors")


def generated(checkpoint, *overrides):
    """The texts that a recipe's model continues with the weights of a checkpoint."""
    recipe = recipe_of("unused", *overrides)
    given = ["capital of Peru? ", "capital of France? "], 6, None, 8, "bytes"
    ranks, found = recipe_mesh(recipe), open_checkpoint(find_checkpoint(str(checkpoint)))
    texts = SimulatedRanks(ranks.size).run(lambda rank: continue_prompts(recipe, ranks, rank, found, *given))
    assert all(text == texts[0] for text in texts)
    return texts[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run folder of two steps on one card, their curve, and the adapters."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, *train(folder, *mesh())


MESHES = {
    "zero": mesh(dp=2, tp=2, zero_level=3, sequence_parallel="true"),
    "recompute": [*mesh(pp=2, tp=2), "recompute=true"],
    "one stage": [*mesh(pp=2), "adapters.patterns=layers.1.*.*_proj"],  # the other one trains nothing
    "graphs": [*mesh(), "context.mode=0"],
}


@pytest.mark.parametrize("overrides", daily([MESHES["one stage"]], MESHES.values()), ids=MESHES)
def test_adapters_are_those_of_one_card_on_any_mesh(tmp_path, trained, overrides):
    folder, curve, adapters = trained
    if "patterns" in overrides[-1]:
        curve, adapters = train(tmp_path / "one", *mesh(), overrides[-1])
    found, others = train(tmp_path / "run", *overrides)
    np.testing.assert_allclose(found, curve, 2e-5)
    assert others.keys() == adapters.keys()
    for name, values in adapters.items():
        np.testing.assert_allclose(others[name], values, atol=5e-5, err_msg=name)


@pytest.mark.nightly
def test_a_stage_that_trains_nothing_is_verified(tmp_path):
    """In float64, too: its part of the norm has the dtype of other ranks'."""
    overrides = [*SMALL, *MESHES["one stage"], f"training.output_dir={tmp_path}"]
    assert main(["verify", "--full", "--config", RECIPE, *overrides]) == 0


def test_gradients_are_those_of_merged_weights(tmp_path):
    """Of `W + B A alpha / rank` at `W`, G: `B' G` and `G A'`, and nothing else is trained. Truth is the plain model."""
    recipe = recipe_of(tmp_path, *mesh())
    batch = [*map(Tensor, dataset_of(recipe).batch(0, 4))]
    with_adapters, plain = build_model(recipe), recipe.spec.build(recipe.model)
    rng, weights = np.random.default_rng(0), dict(plain.parameters_and_names())
    for path, parameter in with_adapters.parameters_and_names():
        values = rng.normal(size=parameter.shape).astype(np.float32) * 0.1
        parameter.set_data(Tensor(values))
        if path in weights:
            weights[path].set_data(Tensor(values))
    own = dict(with_adapters.parameters_and_names())
    for path in weights:
        if (low := own.get(path.replace("weight", "lora_A"))) is not None:
            added = own[path.replace("weight", "lora_B")].asnumpy() @ low.asnumpy() * 2
            weights[path].set_data(Tensor(weights[path].asnumpy() + added))
    parameters = with_adapters.trainable_params()
    assert [each.name.rpartition(".")[2] for each in parameters] == ["lora_A", "lora_B"] * 14
    (loss, _), found = ms.value_and_grad(lambda *given: with_adapters(*given), None, parameters, True)(*batch)
    (truth, _), expected = ms.value_and_grad(lambda *given: plain(*given), None, plain.trainable_params(), True)(*batch)
    np.testing.assert_allclose(loss.asnumpy(), truth.asnumpy(), 1e-5)
    gradients = dict(zip([each.name for each in plain.trainable_params()], expected, strict=True))
    for parameter, gradient in zip(parameters, found, strict=True):
        stem, _, end = parameter.name.rpartition(".lora_")
        of_weight = 2 * gradients[f"{stem}.weight"].asnumpy()
        other = own[f"{stem}.lora_{'B' if end == 'A' else 'A'}"].asnumpy().T
        truth = other @ of_weight if end == "A" else of_weight @ other
        np.testing.assert_allclose(gradient.asnumpy(), truth, atol=2e-5 * np.abs(truth).max(), err_msg=parameter.name)


@pytest.mark.long
def test_resumed_merged_and_generated_from(tmp_path, trained, capsys):
    """Two steps on one card and two on (dp 2, tp 2) are four on one; base and adapters speak as merged weights do."""
    folder, curve, _ = trained
    shutil.copytree(folder, tmp_path / "run")
    whole, adapters = train(tmp_path / "whole", *mesh(), steps=4)
    rest, others = train(tmp_path / "run", *mesh(dp=2, tp=2, zero_level=3))
    np.testing.assert_allclose([first + then for first, then in zip(curve, rest)], whole, 2e-5)
    assert adapters.keys() == others.keys() and len(adapters) == 28
    saved, merged = find_checkpoint(str(tmp_path / "run")), str(tmp_path / "merged")
    config = json.loads(Path(saved, "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (8, 16, BASE)
    assert "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight" in adapters
    assert main(["convert", saved, merged]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{merged}: 21 tensors of {BASE}, 14 of them with adapters"
    before, after = load_file(f"{BASE}/model.safetensors"), load_file(f"{merged}/model-00001-of-00001.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    low, high = (others[f"base_model.model.{name}.lora_{end}.weight"] for end in "AB")
    np.testing.assert_allclose(after[f"{name}.weight"], before[f"{name}.weight"] + 2 * high @ low, 1e-6, 1e-6)
    plain = model_parts([recipe_of("unused").spec.build(recipe_of("unused").model)], 0)
    with pytest.raises(ValueError, match="adapter_model.safetensors: '.*' isn't a tensor of this model"):
        load_parameters(open_checkpoint(saved), plain, Ranks())
    texts = generated(saved, *mesh(tp=2))
    assert texts == generated(merged, *mesh(), "adapters.rank=0")
    assert texts != generated(BASE, *mesh()) and texts[0].startswith("capital of Peru? ")
    theirs = tmp_path / "peft"  # as PEFT writes it: two files
    theirs.mkdir()
    for each in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(f"{saved}/{each}", theirs)
    assert generated(theirs, *mesh()) == texts
    for command, message in (
        (["train", "--config", RECIPE, "adapters.rank=4"], "has adapters with rank 8: take adapters.rank=8"),
        (["train", "--config", RECIPE, "adapters.rank=0"], "has adapters with rank 8: take adapters.rank=8"),
        (["train", "--config", RECIPE, "adapters.alpha=1"], "has adapters with alpha 16"),
        (["train", "--config", RECIPE, "adapters.patterns=up_prj"], "'up_prj' matches no linear layer (did you mean"),
        (["convert", saved, f"{tmp_path}/x.ckpt"], "has adapters alone: convert it to a folder first"),
    ):
        options = [*SMALL, *mesh(), f"training.output_dir={tmp_path}/run"] if command[0] == "train" else []
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err


class Own(nn.Cell):
    """Linear layers of MindSpore's, and a loss."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Dense(8, 16), mint.nn.Linear(16, 4), nn.Dense(4, 4, activation="tanh")

    def construct(self, x):
        return ops.square(self.act(self.down(ops.relu(self.up(x))))).mean()


@pytest.mark.usefixtures("one_rank")
def test_adapters_in_python(tmp_path):
    """Of a user's own Cells: no change at first, merged as separate, graphs too; saved by a loop of one's own."""
    net, x = Own(), Tensor(np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32))
    first = net(x).asnumpy()
    for patterns, message in (
        (["act"], "'act' has an activation of its own"),
        (["Up"], r"pattern 'Up' matches no linear layer \(did you mean 'up'\?\)"),
    ):
        with pytest.raises(ValueError, match=message):
            add_adapters(net, 2, patterns)
    assert add_adapters(net, 2, ["up", "d*.weight"], alpha=3) == ["up", "down"]
    with pytest.raises(ValueError, match="'up' is sharded, or has an adapter"):
        add_adapters(net, 2, ["up"])
    np.testing.assert_array_equal(net(x).asnumpy(), first)
    for parameter in net.trainable_params():
        parameter.set_data(Tensor(np.full(parameter.shape, 0.1, np.float32)))
    changed = net(x).asnumpy()

    @ms.jit
    def compiled(x):
        return net(x)

    np.testing.assert_allclose(compiled(x).asnumpy(), changed, 1e-6)
    Checkpointer(str(tmp_path), net).save(1)
    assert {group for group, _ in open_checkpoint(find_checkpoint(str(tmp_path))).tensors} == {"adapter"}
    again = Own()
    ms.load_param_into_net(again, {p.name: p for p in net.get_parameters() if "lora" not in p.name})
    add_adapters(again, 2, ["up", "down"], alpha=3)
    Checkpointer(str(tmp_path), again).load()
    assert merge_adapters(again) == ["up", "down"] and abs(changed - first) > 1e-3
    np.testing.assert_allclose(again(x).asnumpy(), changed, 1e-5)
    assert [*dict(again.parameters_and_names())] == [*dict(Own().parameters_and_names())]
    saved = open_checkpoint(Checkpointer(str(tmp_path / "merged"), again).save(1))
    assert sorted(name for _, name in saved.tensors) == sorted(dict(Own().parameters_and_names()))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("has_base", [True, False])
def test_what_is_trained_beside_adapters_is_saved(tmp_path, has_base):
    """A head, and statistics that training changes, with which the adapters' base is that of other weights alone."""

    def made():
        net = Own()
        net.norm = nn.BatchNorm1d(8)
        return net

    base, folders = made(), [str(tmp_path / name) for name in ("base", "run", "merged")]
    Checkpointer(folders[0], base).save(1)

    def begun():
        net = made()
        add_adapters(net, 2, ["up"])
        net.act.weight.requires_grad = True
        return net, Checkpointer(folders[1], net)

    (net, saving), (again, loading) = begun(), begun()
    if has_base:
        assert saving.load(folders[0]) == 0
    for changed in (net.act.weight, net.norm.moving_mean):
        changed.set_data(changed + 1)
    saved = saving.save(3)
    assert loading.load() == 3
    for name in ("act.weight", "norm.moving_mean", *(["down.weight"] if has_base else [])):
        own, other = (dict(each.parameters_and_names())[name].asnumpy() for each in (net, again))
        np.testing.assert_array_equal(own, other, err_msg=name)
    if has_base:
        assert main(["convert", saved, folders[2]]) == 0
        merged = load_file(f"{folders[2]}/model-00001-of-00001.safetensors")
        np.testing.assert_array_equal(merged["act.weight"], net.act.weight.asnumpy())


@pytest.mark.usefixtures("one_rank")
def test_a_recipe_trains_more_than_adapters(tmp_path):
    """Norms, by a group that isn't frozen; the moving average of these and of adapters is loaded as weights."""
    given = *mesh(), "optimizer.groups=[{parameters: '*norm*', frozen: false}]", "training.average_decay=0.5"
    job = Trainer(recipe_of(tmp_path, *given), mesh=recipe_mesh(recipe_of(tmp_path, *given)))
    for _ in range(2):
        job.train_step()
    job.save()
    names = [parameter.name for parameter in job.optimizer.parameters]
    assert sum("norm" in name for name in names) == 5 and all("norm" in name or "lora" in name for name in names)
    loaded = recipe_of(tmp_path / "new", *given, f"checkpoint.load_path={tmp_path}", "checkpoint.load_average=true")
    again = Trainer(loaded, mesh=job.mesh)
    for own, average, other in zip(
        job.optimizer.parameters, job.optimizer.average.averages, again.optimizer.parameters, strict=True
    ):
        np.testing.assert_array_equal(average.asnumpy(), other.asnumpy(), err_msg=own.name)
        assert (own.asnumpy() != other.asnumpy()).any(), own.name


def test_adapters_are_cut_as_their_weights():
    """By a plan for a user's Cells: B with the rows of W, A with its columns."""

    def work(rank):
        with ms.DeviceCtx("meta"):
            net = Own()
        add_adapters(net, 2, ["up", "down"])
        plan = {"up": {"weight": layout("tp", None)}, "down": {"weight": layout(None, "tp")}}
        shard(net, init_device_mesh((2,), ("tp",)), plan=plan)
        return {path: tuple(each.shape) for path, each in net.parameters_and_names() if "lora" in path}

    expected = {"up.lora_A": (2, 8), "up.lora_B": (8, 2), "down.lora_A": (2, 8), "down.lora_B": (4, 2)}
    assert SimulatedRanks(2).run(work) == [expected] * 2
