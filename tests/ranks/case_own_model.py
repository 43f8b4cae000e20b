"""A model and a dataset that aren't ours, named by a recipe: `examples/own_model.yaml`."""

import sys

import numpy as np
from support.launch import ROOT, on_ranks
from truth import once

from mindformers_core.communication import world
from mindformers_core.mesh import init_device_mesh
from mindformers_core.recipe.loader import load_recipe
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


def float8_rows(shape, ranks, *overrides):
    """Three steps with products of numbers rounded to float8, of batches whose scale is that of all eight samples."""
    sizes = dict(zip(("pipeline_parallel", "data_parallel_shard", "_", "tensor_parallel"), shape))
    keys = [f"parallelism.{key}={size}" for key, size in sizes.items() if key != "_"]
    keys += [f"training.local_batch_size={8 // shape[1]}", "parallelism.pipeline_parallel_microbatch_size=8"]
    return rows(shape, ranks, *keys, *overrides, fixed=FLOAT8, steps=3)


@once
def float8_alone():
    """On one card."""
    return float8_rows((1, 1, 1, 1), [world().rank])


def check_float8(shape, *overrides):
    """In float64, where no sum is so near to the middle between two numbers of float8 that its order decides."""
    np.testing.assert_allclose(float8_rows(shape, None, *overrides), float8_alone(), 1e-12, err_msg=str(shape))


@on_ranks(4)
def case_float8_equals_one_card():
    """On dp 2 x tp 2, and in a pipeline of two ranks x tp 2."""
    check_float8((1, 2, 1, 2))
    check_float8((2, 1, 1, 2))


@on_ranks(nightly=(4,))
def case_float8_on_further_meshes_and_compiled():
    """On tp 4; with ZeRO 3; and in float32, compiled, since graphs don't send float64, as in PyNative."""
    check_float8((1, 1, 1, 4))
    check_float8((1, 2, 1, 2), "parallelism.zero_level=3", "parallelism.zero_threshold_kb=0")
    for shape in ((1, 2, 1, 2), (2, 1, 1, 2)):
        found = [float8_rows(shape, None, "model.wide=false", f"context.mode={mode}") for mode in (0, 1)]
        np.testing.assert_allclose(*found, 1e-6, err_msg=str(shape))
        np.testing.assert_allclose(found[0], float8_alone(), 1e-5, err_msg=str(shape))
