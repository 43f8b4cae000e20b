"""Experts that move between ranks: which ones, exactly, and what a run has of it."""

import sys
from itertools import combinations

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.launch import ROOT
from support.nightly import seeds
from support.small_generation import RECIPE, mesh
from test_routed_recipes import DEEPSEEK

from mindformers_core.checkpoint.between_meshes import global_checksums, relayout
from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.checkpoint.tensor_map import placed
from mindformers_core.checkpoint.tensors import fill_parameter
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.data.datasets import dataset_of
from mindformers_core.models.expert_placement import placement, rank_loads
from mindformers_core.models.experts import RoutedExperts
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.recipe.loader import RecipeError, load_recipe
from mindformers_core.recipe.sections import recipe_mesh
from mindformers_core.trainer.checkpoints import save_job
from mindformers_core.trainer.trainer import Trainer

sys.path.insert(0, str(ROOT / "docs"))
import make_experts  # noqa: E402


@pytest.mark.parametrize("seed", seeds(10, 40))
def test_placements_of_random_loads(seed):
    """A permutation, whose experts move only to other ranks, better than before, and that no exchange betters."""
    rng = np.random.default_rng(seed)
    ranks, each = rng.integers(2, 9), rng.integers(1, 9)
    loads, before = rng.lognormal(0, rng.uniform(0.1, 1.5), ranks * each), rng.permutation(ranks * each)
    after = placement(loads, ranks, before)
    assert sorted(after) == sorted(before)
    owner = {expert: place // each for place, expert in enumerate(before)}
    for place in np.flatnonzero(after != before):
        assert owner[after[place]] != place // each
    most = rank_loads(loads, after, ranks).max()
    assert most <= rank_loads(loads, before, ranks).max()
    for one, other in combinations(range(ranks * each), 2):
        exchanged = after.copy()
        exchanged[[one, other]] = after[[other, one]]
        sums, new = rank_loads(loads, after, ranks), rank_loads(loads, exchanged, ranks)
        busiest, two = sums.argmax(), {one // each, other // each}
        assert busiest not in two or max(new[rank] for rank in two) >= most * (1 - 1e-12)


def test_as_few_moves_as_needed():
    loads = np.array([8, 4, 1, 1, 2, 2, 1, 1])
    assert placement(loads, 2, range(8), threshold=1.4).tolist() == list(range(8))
    assert (placement(loads, 2, range(8), threshold=1.1) != np.arange(8)).sum() == 2


@pytest.mark.parametrize("name", make_experts.TRACES)
def test_ranks_have_equal_loads_on_skewed_traces(name):
    still, moved = make_experts.followed(make_experts.TRACES[name])
    assert still.min() >= 1.5 and moved[1:].max() <= 1.1, (still.min(), moved[1:].max())


MODEL = (
    *DEEPSEEK, "model.num_hidden_layers=2", "model.first_k_dense_replace=0", "model.n_routed_experts=8",
    "model.n_group=1", "model.topk_group=1", "model.bias_update_rate=0",
    "training.max_norm=0", "training.global_batch_size=4", "train_dataset.seq_length=12",
    "optimizer.eps=1e-2",  # so that a step isn't a sign of gradients that are rounding errors
)  # fmt: skip
BY_DATA, MOVED = "parallelism.expert_parallel=[dp]", ("moe.placement.interval=1", "moe.placement.threshold=1.02")
MESHES = {
    "dp2": (*mesh(dp=2), BY_DATA),
    "zero 3, averages": (*mesh(dp=2, tp=2, zero_level=3, zero_threshold_kb=0), BY_DATA, "training.average_decay=0.9"),
    "zero 1, cut inside": (
        *mesh(dp=2, cp=2, zero_level=1, zero_threshold_kb=0, context_parallel_balance="contiguous"),
        "parallelism.expert_parallel=[cp]", "parallelism.expert_tensor_parallel=[dp]",
    ),
    "pipeline": (*mesh(pp=2, dp=2, pipeline_parallel_microbatch_size=1), BY_DATA),
    "own experts of all tokens": (*mesh(tp=2), "parallelism.expert_parallel=[tp]", "training.local_batch_size=4"),
}  # fmt: skip


def trained(folder, *overrides, steps=2):
    """Rows of a run whose router likes the first experts, which saves what it has in the end."""
    recipe = load_recipe(RECIPE, [*MODEL, *overrides, f"training.output_dir={folder}"])
    ranks, dataset = recipe_mesh(recipe), dataset_of(recipe)

    def work(rank):
        job, rows = Trainer(recipe, mesh=ranks, dataset=dataset), []
        for path, each in (pair for net in job.cells.values() for pair in net.parameters_and_names()):
            if path.endswith("correction_bias") and job.step == 0:
                fill_parameter(each, np.linspace(0.6, 0, 8, dtype=np.float32))
        while job.step < steps:
            rows.append(dict(job.train_step()))
            if job.step in (2, 4, steps):
                save_job(job)
        return [{key: float(each) for key, each in row.items() if np.size(each) == 1} for row in rows]

    with custom_gradients():
        return SimulatedRanks(ranks.size, plans={}).run(work)


def saved(folder, step):
    """All tensors of a checkpoint, of weights, moments and averages, by name."""
    files = (folder / "checkpoint" / f"step_{step}").rglob("*.safetensors")
    return {f"{path.parent.name}/{name}": each for path in files for name, each in load_file(path).items()}


def unmoved(folder, *overrides):
    """Rows and tensors of a run whose experts stay."""
    return trained(folder, *MESHES["dp2"], *overrides, steps=3)[0], {step: saved(folder, step) for step in (2, 3)}


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    return unmoved(tmp_path_factory.mktemp("still"))


def check(rows, tensors, still, step, tolerance):
    """The same losses, gradients and tensors, also of moments and averages, to this share of the largest number."""
    for own in rows:
        other = still[0][int(own["step"]) - 1]
        for key in ("loss", "gradient_norm", "expert_load"):
            np.testing.assert_allclose(own[key], other[key], tolerance, err_msg=key)
    for name, each in still[1][step].items():
        factor = 2 if "moment2" in name else 1  # the error of a square is twice that of its number
        most = factor * tolerance * np.abs(each).max()
        np.testing.assert_allclose(tensors[name], each, 0, most, err_msg=name)


@pytest.mark.long
def test_moving_changes_no_number(tmp_path):
    """The curve is the same, bit for bit, where a token has two choices, and the load of the busiest rank falls.
    A checkpoint belongs to no placement, and to no mesh: other ranks go on.
    """
    one = "model.num_hidden_layers=1"
    still = unmoved(tmp_path / "still", one)
    rows = trained(tmp_path / "two", *MESHES["dp2"], one, *MOVED)[0]
    check(rows, saved(tmp_path / "two", 2), still, 2, 1e-6)
    assert [row["loss"] for row in rows] == [row["loss"] for row in still[0][:2]]
    assert rows[0]["experts_moved"] and rows[1]["rank_load"] < 0.95 * still[0][1]["rank_load"]
    mine = *MESHES["own experts of all tokens"], one, f"checkpoint.load_path={tmp_path / 'two'}"
    rows = trained(tmp_path / "on", *mine, *MOVED, steps=3)[0]
    assert rows[0]["experts_moved"]
    check(rows, saved(tmp_path / "on", 3), still, 3, 1e-5)


@pytest.mark.nightly
def test_a_resumed_run_moves_experts_as_one_that_was_not_ended(tmp_path):
    """They lie where they were after the look of step 3, and loads since then count in the next one."""
    given = (*MESHES["dp2"], "moe.placement.interval=3", "moe.placement.threshold=1.02")
    whole, steps = trained(tmp_path / "whole", *given, steps=5), tmp_path / "whole" / "checkpoint"
    on = trained(tmp_path / "on", *given, f"checkpoint.load_path={steps / 'step_4'}", steps=5)
    assert whole[0][2]["experts_moved"]
    for key in ("loss", "gradient_norm", "rank_load"):
        assert on[0][0][key] == whole[0][4][key], key
    saves = steps / "step_4", steps / "step_5", tmp_path / "on" / "checkpoint" / "step_5"
    before, after, found = (open_checkpoint(path).state["placement"] for path in saves)
    assert found == after and np.sum(after["loads"]) == 2 * np.sum(before["loads"]) > 0


@pytest.mark.usefixtures("one_rank")
def test_moved_experts_are_not_taken_by_their_places():
    """Until they have moved, they are."""
    net = RoutedExperts(4, 2, 2)
    net.let_move()
    assert relayout(net, RoutedExperts(4, 2, 2)).copied
    fill_parameter(net.moved_by, np.array([1, -1, 0, 0], np.int32))
    for call in (global_checksums, lambda net: relayout(RoutedExperts(4, 2, 2), net)):
        with pytest.raises(ValueError, match="take experts by their places, but those of '' have moved by moe.plac"):
            call(net)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*MESHES][1:])
def test_moving_changes_no_number_on_other_meshes(tmp_path, name, still):
    rows = trained(tmp_path, *MESHES[name], *MOVED)[0]
    check(rows, saved(tmp_path, 2), still, 2, 1e-5)
    assert rows[0]["experts_moved"] and rows[1]["rank_load"] < 0.95 * rows[0]["rank_load"], rows


ERRORS = (
    ((), "interval: 1 moves experts between the ranks of parallelism.expert_parallel, which names no axis"),
    ((BY_DATA, "monitor.digests=true"), "by which monitor.digests sums elements up: leave one of them out"),
    ((BY_DATA, "model.first_k_dense_replace=2"), "moves experts, which deepseek_v3 has none of"),
    (("moe.placement.intervall=2",), r"intervall: unknown key \(did you mean 'interval'"),
)


@pytest.mark.parametrize(("overrides", "text"), ERRORS)
def test_errors(overrides, text):
    with pytest.raises(RecipeError, match=text):
        load_recipe(RECIPE, [*MODEL, *MOVED, *overrides])


def test_files_with_all_experts_in_one_tensor():
    with pytest.raises(ValueError, match="experts of 'a.gate_up_proj' can't move, since files have them in one"):
        placed((), "a.gate_up_proj", range(2))
