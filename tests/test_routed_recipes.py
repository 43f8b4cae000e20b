"""Recipes of models with experts: their routers' losses, loads and biases are those of one card on every mesh."""

import numpy as np
import pytest
from support.small_generation import RECIPE, SMALL, mesh

from mindformers_core.commands.diffing import run_simulated
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.recipe.loader import load_recipe

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
    "dense stage first": (DEEPSEEK, mesh(pp=2, dp=2), BY_DATA, "training.local_batch_size=4"),
    "pipeline": (QWEN, mesh(pp=2, tp=2), "training.local_batch_size=4", "parallelism.expert_parallel=[tp]"),
    "accumulation": (QWEN, mesh(dp=2, tp=2, zero_level=2), BY_DATA, "parallelism.expert_tensor_parallel=[tp]"),
}


@pytest.mark.parametrize("name", VERIFIED)
def test_losses_of_routers(name):
    """The loss, and all gradients of a step."""
    settings, sizes, *others = VERIFIED[name]
    check = verify_recipe(load_recipe(RECIPE, [*settings, *sizes, *others]))
    assert not check.faults, check.report()


STEPS, ROW = 3, ("loss", "router_loss", "expert_load", "gradient_norm")
ONE = (*mesh(), "training.local_batch_size=4")  # the micro-batches of dp 2 are as large
TRAINED = {
    "pipeline": (
        *mesh(pp=2, dp=2, pipeline_parallel_microbatch_size=2), BY_DATA, "training.local_batch_size=4",
    ),
}  # fmt: skip


def trained(folder, *overrides):
    """Rows of a few steps, and the biases after them, by path."""
    recipe, jobs = load_recipe(RECIPE, [*DEEPSEEK, *overrides, f"training.output_dir={folder}"]), []
    rows = run_simulated(recipe, STEPS, jobs.append)
    named = [(path, each) for job in jobs for net in job.cells.values() for path, each in net.parameters_and_names()]
    return rows, [(path, each.asnumpy()) for path, each in named if path.endswith("correction_bias")]


@pytest.mark.parametrize("name", TRAINED)
def test_biases_follow_the_loads_of_all(tmp_path, name):
    """Loads, the routers' losses and the biases after some steps are those of one card, on every rank."""
    (expected,), biases = trained(tmp_path, *ONE)
    rows, found = trained(tmp_path, *TRAINED[name])
    biases = dict(biases)
    for row in (row for of_rank in rows for row in of_rank):
        for key in ROW:
            np.testing.assert_allclose(row[key], expected[row["step"] - 1][key], 1e-5, err_msg=key)
    assert biases.keys() == {path for path, _ in found} and all(array.any() for array in biases.values())
    for path, array in found:
        np.testing.assert_allclose(array, biases[path], rtol=1e-6, err_msg=path)


def test_empty_rows_count_nowhere(tmp_path):
    """Three samples are alone what they are with an empty row behind them: in losses, loads and gradients."""
    alone, padded = (
        trained(tmp_path, *mesh(), "training.global_batch_size=3", f"training.local_batch_size={rows}")[0][0]
        for rows in (3, 4)
    )
    for one, other in zip(alone, padded, strict=True):
        for key in ROW:
            np.testing.assert_allclose(one[key], other[key], 1e-5, err_msg=key)
