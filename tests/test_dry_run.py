"""`--dry-run`: what every rank of a large job would hold, from one process that allocates nothing."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.nightly import daily

from mindformers_core.commands.command_line import main
from mindformers_core.commands.dry_run import ParameterFact, RankFacts, report
from mindformers_core.communication import shutdown

ROOT = Path(__file__).parent.parent
# prints the largest resident set in KiB after the command has run
MEASURED = (
    "import resource, sys; from mindformers_core.commands.command_line import main; code = main(sys.argv[1:]); "
    "print('KiB', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
)


@pytest.fixture
def dry_run(capsys, monkeypatch):
    """A function of the command line of a dry run that gives its exit code, output and errors."""
    monkeypatch.chdir(ROOT)

    def run(*arguments):
        shutdown()
        code = main(["train", "--dry-run", "--config", *arguments])
        return code, *capsys.readouterr()

    yield run
    shutdown()


@pytest.mark.ranks
@pytest.mark.waits
@pytest.mark.nightly
def test_a_large_recipe_is_checked_in_little_memory(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    command = [sys.executable, "-c", MEASURED, "train", "--dry-run", "--config", "configs/llama3_70b.yaml"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert ": 128 ranks" in done.stdout
    assert "70,553,706,496 in all, 8,820,367,360 on each rank" in done.stdout
    assert int(done.stdout.rpartition("KiB")[2]) < 4 * 2**20
    check_comment("llama3_70b", done.stdout)


def check_comment(name, said):
    """The figures in a recipe's comment are those that `docs/make_configs.py` writes there."""
    make = runpy.run_path(str(ROOT / "docs" / "make_configs.py"))
    text = (make["CONFIGS"] / f"{name}.yaml").read_text(encoding="utf-8")
    assert make["with_figures"](text, said) == text, "stale: python docs/make_configs.py"
    assert name in make["LARGE"] and int(re.search(r"# +together .* fits in (\d+) GB", text)[1]) < 60


LARGE = "llama3_8b", "llama3_8b_128k", "qwen3_30b_a3b", "deepseek_v3"


@pytest.mark.parametrize("name", daily(LARGE[:1], LARGE))
def test_figures_of_large_recipes_are_what_it_says(name, dry_run):
    """Of 70B: above. No scores of pairs of tokens are kept: activations are a few times the hidden states."""
    recipe = ROOT / "configs" / f"{name}.yaml"
    check_comment(name, dry_run(str(recipe))[1])


def figures(text):
    """The whole number in each line of a dry run, by the line's first words; the lines of parameters are left out."""
    lines = [re.fullmatch(r"  (\D+?) +([\d,]+) \(.* GiB\)(, fits in \d+ GB)?", line) for line in text.splitlines()]
    return {line[1]: int(line[2].replace(",", "")) for line in lines if line}


def test_activations_are_counted(dry_run):
    """Of every live micro-batch what is kept, and of one layer what is computed again."""
    recipe, gpipe = "configs/llama_tiny_pp.yaml", "parallelism.pipeline_parallel_schedule=gpipe"
    found = [
        figures(dry_run(recipe, gpipe, f"training.local_batch_size={count}", "training.global_batch_size=16")[1])
        for count in (2, 8)
    ]
    assert found[0]["activations"] * 4 == found[1]["activations"]
    text = dry_run(recipe, "recompute.full=true")[1]
    found, (kept, whole) = figures(text), re.search(r"; (\d+) KiB of (\d+) KiB of activations are kept", text).groups()
    taken = 32 * 64 * 4 + 64 * 4  # half of a sequence's tokens, each a hidden state of float32; and labels
    assert abs(found["activations"] - taken - int(kept) * 1024) < 1024
    assert abs(2 * found["computed again at once"] - (int(whole) - int(kept)) * 1024) < 2048
    assert found["together"] == sum(found.values()) - found["together"] and "fits in 1 GB" in text


@pytest.mark.nightly
def test_levels_take_as_much_as_the_papers_formulas(dry_run):
    """Of 70B weights in float32 on 16 x 8 ranks, with one micro-batch: sharded is what the level says."""
    local, part = 8_820_367_360, 552_509_440  # on 8 tensor-parallel ranks; also cut into 16, but for 1,318,912 of norms
    sharded = "parallelism.zero_level=3", "training.global_batch_size=16"
    code, text, errors = dry_run("configs/llama3_70b.yaml", *sharded)
    assert code == 0, errors
    found = figures(text)
    assert f"{part:,} parameters" in text and "161 stay whole, 1,318,912 parameters: model.layers.*.input" in text
    assert found["optimizer state"] == 8 * part
    assert found["their parts"] == 4 * (part - 1_318_912)
    assert found["gradients"] < 4 * part and found["weights"] < 4 * local / 30  # of two units of 82
    assert found["together"] == sum(found.values()) - found["together"]


