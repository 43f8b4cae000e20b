"""Who computes which samples of a step, and what of them a rank reads: the same batch on every mesh."""

from contextlib import nullcontext
from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from support.nightly import daily
from test_data import make_dataset

from mindformers_core import shard
from mindformers_core.batches import BatchPlan
from mindformers_core.commands.diffing import run_simulated
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.data.reading import local_batch
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models import ModelSpec
from mindformers_core.recipe.loader import recipe_from_dict

PLANS = [  # samples, ranks, size, micro-batches -> runs, empty rows
    ((8, 1, 8, 1), (1, 0)),
    ((8, 4, 2, 1), (1, 0)),
    ((8, 2, 1, 2), (2, 0)),
    ((8, 3, 1, 1), (3, 1)),
    ((8, 3, 2, 1), (2, 4)),
    ((5, 2, 1, 4), (1, 3)),
    ((7, 2, 2, 3), (1, 5)),
    ((2, 5, 3, 1), (1, 13)),
]


@pytest.mark.parametrize(("given", "expected"), PLANS)
def test_a_step_has_its_samples_whatever_the_ranks(given, expected):
    """In order, each once; empty rows repeat the last sample, and none of their labels counts."""
    plan, dataset, mesh = BatchPlan(*given), make_dataset(), DeviceMesh((given[1],), ("dp",))
    assert (plan.runs, plan.empty) == expected
    assert [sample for samples in plan.passes for sample in samples] == [*range(plan.samples)]
    layouts = [Layout.on(mesh, (("dp",), ()))] * 2
    for consumed in (0, 40):
        ids, labels = dataset.batch(consumed, plan.samples)
        parts = [local_batch(plan, layouts, rank, {1: -100}, dataset, consumed) for rank in range(plan.ranks)]
        shape = plan.runs, plan.micro_batches * plan.size, 4
        assert {array.shape for arrays in parts for array in arrays} == {shape}
        found, counted = (
            np.stack([array.reshape(-1, plan.size, 4) for array in arrays], 1).reshape(-1, 4) for arrays in zip(*parts)
        )
        np.testing.assert_array_equal(found, np.concatenate([ids, *[ids[-1:]] * plan.empty]))
        np.testing.assert_array_equal(counted, np.concatenate([labels, np.full((plan.empty, 4), -100)]))


def test_samples_of_a_mean_are_shared_evenly():
    model = {"name": "test_own_model_training:LENGTHS"}
    section = {"factory": "test_own_model_training:open_data"}
    given = {"model": model, "train_dataset": section, "training": {"local_batch_size": 2, "global_batch_size": 9}}
    with pytest.raises(ValueError, match="9 is no multiple of .* 2 x 2 .* = 4, as test_own_model.*:LENGTHS .*: try 8"):
        recipe_from_dict(given | {"parallelism": {"data_parallel_shard": 2}})
    for form, name in (("mean", "labels"), ("sum", "label")):
        with pytest.raises(ValueError, match="^ModelSpec.ignored: .* needs loss=.sum., and names of inputs .'ids', 'l"):
            ModelSpec(None, None, loss=form, inputs=("ids", "labels"), ignored={name: -100})


@dataclass(frozen=True)
class ImageConfig:
    """Which dims of an image are cut over which axes."""

    rows: str | None = "tp"
    columns: str | None = None
    samples: str | None = "dp"


class Images(nn.Cell):
    """A convolution, whose kernel needs rows and columns of neighbours, and a mean over images (sample, 2, 8, 8)."""

    config_class = ImageConfig

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.convolution = nn.Conv2d(2, 3, 3, pad_mode="same", weight_init="normal")
        self.dense = nn.Dense(3, 1)

    def shard(self, config):
        cut = layout(self.config.samples, None, self.config.rows, self.config.columns)
        return {"image": cut, "label": layout(self.config.samples)}, None, None

    def construct(self, image, label):
        found = self.dense(ops.tanh(self.convolution(image)).mean((2, 3)))
        return ops.square(found.reshape(-1) - label).mean()


