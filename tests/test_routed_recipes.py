"""Recipes of models with experts: their routers' losses, loads and biases are those of one card on every mesh."""

from functools import cache

import numpy as np
import pytest
from support.launch import ROOT
from support.nightly import daily
from support.simulated_training import train_simulated
from support.small_generation import RECIPE, SMALL, mesh, train

from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.recipe.loader import RecipeError, load_recipe

QWEN = (
    *SMALL, "model.name=qwen3_moe", "model.num_experts=4", "model.num_experts_per_tok=2", "model.head_dim=4",
    "model.moe_intermediate_size=8", "model.output_router_logits=true", "model.router_aux_loss_coef=0.3",
    "model.router_z_loss_coef=0.1", "model.rms_norm_eps=1e-5",
)  # fmt: skip
DEEPSEEK = (
    *SMALL, "model.name=deepseek_v3", "model.q_lora_rank=12", "model.kv_lora_rank=8", "model.qk_nope_head_dim=8",
    "model.qk_rope_head_dim=4", "model.v_head_dim=6", "model.n_routed_experts=4", "model.num_experts_per_tok=2",
    "model.n_group=2", "model.topk_group=1", "model.moe_intermediate_size=8", "model.first_k_dense_replace=2",
    "model.aux_loss_alpha=0.3", "model.num_key_value_heads=4",
)  # fmt: skip
BY_DATA = "parallelism.expert_parallel=[dp]"
VERIFIED = {
    "dense stage first": (
        (*DEEPSEEK, "model.first_k_dense_replace=1", "model.num_hidden_layers=2"), mesh(pp=2, dp=2), BY_DATA,
        "training.local_batch_size=2", "training.global_batch_size=4",
    ),
    "pipeline": (QWEN, mesh(pp=2, tp=2), "training.local_batch_size=4", "parallelism.expert_parallel=[tp]"),
    "accumulation": (QWEN, mesh(dp=2, tp=2, zero_level=2), BY_DATA, "parallelism.expert_tensor_parallel=[tp]"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", daily(["dense stage first"], VERIFIED))
def test_losses_of_routers(name):
    """The loss, and all gradients of a step."""
    settings, sizes, *others = VERIFIED[name]
    check = verify_recipe(load_recipe(RECIPE, [*settings, *sizes, *others]))
    assert not check.faults, check.report()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ("qwen3_30b_a3b", "deepseek_v3"))
def test_a_step_of_many_ranks(name):
    """Of 64 and 2,048: at small sizes, on few ranks with the same plan."""
    check = verify_recipe(load_recipe(str(ROOT / "configs" / f"{name}.yaml")))
    assert not check.faults and check.compared > 2000, check.report()


ROW, BY_FOUR = ("loss", "router_loss", "expert_load", "gradient_norm"), {"pipeline_parallel_microbatch_size": 4}
ONE = (*mesh(), "training.local_batch_size=4")  # the micro-batches of dp 2 are as large
TRAINED = {
    "stages": (*mesh(pp=2, **BY_FOUR), "training.local_batch_size=8"),
    "ZeRO 3, recompute": (
        *mesh(dp=2, tp=2, zero_level=3, zero_threshold_kb=0), BY_DATA, "recompute=true", "training.local_batch_size=2",
    ),
    "sequences": (
        *mesh(cp=2, tp=2, sequence_parallel="true"), "parallelism.expert_parallel=[cp,tp]",
        "training.local_batch_size=4",
    ),
    "pipeline": (
        *mesh(pp=2, dp=2, pipeline_parallel_microbatch_size=2), BY_DATA, "training.local_batch_size=4",
    ),
    "eager": (*mesh(dp=2, tp=2), BY_DATA, "context.engine=eager", "training.local_batch_size=2"),
    "pipeline, inside": (
        *mesh(pp=2, tp=2, **BY_FOUR), "parallelism.expert_tensor_parallel=[tp]", "training.local_batch_size=8",
    ),
    "pipeline, sequences": (
        *mesh(pp=2, cp=2, zero_level=1, pipeline_parallel_schedule="interleaved_1f1b", **BY_FOUR),
        "parallelism.pipeline_parallel_interleave_num=2", "parallelism.expert_parallel=[cp]",
        "training.local_batch_size=8",
    ),
    "pipeline, folded": (
        *mesh(pp=2, dp=2, tp=2, zero_level=2, sequence_parallel="true", pipeline_parallel_microbatch_size=2),
        "parallelism.expert_parallel=[dp,tp]", "training.local_batch_size=4",
    ),
    "pipeline, capacity": (
        *mesh(pp=2, dp=2, pipeline_parallel_microbatch_size=2), BY_DATA, "training.local_batch_size=4",
    ),
}  # fmt: skip


ROUTED = (  # both halves of a pipeline have experts, as the head that predicts further
    *DEEPSEEK, "model.first_k_dense_replace=1", "model.num_nextn_predict_layers=1", "model.n_routed_experts=8",
)  # fmt: skip
STEADY = (  # larger weights and steps make more of rounding in each step
    "model.initializer_range=0.2", "lr_scheduler.learning_rate=0.001", "optimizer.eps=1.e-4",
)  # fmt: skip
SHALLOW = *ROUTED, "model.first_k_dense_replace=0", "model.num_hidden_layers=2"
LEAST = *DEEPSEEK, "model.first_k_dense_replace=0", "model.num_hidden_layers=1"
HALF = "precision.compute=float16", "precision.loss_scale=256.0"
RESUMED = *mesh(tp=2), "parallelism.expert_parallel=[tp]", "training.local_batch_size=4"


def trained(folder, *overrides, model=ROUTED, steps=3):
    """Rows of a few steps; the first gradients and the last parameters, by path; and all ranks' biases."""
    recipe = load_recipe(RECIPE, [*model, *overrides, f"training.output_dir={folder}"])
    rows, *arrays, jobs = train_simulated(recipe, steps)
    named = [(path, each) for job in jobs for net in job.cells.values() for path, each in net.parameters_and_names()]
    return rows, *arrays, [(path, each.asnumpy()) for path, each in named if path.endswith("correction_bias")]


def check_rows(found, expected, tolerance=1e-5):
    """All ranks' rows are those of one card."""
    for of_rank in found:
        for row, other in zip(of_rank, expected, strict=True):
            for key in ROW:
                np.testing.assert_allclose(row[key], other[key], tolerance, err_msg=f"{key} at step {row['step']}")


def check_biases(found, expected):
    """Those of every rank have followed one card's counts."""
    expected = dict(expected)
    assert expected.keys() == {path for path, _ in found} and all(array.any() for array in expected.values())
    for path, array in found:
        np.testing.assert_allclose(array, expected[path], rtol=1e-6, err_msg=path)


STEPS = [("stages", 3), *((name, 20) for name in TRAINED)]  # few daily, the rest nightly
DROPPING = *QWEN, "model.num_experts=8", "model.num_hidden_layers=2", "model.expert_capacity=[2,4]"
MODELS = {"pipeline": ROUTED, "pipeline, sequences": ROUTED, "pipeline, capacity": DROPPING}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A function of a model and a number of steps: what `trained` gives on one card."""
    return cache(lambda model, steps: trained(tmp_path_factory.mktemp("one"), *ONE, model=model, steps=steps))


@pytest.mark.long
@pytest.mark.parametrize(("name", "steps"), daily(STEPS[:1], STEPS))
def test_training(tmp_path, alone, name, steps):
    """Loads, losses of routers, all first gradients, parameters and biases are those of one card, on every rank."""
    model = *MODELS.get(name, SHALLOW), *STEADY
    (expected,), *wholes, biases = alone(model, steps)
    rows, *arrays, found = trained(tmp_path, *TRAINED[name], model=model, steps=steps)
    check_rows(rows, expected)
    check_rows([of_rank[:1] for of_rank in rows], expected[:1], 1e-6)  # of the same parameters
    check_biases(found, biases)
    for whole, joined in zip(wholes, arrays, strict=True):
        assert whole.keys() == joined.keys()
        for path, array in whole.items():
            mine = joined[path][tuple(map(slice, array.shape))]  # no axis divides the vocabulary
            np.testing.assert_allclose(mine, array, 0, 1e-5 * abs(array).max(), err_msg=path)


def test_dropped_choices_are_counted(tmp_path):
    """Where experts take one choice of four tokens, at least half of all eight are dropped, the same ones anywhere."""
    model = *QWEN, "model.num_hidden_layers=1", "model.expert_capacity=[1,4]"
    (expected,), *_ = trained(tmp_path, *ONE, model=model, steps=1)
    choices = 8 * 16 * 2  # of all samples, tokens
    assert choices / 2 <= expected[0]["expert_overflow"] < choices
    cut = *mesh(cp=2), "parallelism.expert_parallel=[cp]", "training.local_batch_size=4"
    rows = trained(tmp_path, *cut, model=model, steps=1)[0]
    check_rows(rows, expected)
    assert [row["expert_overflow"] for (row,) in rows] == [expected[0]["expert_overflow"]] * 2


def test_groups_of_a_capacity_are_not_cut_by_the_order_of_chunks():
    """On 2 ranks four tokens in a row are consecutive in each of 4 chunks, eight aren't."""
    given = *QWEN, *mesh(cp=2), "model.expert_capacity=[1,8]"
    load_recipe(RECIPE, [*given, "parallelism.context_parallel_balance=contiguous"])
    for balance, hint in (("zigzag", "use a size that divides 4, or"), ("area", "use")):
        message = f"model.expert_capacity: groups of 8 tokens.* {balance} .*: {hint} context_parallel_balance=contig"
        with pytest.raises(RecipeError, match=message):
            load_recipe(RECIPE, [*given, f"parallelism.context_parallel_balance={balance}"])


@pytest.mark.long
def test_half_precision(tmp_path):
    """A first step in float16 says what one card's says, and the biases after it are the same."""
    (expected,), *_, biases = trained(tmp_path, *ONE, *HALF, model=LEAST, steps=1)
    cut = *mesh(dp=2), BY_DATA, *HALF, "training.local_batch_size=2"
    rows, *_, found = trained(tmp_path, *cut, model=LEAST, steps=1)
    check_rows(rows, expected, 1e-3)
    check_biases(found, biases)


@pytest.mark.long
def test_a_run_goes_on_on_another_mesh(tmp_path):
    """Saved where two ranks share experts, it goes on where others do, as on one card: biases are in checkpoints."""
    data = (*mesh(dp=2), BY_DATA, "training.local_batch_size=2")
    with custom_gradients():
        SimulatedRanks(2).run(lambda rank: train(tmp_path, rank, *LEAST, *data))
    loaded = f"checkpoint.load_path={tmp_path}", "train_dataset.on_change=go_on"
    (expected,), *_, biases = trained(tmp_path / "one", *ONE, *loaded, model=LEAST, steps=1)
    rows, *_, found = trained(tmp_path / "other", *RESUMED, *loaded, model=LEAST, steps=1)
    assert [row["step"] for row in expected] == [3]
    check_rows(rows, expected)
    check_biases(found, biases)


def test_empty_rows_count_nowhere(tmp_path):
    """Three samples are alone what they are with an empty row behind them: in losses, loads, gradients and biases."""
    given = *mesh(), "training.global_batch_size=3", "optimizer.eps=1.e-4"  # rounding of small gradients stays small
    model = *LEAST, "model.n_routed_experts=8"  # of which some have more than the mean without the empty row alone
    sizes = (f"training.local_batch_size={rows}" for rows in (3, 4))
    (alone, *_, biases), (padded, *_, found) = (trained(tmp_path, *given, size, model=model) for size in sizes)
    check_rows(padded, alone[0])
    check_biases(found, biases)
