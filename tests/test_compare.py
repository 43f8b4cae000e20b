"""Comparing runs: the largest relative difference and its step; broken and unequal runs are errors, not agreement."""

import json
import math

import pytest

from mindformers_core.trainer.command_line import main
from mindformers_core.trainer.compare import largest_difference, read_losses


def write_run(folder, losses):
    folder.mkdir()
    rows = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(rows))
    return str(folder)


def test_largest_difference_and_first_step_that_has_it():
    assert largest_difference({1: 2.0, 2: 2.0, 3: 1.0}, {1: 2.0, 2: 1.0, 3: 2.0}) == (0.5, 2)
    assert largest_difference({1: 0.0}, {1: 0.0}) == (0.0, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_a_number_is_never_close(value):
    assert largest_difference({1: 1.0, 2: value}, {1: 1.0, 2: value}) == (math.inf, 2)


def test_exit_code_and_text(tmp_path, capsys):
    run_a, run_b = write_run(tmp_path / "a", [4.0, 2.0]), write_run(tmp_path / "b", [4.0, 2.001])
    assert main(["compare", run_a, run_b]) == 1
    assert "4.998e-04 at step 2 (2 and 2.001): ABOVE the threshold 0.0001" in capsys.readouterr().out
    assert main(["compare", run_a, run_b, "--threshold", "1e-3"]) == 0
    assert main(["compare", run_a, run_a, "--threshold", "0"]) == 0


def test_short_and_missing_runs_are_errors(tmp_path, capsys):
    run_a, run_b = write_run(tmp_path / "a", [4.0, 2.0]), write_run(tmp_path / "b", [4.0])
    assert main(["compare", run_a, run_b]) == 2
    assert "step 2 is in one run only: one has 2 steps (1 to 2), the other 1 (1 to 1)" in capsys.readouterr().err
    assert main(["compare", run_a, str(tmp_path / "nowhere")]) == 2
    assert "nowhere' is no run" in capsys.readouterr().err
    assert main(["compare", run_a, write_run(tmp_path / "empty", [])]) == 2
    assert "ended before its first step" in capsys.readouterr().err


def test_broken_line_is_an_error_with_its_number(tmp_path):
    run = write_run(tmp_path / "a", [4.0])
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    with pytest.raises(ValueError, match="line 2: no metrics line"):
        read_losses(run)
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n' * 2)
    with pytest.raises(ValueError, match="line 2: step 1 is there twice"):
        read_losses(run)