class ImageData:
    """Random images, and the number of rows and columns that were asked for."""

    def batch(self, first, count):
        draws = [np.random.default_rng(number).standard_normal((2, 8, 8)) for number in range(first, first + count)]
        images = np.stack(draws).astype(np.float32)
        return images, images[:, 0, 0, 0]


def open_images(*_):
    return ImageData()


READINGS = [  # config, strategy, the shape of what a rank reads
    ({}, None, (1, 4, 2, 4, 8)),
    ({"columns": "dp", "samples": None}, None, (1, 8, 2, 4, 4)),
    ({}, "full_batch", (1, 8, 2, 8, 8)),
    ({}, "data_parallel", (1, 4, 2, 8, 8)),
    ({"rows": None, "columns": "tp"}, [["dp", None, "tp"], "dp"], (1, 4, 2, 4, 8)),
]


@pytest.fixture(scope="module")
def images_alone():
    return trained_on_images({}, None, 1)[0]


def trained_on_images(config, strategy, size):
    """Losses and norms of two steps on dp x tp, both of this size, and the shape of the images that rank 0 reads."""
    recipe = recipe_from_dict({
        "model": {"name": "test_batches:Images", **config},
        "parallelism": {"data_parallel_shard": size, "tensor_parallel": size},
        "train_dataset": {"factory": "test_batches:open_images", "seq_length": 1, "dataset_strategy": strategy},
        "training": {"local_batch_size": 8 // size, "steps": 2}, "lr_scheduler": {"learning_rate": 0.1},
    })  # fmt: skip
    jobs = []
    rows = run_simulated(recipe, 2, jobs.append)
    job = min(jobs, key=lambda each: each.rank)
    return [(row["loss"], row["gradient_norm"]) for row in rows[0]], job._batches.get(0, 8)[0].shape


@pytest.mark.parametrize(("config", "strategy", "shape"), daily(READINGS[3:], READINGS))
def test_a_rank_reads_what_the_layouts_say(images_alone, config, strategy, shape):
    """Of images cut by height and width, too; the steps are those of one card."""
    found, read = trained_on_images(config, strategy, 2)
    np.testing.assert_allclose(found, images_alone, 1e-5)
    assert read == shape and found[0] != found[1]


@pytest.mark.usefixtures("one_rank")
def test_strategies_and_inputs_that_there_are_not():
    with pytest.raises(ValueError, match="dataset_strategy: 'fullbatch' is not one of full_batch, .*you mean 'full_b"):
        trained_on_images({}, "fullbatch", 1)
    with pytest.raises(ValueError, match=r"'dp'. has more layouts than the model inputs .'image', 'label'"):
        trained_on_images({}, ["dp", "dp", "dp"], 1)
    net, mesh = Images(ImageConfig()), DeviceMesh((1,), ("dp",))
    with pytest.raises(ValueError, match=r"root Cell \(Images\) has no input 'images': construct takes image, label"):
        shard(net, mesh, inputs={"images": layout("dp")})


class Weighted(Images):
    """A mean over the images that count, which differ in number between micro-batches."""

    def construct(self, image, label):
        counts = ops.cast(label > 0, ms.float32)
        found = self.dense(ops.tanh(self.convolution(image)).mean((2, 3)))
        return (ops.square(found.reshape(-1) - label) * counts).sum() / counts.sum()


@pytest.mark.parametrize(("model", "error"), [("Images", None), ("Weighted", "samples don't weigh alike, so return")])
def test_verify_asks_whether_the_samples_of_a_mean_weigh_alike(model, error):
    recipe = recipe_from_dict({
        "model": {"name": f"test_batches:{model}"}, "parallelism": {"data_parallel_shard": 2},
        "train_dataset": {"factory": "test_batches:open_images", "seq_length": 1},
        "training": {"local_batch_size": 2, "global_batch_size": 8},
    })  # fmt: skip
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        assert not verify_recipe(recipe).faults
