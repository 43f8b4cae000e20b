"""`--dry-run`: what every rank of a large job would hold, from one process that allocates nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindformers_core.trainer.dry_run import ParameterFact, report

ROOT = Path(__file__).parent.parent
# prints the largest resident set in KiB after the command has run
MEASURED = (
    "import resource, sys; from mindformers_core.trainer.command_line import main; code = main(sys.argv[1:]); "
    "print('KiB', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
)


def dry_run(*arguments):
    """The finished process of a dry run, and its seconds."""
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    command = [sys.executable, "-c", MEASURED, "train", "--dry-run", "--config", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    return done, time.monotonic() - started


@pytest.mark.parametrize(
    ("name", "whole", "local", "ranks"),
    [("llama3_8b", "8,030,261,248", "1,004,015,616", 8), ("llama3_70b", "70,553,706,496", "8,820,367,360", 128)],
)
def test_large_recipes_are_checked_in_seconds_and_little_memory(name, whole, local, ranks):
    done, seconds = dry_run(f"configs/{name}.yaml")
    assert done.returncode == 0, done.stderr
    assert f": {ranks} ranks" in done.stdout
    assert f"{whole} in all, {local} on each rank" in done.stdout
    assert seconds < 60
    assert int(done.stdout.rpartition("KiB")[2]) < 4 * 2**20


def test_mesh_that_does_not_fit_is_an_error():
    done, _ = dry_run("configs/llama3_70b.yaml", "parallelism.tensor_parallel=16")
    assert done.returncode == 2
    assert "model.num_key_value_heads: 8 can't be cut into parallelism.tensor_parallel 16 parts: try 8" in done.stderr


def test_report_adds_up():
    facts = [
        ParameterFact("layers.0.weight", (8, 4), (4, 4), "float32", "[tp, -]"),
        ParameterFact("layers.1.weight", (8, 4), (4, 4), "float32", "[tp, -]"),
        ParameterFact("norm.weight", (4,), (4,), "bfloat16", "[-]"),
    ]
    lines = [" ".join(line.split()) for line in report(facts).splitlines()]
    assert lines[0] == "parameters 68 in all, 36 on each rank"
    assert "parameters float32 128 (0.00 GiB)" in lines and "parameters bfloat16 8 (0.00 GiB)" in lines
    assert "AdamW state float32 288 (0.00 GiB)" in lines
    assert "together 560 (0.00 GiB)" in lines  # 136 + 136 + 288
    assert "layers.*.weight 2 (8, 4) (4, 4) [tp, -]" in lines
