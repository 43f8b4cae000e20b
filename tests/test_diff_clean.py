"""Pairs of meshes and modes that compute the same: `diff` raises no alarm, with a perturbed run and without."""

from itertools import combinations

import pytest
from support.diff_runs import DP, PP, TP, ZERO3, recorded

from mindformers_core.diff.parting import part
from mindformers_core.diff.report import report

ZERO2 = ("parallelism.zero_level=2", "parallelism.zero_threshold_kb=0")
GRAPH, EAGER, RECOMPUTE = ("context.mode=0",), ("context.engine=eager",), ("recompute.full=true",)
ONE_MICRO_BATCH = ("training.local_batch_size=2", "parallelism.pipeline_parallel_microbatch_size=2")
RUNS = {
    "one card": (),
    "pp 2": (*PP, "parallelism.pipeline_parallel_schedule=zb_h1"),
    "tp 2, sequence parallel, recompute": (*TP, "parallelism.sequence_parallel=true", *RECOMPUTE),
}
MORE_RUNS = {
    "dp 2, zero 3": ZERO3,
    "tp 2": TP,
    "dp 2": DP,
    "dp 2, tp 2, zero 2": (*DP, *TP, *ZERO2),
    "graph": GRAPH,
    "dp 4, zero 1": ("parallelism.data_parallel_shard=4", "training.local_batch_size=1", "parallelism.zero_level=1"),
    "pp 2, tp 2": (*PP, *TP),
    "pp 2, dp 2, tp 2, zero 2": (*PP[:1], *DP, *TP, *ZERO2, *ONE_MICRO_BATCH),
    "dp 2, zero 3, recompute": (*ZERO3, *RECOMPUTE),
    "eager": EAGER,
    "eager, tp 2": (*EAGER, *TP),
}


def _no_alarm(runs, folder, dtype, steps):
    """Compare all pairs of runs, those with one card without a perturbed run, too; returns their number."""
    dtype = f"model.dtype={dtype}"
    found = {name: recorded(folder / name, [*overrides, dtype], steps) for name, overrides in runs.items()}
    noise = found["one card"], recorded(folder / "perturbed", ["monitor.perturb=1", dtype], steps)
    pairs = list(combinations(found, 2))
    for one, other in pairs:
        for each in (noise, None) if one == "one card" else (noise,):
            parting = part(found[one], found[other], each)
            assert parting.first is None, f"{one} and {other}\n{report(parting)}"
            assert parting.agree > 100 * steps, report(parting)
    return len(pairs)


def test_tokens_in_another_order(tmp_path):
    """One card and zigzag on 2 ranks: gradients, norm and weights are compared."""
    sizes = "model.num_hidden_layers=1", "training.local_batch_size=1", "training.global_batch_size=1"
    found = [recorded(tmp_path / str(n), [*sizes, f"parallelism.context_parallel={n}"]) for n in (1, 2)]
    parting = part(*found)
    assert parting.first is None and "have tokens in another order" in parting.note, report(parting)
    assert parting.agree > 50


@pytest.mark.long
def test_meshes_and_modes(tmp_path):
    assert _no_alarm(RUNS, tmp_path, "float32", 1) == 3


@pytest.mark.nightly
def test_half_precision(tmp_path):
    runs = {name: RUNS[name] for name in list(RUNS)[::2]}
    assert _no_alarm(runs, tmp_path, "float16", 1) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_more_meshes_and_modes(dtype, tmp_path):
    assert _no_alarm({**RUNS, **MORE_RUNS}, tmp_path, dtype, 3) == 91
