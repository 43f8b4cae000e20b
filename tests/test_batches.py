"""Who computes which samples of a step, and what of them a rank reads: the same batch on every mesh."""

import numpy as np
import pytest
from test_data import make_dataset

from mindformers_core.batches import BatchPlan
from mindformers_core.data.reading import local_batch
from mindformers_core.layout import Layout
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
