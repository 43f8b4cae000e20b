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


def rows(shape, ranks, *overrides):
    """Loss and norm of two steps."""
    recipe = load_recipe(str(ROOT / "examples" / "own_model.yaml"), [*SMALL, *overrides])
    job = Trainer(recipe, mesh=init_device_mesh(shape, MESH_AXES, ranks))
    return [[row["loss"], row["gradient_norm"]] for row in (job.train_step() for _ in range(2))]


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
