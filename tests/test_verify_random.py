"""`verify()` finds no fault in random combinations of models, meshes, layouts, `hsdp()`, schedules and recompute."""

import pytest
from models import EXAMPLES
from support.nightly import daily, seeds
from support.random_steps import MESHES, check_delicate, check_example, check_hsdp, check_plan, check_recipe

from mindformers_core.mesh import DeviceMesh

FEW = (("classifier", 5),)  # places of meshes


def verified(check):
    """Assert that nothing is wrong, and that something was compared."""
    assert not check.faults, check.report()
    assert check.compared > 50


PLACES = [(name, at) for name in EXAMPLES for at, (_, axes) in enumerate(MESHES) if name != "llama" or "tp" in axes]


@pytest.mark.parametrize(("name", "place"), daily(FEW, PLACES))
def test_a_model_with_declared_layouts(name, place):
    check, _ = check_example(name, DeviceMesh(*MESHES[place]))
    verified(check)
    narrow = name in ("classifier", "vision transformer", "experts")  # Conv2D and OneHot have no kernel for float64
    assert [note.partition(",")[0] for note in check.notes] == ["in float32"] * narrow


@pytest.mark.parametrize("seed", seeds(2, 150))
def test_random_cells_with_random_layouts(seed):
    verified(check_plan(seed)[0])


@pytest.mark.parametrize("seed", seeds(2, 600))
def test_hsdp(seed):
    verified(check_hsdp(seed)[0])


@pytest.mark.parametrize("seed", seeds(1, 110))
def test_half_precision_batch_norms_one_output_and_odd_ranks(seed):
    check, _ = check_delicate(seed)
    assert not check.faults, check.report()


@pytest.mark.nightly  # daily `test_routed_recipes.py`, `test_sequence_programs.py` and `test_written_state.py` do
@pytest.mark.parametrize("seed", range(200))
def test_recipes(seed):
    verified(check_recipe(seed)[0])
