"""Models and datasets that aren't ours, named by a recipe: `examples/own_model.yaml`; a U-Net on parts of images."""

import os
import sys
from dataclasses import dataclass

import numpy as np
from models.author_images import UNet
from support.launch import ROOT, on_ranks
from support.streams import Counted
from truth import once

from mindformers_core.communication import world
from mindformers_core.mesh import init_device_mesh
from mindformers_core.recipe.loader import load_recipe, recipe_from_dict
from mindformers_core.recipe.sections import MESH_AXES
from mindformers_core.trainer.trainer import Trainer

sys.path.insert(0, str(ROOT / "examples"))
SMALL = ("training.local_batch_size=4", "training.global_batch_size=16", "model.dropout=0.25")
FLOAT8 = (
    "model.name=test_fp8:TOWER", "train_dataset.factory=test_fp8:open_spread", "model.num_hidden_layers=2",
    "model.hidden_size=16", "model.fp8=hybrid", "training.global_batch_size=8",
)  # fmt: skip
PIPELINE = ("parallelism.pipeline_parallel=2", "parallelism.pipeline_parallel_microbatch_size=2")
MESHES = {
    "compiled": ((1, 2, 1, 2), ("context.mode=0",)),
    "ZeRO 3, recompute": ((1, 2, 1, 2), ("parallelism.zero_level=3", "recompute.full=true")),
    "pp 2, dp 2": ((2, 2, 1, 1), (*PIPELINE, "parallelism.tensor_parallel=1")),
}


@once
def alone():
    """What one card gives, whose class knows no stages."""
    return rows((1, 1, 1, 1), [world().rank], "model.name=own_model:Classifier")


def rows(shape, ranks, *overrides, fixed=SMALL, steps=2):
    """Loss and norm of each step."""
    recipe = load_recipe(str(ROOT / "examples" / "own_model.yaml"), [*fixed, *overrides])
    job = Trainer(recipe, mesh=init_device_mesh(shape, MESH_AXES, ranks))
    return [[row["loss"], row["gradient_norm"]] for row in (job.train_step() for _ in range(steps))]


@on_ranks(4)
def case_a_model_of_ones_own_equals_one_card():
    """Its dropout, too."""
    check(("pp 2, dp 2",))


@on_ranks(nightly=(4,))
def case_a_model_of_ones_own_under_zero():
    """Recomputed; and compiled, without."""
    check(("compiled", "ZeRO 3, recompute"))


def check(names):
    expected = alone()
    assert expected[-1] != expected[0]
    for name in names:
        shape, overrides = MESHES[name]
        np.testing.assert_allclose(rows(shape, None, *overrides), expected, 1e-5, err_msg=name)


@dataclass(frozen=True)
class PhotoConfig:
    """Nothing to configure."""


class SmallUNet(UNet):
    """Two channels, for images of one colour."""

    config_class = PhotoConfig

    def __init__(self, config):
        super().__init__(1, 2)


class Photos:
    """Noise, and what becomes of it: images (1, 512, 512), in a mapped file that counts what is read of it."""

    def __init__(self, path):
        self.file = np.load(path, mmap_mode="r").view(Counted)

    def __len__(self):
        return len(self.file)

    def __getitem__(self, row):
        return self.file[row, 0], self.file[row, 1]


def open_photos(section, *_):
    return Photos(section.options["path"])


def train_on_photos(path, shape, ranks, mode=1, strategy=None):
    """Losses of two steps, the `Trainer`, and the bytes that it has read."""
    recipe = recipe_from_dict({
        "model": {"name": "case_own_model:SmallUNet"}, "training": {"steps": 2},
        "train_dataset": {
            "factory": "case_own_model:open_photos", "options": {"path": path}, "dataset_strategy": strategy,
        },
        "lr_scheduler": {"learning_rate": 0.01}, "context": {"mode": mode},
    })  # fmt: skip
    job = Trainer(recipe, mesh=init_device_mesh(shape, MESH_AXES, ranks))
    losses = [job.train_step()["loss"] for _ in range(2)]
    job._batches.close()
    return losses, job, sum(job.dataset.sources[0].source.file.copied)


@once
def photos_alone():
    """The file of images; losses, and parameters by name, of one card."""
    path = os.path.join(os.environ["TRUTHS"], "photos.npy")  # a folder of this launch
    draw = np.random.default_rng(0).standard_normal((3, 1, 1, 512, 512)).astype(np.float32)
    np.save(path, np.concatenate([draw, np.tanh(3 * draw[..., ::-1, :])], 1))
    losses, job, _ = train_on_photos(path, (1, 1, 1, 1), [world().rank])
    return path, losses, {parameter.name: parameter.asnumpy() for parameter in job.optimizer.parameters}


def check_photos(mode):
    path, expected, parameters = photos_alone()
    losses, job, read = train_on_photos(path, (1, 1, 2, 2), None, mode, [[None, None, "cp", "tp"]] * 2)
    np.testing.assert_allclose(losses, expected, 1e-5)
    assert losses[-1] < losses[0]
    for parameter in job.optimizer.parameters:
        np.testing.assert_allclose(parameter.asnumpy(), parameters[parameter.name], rtol=0, atol=1e-5)
    needed = 2 * 2 * 256 * 256 * 4  # batches, arrays, rows, columns, bytes
    assert needed <= read <= 1.05 * needed


@on_ranks(nightly=(4,))
def case_a_u_net_on_images_cut_by_height_and_width():
    """The curve and the parameters of one card; of the file, each rank reads its part alone. In PyNative and compiled.

    Windows daily on two ranks: `case_windows`.
    """
    for mode in (1, 0):
        check_photos(mode)


def float8_rows(shape, ranks, *overrides):
    """Two steps with products of numbers rounded to float8, of batches whose scale is that of all eight samples."""
    sizes = dict(zip(("pipeline_parallel", "data_parallel_shard", "_", "tensor_parallel"), shape))
    keys = [f"parallelism.{key}={size}" for key, size in sizes.items() if key != "_"]
    keys += [f"training.local_batch_size={8 // shape[1]}", "parallelism.pipeline_parallel_microbatch_size=8"]
    return rows(shape, ranks, *keys, *overrides, fixed=FLOAT8)


@once
def float8_alone():
    """On one card."""
    return float8_rows((1, 1, 1, 1), [world().rank])


def check_float8(shape, *overrides):
    """In float64, where no sum is so near to the middle between two numbers of float8 that its order decides."""
    np.testing.assert_allclose(float8_rows(shape, None, *overrides), float8_alone(), 1e-12, err_msg=str(shape))


@on_ranks(nightly=(4,))
def case_float8_equals_one_card():
    """On several meshes; with ZeRO 3; in float32, compiled, as in PyNative, since graphs don't send float64."""
    check_float8((1, 2, 1, 2))
    check_float8((1, 1, 1, 4))
    check_float8((2, 1, 1, 2))
    check_float8((1, 2, 1, 2), "parallelism.zero_level=3", "parallelism.zero_threshold_kb=0")
    for shape in ((1, 2, 1, 2), (2, 1, 1, 2)):
        found = [float8_rows(shape, None, "model.wide=false", f"context.mode={mode}") for mode in (0, 1)]
        np.testing.assert_allclose(*found, 1e-6, err_msg=str(shape))
        np.testing.assert_allclose(found[0], float8_alone(), 1e-5, err_msg=str(shape))