def test_pipeline_ranks_shard_their_stages(dry_run):
    """And tell what of their activations is recomputed and swapped."""
    kept = 'recompute.select=["*.attention"]', "swap.op_swap={layers.*.mlp.SiLU: true}"
    sharded = "parallelism.zero_level=1", "parallelism.zero_threshold_kb=0"
    code, text, errors = dry_run("configs/llama_tiny_pp.yaml", *sharded, *kept)
    assert code == 0, errors
    found = figures(text)
    shown = text[text.index("activations of one micro-batch") : text.index("\nparameter ")]
    assert re.search(
        r"^  stage \d:\n    recompute: 2 of \d+ instructions run again; .*kept for the backward", shown, re.M
    )
    assert re.search(
        r"^      model.layers.[02]-[13].self_attn.core_attention: Attention\n    swap: results of 2 instructions",
        shown,
        re.M,
    )
    assert "level 1, optimizer state in 2 parts" in text and "stay whole" not in text
    kept = int(re.search(r"keeps and updates ([\d,]+)", text)[1].replace(",", ""))
    assert found["optimizer state"] == 8 * kept and found["weights"] == 2 * 4 * kept


def test_mesh_that_does_not_fit_is_an_error(dry_run):
    code, _, errors = dry_run("configs/llama3_70b.yaml", "parallelism.tensor_parallel=48")
    assert code == 2
    assert "model.num_attention_heads: 64 can't be cut into parallelism.tensor_parallel 48 parts: try 32" in errors


def test_report_adds_up():
    cut = (8, 4), (4, 4), (2, 4), "[(tp, dp), -]"
    facts = (
        ParameterFact("layers.0.weight", *cut),
        ParameterFact("layers.1.weight", *cut),
        ParameterFact("norm.weight", (4,), (4,), (4,), "[-]", "8 bytes are few"),
    )
    taken = {"weights": 136, "parts": 0, "gradients": 72, "state": 160, "buckets": 1}
    lines = [" ".join(line.split()) for line in report(RankFacts(facts, 2, 2, taken)).splitlines()]
    assert lines[0] == "parameters 68 in all, 36 on each rank"
    assert lines[1].startswith("zero level 2, optimizer state and gradients in 2 parts: a rank keeps and updates 20 ")
    assert lines[2] == "1 stay whole, 4 parameters: norm.weight"
    assert lines[4:9] == [
        "weights 136 (0.00 GiB)", "gradients 72 (0.00 GiB)", "optimizer state 160 (0.00 GiB)", "buckets 1 (0.00 GiB)",
        "together 369 (0.00 GiB), and activations, which no plan of the eager engine tells",
    ]  # fmt: skip
    assert "layers.*.weight 2 (8, 4) (4, 4) (2, 4) [(tp, dp), -]" in lines
    plain = report(RankFacts(facts, 0, 1, taken))
    assert "zero" not in plain and "stay whole" not in plain


EXPERTS = (
    "model.name=qwen3_moe", "model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=8",
    "model.head_dim=32", "parallelism.data_parallel_shard=2", "parallelism.expert_parallel=[dp]",
)  # fmt: skip


@pytest.mark.parametrize("overrides", [("train_dataset.packing=documents",), EXPERTS])
def test_operators_that_read_values_have_none(dry_run, overrides):
    """Of the eager engine, which has no plan."""
    fixed = "context.engine=eager", "model.num_hidden_layers=1"
    code, said, errors = dry_run("configs/llama_tiny_cpu_1p.yaml", *fixed, *overrides)
    assert code == 0, errors
    assert "activations, which no plan of the eager engine tells" in said


def test_patterns_that_are_nowhere_are_found_before_launch(dry_run):
    """On no stage of a pipeline, though each runs without the others."""
    code, _, errors = dry_run("configs/llama_tiny_pp.yaml", "recompute.select=layers.*.mlpp")
    assert code != 0
    assert "recompute.select: 'layers.*.mlpp' matches no Cell or operator" in errors
    assert "(did you mean 'mlp'?)" in errors


@pytest.mark.nightly
def test_a_budget_out_of_reach_is_told_for_all_stages_at_once(dry_run):
    """Two stages need different parts: the first correction is enough."""
    code, _, errors = dry_run("configs/llama_tiny_pp.yaml", "recompute.budget=0.01")
    assert code == 2
    told = re.search(r"budget: 0.01 is out of reach on stage 1: .* the least budget for all stages is (.*)$", errors)
    assert dry_run("configs/llama_tiny_pp.yaml", f"recompute.budget={told[1]}")[0] == 0
