"""Small models of all families of Hugging Face's `transformers`: what it says of them, here on meshes.

`tests/golden` is what `make_hugging_face_golden.py` has written with torch. Where torch is, the nightly test takes
other weights, and `transformers` loads our folder.
"""

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from safetensors.numpy import load_file
from support.nightly import daily
from support.small_generation import GREEDY, RECIPE, mesh

from mindformers_core.checkpoint.regions import inside, whole
from mindformers_core.commands.generating import make_generator
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.mesh import init_device_mesh
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import Parallelism, recipe_mesh
from mindformers_core.tensor_parallel import shard
from mindformers_core.trainer.checkpoints import fill_weights, open_source, save_job
from mindformers_core.trainer.trainer import Trainer

pytestmark = pytest.mark.long

_MOMENT = "adamw.moment1."
GOLDEN = Path(__file__).parent / "golden"
NAMES = "llama_tied", "llama_untied", "qwen3", "gpt2", "qwen3_moe", "mixtral", "deepseek_v3"
DP_AND_TP = mesh(dp=2, tp=2, zero_level=2, zero_threshold_kb=0)
PIPELINE = [*mesh(pp=2, tp=2), "training.local_batch_size=4"]
ZERO_3 = [*mesh(dp=2, tp=2, zero_level=3, zero_threshold_kb=0), "recompute=true"]
EXPERTS = [*DP_AND_TP, "parallelism.expert_parallel=[dp]", "parallelism.expert_tensor_parallel=[tp]"]
SEQUENCES = mesh(cp=2, tp=2, sequence_parallel="true")


class Rows:
    """A dataset of a few sequences, over and over."""

    def __init__(self, ids):
        self.ids = ids

    def batch(self, first, count):
        rows = self.ids[np.arange(first, first + count) % len(self.ids)]
        return rows[:, :-1], rows[:, 1:]


def recipe_of(folder, *overrides):
    """The recipe that trains the model in a folder of `transformers`, without clipping."""
    return load_recipe(
        RECIPE,
        [
            f"model={{from: {folder}}}", "training.local_batch_size=2", "training.global_batch_size=4",
            "training.max_norm=0", "train_dataset.seq_length=16", *overrides,
        ],
    )  # fmt: skip


def check_close(found, expected, name, box=...):
    """Within 1e-5, relative to the largest value; of a box of `expected`."""
    np.testing.assert_allclose(found, expected[box], rtol=1e-5, atol=1e-5 * abs(expected).max(), err_msg=name)


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
        names = set()
        for part, state in job.checkpointer.parts().items():
            if part.name.startswith(_MOMENT):
                gradient, name = part.of(state.asnumpy()) / (1 - recipe.optimizer.betas[0]), part.name[len(_MOMENT) :]
                check_close(gradient, expected[f"gradients.{name}"], name, inside(part.box, whole(part.shape)))
                names.add(name)
        return folder, save_job(job), names

    with custom_gradients():
        results = SimulatedRanks(ranks.size).run(work)
    saved = load_file(f"{results[0][0]}/model-00001-of-00001.safetensors")
    assert saved.keys() == tensors.keys()
    assert {f"gradients.{name}" for *_, names in results for name in names} == {
        name for name in expected if name.startswith("gradients.")
    }
    for name, array in saved.items():
        assert array.dtype == np.float32 and array.tobytes() == tensors[name].tobytes(), name
    return Path(results[0][1])


def logits_here(recipe, ids):
    """The logits of all positions, with the weights that a recipe loads, on two ranks."""

    def work(rank):
        with ms.DeviceCtx("meta"):
            net = recipe.spec.build(recipe.model).set_train(False)
        net_mesh = init_device_mesh((1, 2), ("dp", "tp"))
        shard(net, net_mesh, Parallelism())
        fill_weights(open_source(recipe), {0: net}, recipe, net_mesh, rank)
        return net(Tensor(ids)).full_tensor().asnumpy()

    return SimulatedRanks(2).run(work)[0]


def check_answers(theirs):
    """Logits, and the tokens that are generated, on ranks."""
    expected, recipe = load_file(theirs / "expected.safetensors"), recipe_of(theirs, *mesh(tp=2))
    check_close(logits_here(recipe, expected["ids"][:1, :-1])[:, 1::2], expected["logits"], "logits")
    check_tokens(theirs, 24, *mesh(tp=2))
    assert len(set(expected["tokens"][0])) > 5


def check_tokens(theirs, count, *overrides):
    """The first tokens that are generated, on two ranks."""
    expected, recipe = load_file(theirs / "expected.safetensors"), recipe_of(theirs, *overrides)
    prompts, new, checkpoint = expected["ids"][:1].tolist(), expected["tokens"][:, :count], open_source(recipe)

    def work(rank):
        return make_generator(recipe, recipe_mesh(recipe), rank, 1, 17, count, checkpoint).run(prompts, count, GREEDY)

    assert SimulatedRanks(2).run(work) == [new.tolist()] * 2


MESHES = {
    "dp, tp, ZeRO 2": DP_AND_TP, "pp, tp": PIPELINE, "ZeRO 3, recompute": ZERO_3, "cp, tp, sp": SEQUENCES,
    "tp 4": mesh(tp=4),  # more ranks than heads of keys and values
    "dp, ep, etp": EXPERTS,
}  # fmt: skip
DAILY = {  # each kind of layers, and each mesh, once; parts of sequences have daily tests in test_label_weights.py
    ("qwen3", "ZeRO 3, recompute"), ("gpt2", "pp, tp"), ("deepseek_v3", "tp 4"), ("qwen3_moe", "dp, ep, etp"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "on"),
    [
        pytest.param(name, on, marks=() if (name, on) in DAILY else pytest.mark.nightly)
        for name in NAMES for on in MESHES if MESHES[on] is not EXPERTS or name in NAMES[4:]
    ],
)  # fmt: skip
def test_their_loss_and_gradients(tmp_path, name, on):
    check_training(GOLDEN / name, tmp_path, *MESHES[on])


def test_files_are_small():
    assert sum(path.stat().st_size for path in GOLDEN.glob("**/*")) < 10**6


@pytest.mark.nightly  # by day their losses, of the same logits
@pytest.mark.parametrize("name", NAMES)
def test_their_logits_and_tokens(name):
    check_answers(GOLDEN / name)


@pytest.mark.parametrize("name", daily(["qwen3_moe"], NAMES[4:]))
def test_their_tokens_in_a_pipeline(name):
    """Of models with experts, whose later stages take one more argument in training."""
    check_tokens(GOLDEN / name, 3, *mesh(pp=2))


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
    trained = check_training(theirs, tmp_path / "ours", *DP_AND_TP)
    ids = np.random.default_rng(1).integers(0, 256, (2, 40)).astype(np.int32)
    found = logits_of(trained, ids)
    check_close(logits_here(recipe_of(trained, *mesh()), ids), found, "logits")
    assert abs(found - logits_of(theirs, ids)).max() > 1e-3  # the step has changed the model
