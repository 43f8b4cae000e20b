"""`verify()` finds no fault in random combinations of models, meshes, layouts, `hsdp()`, schedules and recompute."""

import pytest
from models import EXAMPLES
from support.random_steps import MESHES, check_delicate, check_example, check_hsdp, check_plan, check_recipe

from mindformers_core.mesh import DeviceMesh

FEW = {
    "llama": 3,
    "mlp": 0,
    "experts": 4,
    "two towers": 2,
    "classifier": 5,
    "tied language model": 3,
}  # places of meshes


def seeds(count, nightly):
    """Numbers from 0; those from `count` on are nightly."""
    return [*range(count), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(count, nightly))]


def verified(check):
    """Assert that nothing is wrong, and that something was compared."""
    assert not check.faults, check.report()
    assert check.compared > 50


def examples():
    """(name of a model, place of a mesh): those of `FEW`, and the others nightly."""
    every = [
        (name, place) for name in EXAMPLES for place, (_, axes) in enumerate(MESHES) if name != "llama" or "tp" in axes
    ]
    return [each if FEW.get(each[0]) == each[1] else pytest.param(*each, marks=pytest.mark.nightly) for each in every]


@pytest.mark.parametrize(("name", "place"), examples())
def test_a_model_with_declared_layouts(name, place):
    check, _ = check_example(name, DeviceMesh(*MESHES[place]))
    verified(check)
    narrow = name in ("classifier", "vision transformer", "experts")  # Conv2D and OneHot have no kernel for float64
    assert [note.partition(",")[0] for note in check.notes] == ["in float32"] * narrow


@pytest.mark.parametrize("seed", seeds(6, 150))
def test_random_cells_with_random_layouts(seed):
    verified(check_plan(seed)[0])


@pytest.mark.parametrize("seed", seeds(8, 600))
def test_hsdp(seed):
    verified(check_hsdp(seed)[0])


@pytest.mark.parametrize("seed", seeds(5, 110))
def test_half_precision_batch_norms_one_output_and_odd_ranks(seed):
    check, _ = check_delicate(seed)
    assert not check.faults, check.report()


@pytest.mark.parametrize("seed", seeds(2, 200))
def test_recipes(seed):
    verified(check_recipe(seed)[0])
