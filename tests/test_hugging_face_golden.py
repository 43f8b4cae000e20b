"""Llamas of Hugging Face's `transformers`, tied and untied, with grouped heads: what it says of them, here on meshes.

`tests/golden` is what `make_hugging_face_golden.py` has written with torch. Where torch is, the nightly test takes
other weights, and `transformers` loads our folder.
"""

import json
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from safetensors.numpy import load_file
from support.nightly import daily
from support.small_generation import GREEDY, RECIPE, mesh

from mindformers_core.checkpoint.hugging_face import model_section
from mindformers_core.commands.generating import make_generator
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models.spec import MODELS
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import Parallelism, recipe_mesh
from mindformers_core.serving.predict import load_distributed_checkpoint
from mindformers_core.tensor_parallel import shard
from mindformers_core.trainer.checkpoints import open_source, save_job
from mindformers_core.trainer.trainer import Trainer

GOLDEN = Path(__file__).parent / "golden"
NAMES = "llama_tied", "llama_untied"
DP_AND_TP = mesh(dp=2, tp=2, zero_level=2, zero_threshold_kb=0)
PIPELINE = [*mesh(pp=2, tp=2), "training.local_batch_size=4"]


class Rows:
    """A dataset of a few sequences, over and over."""

    def __init__(self, ids):
        self.ids = ids

    def batch(self, first, count):
        rows = self.ids[np.arange(first, first + count) % len(self.ids)]
        return rows[:, :-1], rows[:, 1:]


def recipe_of(folder, *overrides):
    """The recipe that trains the model in a folder of `transformers`, without clipping."""
    section = model_section(MODELS["llama"], "llama", json.loads((folder / "config.json").read_text()), "config.json")
    return load_recipe(
        RECIPE,
        [
            *(f"model.{key}={json.dumps(value)}" for key, value in section.items()), "training.local_batch_size=2",
            "training.global_batch_size=4", "training.max_norm=0", "train_dataset.seq_length=16",
            f"checkpoint.load_path={folder}", *overrides,
        ],
    )  # fmt: skip


def check_close(found, expected, name):
    """Within 1e-5, relative to the largest value."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * abs(expected).max(), err_msg=name)


def check_training(theirs, ours, *overrides):
    """On 4 ranks: what is saved at once is theirs byte by byte; loss and gradients of a step are theirs, too.

    Returns the folder of the checkpoint after the step.
    """
    recipe = recipe_of(theirs, *overrides, f"training.output_dir={ours}")
    expected, tensors = load_file(theirs / "expected.safetensors"), load_file(theirs / "model.safetensors")
    data, ranks = Rows(expected["ids"]), recipe_mesh(recipe)

    def work(rank):
        job = Trainer(recipe, mesh=ranks, dataset=data)
        folder = save_job(job)
        check_close(job.train_step()["loss"], expected["loss"], "loss")
        states = {each.name: each for each in job.optimizer.get_parameters()}
        for parameter in job.optimizer.parameters:
            gradient = states[f"adamw.moment1.{parameter.name}"].asnumpy() / (1 - recipe.optimizer.betas[0])
            mine = parameter.layout.local_slices(parameter.global_shape, rank)
            check_close(gradient, expected[f"gradients.{parameter.name}"][mine], parameter.name)
        return folder, save_job(job), {parameter.name for parameter in job.optimizer.parameters}

    with custom_gradients():
        results = SimulatedRanks(ranks.size).run(work)
    saved = load_file(f"{results[0][0]}/model-00001-of-00001.safetensors")
    assert saved.keys() == tensors.keys() == set.union(*(names for *_, names in results))
    for name, array in saved.items():
        assert array.dtype == np.float32 and array.tobytes() == tensors[name].tobytes(), name
    return Path(results[0][1])


def logits_here(folder, recipe, ids):
    """The logits of all positions, with the weights of a folder, on two ranks."""

    def work(rank):
        with ms.DeviceCtx("meta"):
            net = recipe.spec.build(recipe.model).set_train(False)
        shard(net, init_device_mesh((1, 2), ("dp", "tp")), Parallelism())
        load_distributed_checkpoint(net, str(folder))
        return net(Tensor(ids)).full_tensor().asnumpy()

    return SimulatedRanks(2).run(work)[0]


def check_answers(theirs):
    """Logits, and the tokens that are generated, on two ranks."""
    expected, recipe = load_file(theirs / "expected.safetensors"), recipe_of(theirs, *mesh(tp=2))
    check_close(logits_here(theirs, recipe, expected["ids"][:, :-1]), expected["logits"], "logits")
    checkpoint = open_source(recipe)
    prompts, new = expected["ids"][:1].tolist(), expected["tokens"].tolist()

    def work(rank):
        return make_generator(recipe, recipe_mesh(recipe), rank, 1, 17, 24, checkpoint).run(prompts, 24, GREEDY)

    assert SimulatedRanks(2).run(work) == [new] * 2
    assert len(set(new[0])) > 5


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param(NAMES[0], DP_AND_TP, id="tied, dp and tp"),
        pytest.param(NAMES[1], PIPELINE, id="untied, pp and tp"),
        pytest.param(NAMES[0], PIPELINE, id="tied, pp and tp", marks=pytest.mark.nightly),
        pytest.param(NAMES[1], DP_AND_TP, id="untied, dp and tp", marks=pytest.mark.nightly),
    ],
)
def test_their_loss_and_gradients(tmp_path, name, overrides):
    check_training(GOLDEN / name, tmp_path, *overrides)


@pytest.mark.parametrize("name", daily(NAMES[:1], NAMES))
def test_their_logits_and_tokens(name):
    check_answers(GOLDEN / name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_transformers_itself(tmp_path, name):
    """With other weights; and it loads what has been trained here, unchanged."""
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=f"needs {package}: pip install torch transformers")
    from make_hugging_face_golden import MODELS as SETTINGS, logits_of, write_golden

    theirs = tmp_path / "theirs"
    write_golden(theirs, seed=7, **SETTINGS[name])
    check_answers(theirs)
    trained, recipe = check_training(theirs, tmp_path / "ours", *DP_AND_TP), recipe_of(theirs, *mesh())
    ids = np.random.default_rng(1).integers(0, 256, (2, 40)).astype(np.int32)
    found = logits_of(trained, ids)
    check_close(logits_here(trained, recipe, ids), found, "logits")
    assert abs(found - logits_of(theirs, ids)).max() > 1e-3  # the step has changed the model
