"""Comparing runs: the largest relative difference and its step; broken and unequal runs are errors, not agreement.

And whether the losses fell: two runs that learn nothing agree, too.
"""

import json
import math
from pathlib import Path

import pytest

from mindformers_core.commands.command_line import main
from mindformers_core.commands.compare import fall, largest_difference, read_losses


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
    assert main(["compare", run_a, run_b]) == 0
    said = capsys.readouterr().out
    assert f"note: {run_a} has 2 steps (1 to 2), of which 1 steps (1 to 1) are in both\n1 steps; largest" in said
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 3, "loss": 2}\n')
    assert main(["compare", run_a, run_b]) == 2
    assert "they have no step in common: one has 2 steps (1 to 2), the other 1 steps" in capsys.readouterr().err
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


LEARNT = [4.0, *[3.0] * 5, *[2.0] * 10]  # the mean of the last ten is 0.5 of the first


@pytest.mark.parametrize(
    ("losses", "limit", "exit_code", "text"),
    [
        (LEARNT, "0.51", 0, "(mean of 10) are 0.500 of the first, 4.0000: below 0.51"),
        (LEARNT, "0.5", 1, "0.500 of the first, 4.0000: NOT below 0.5"),
        ([4.0] * 20, "0.7", 1, "1.000 of the first, 4.0000: NOT below 0.7"),
        ([4.0] * 19 + [0.4], "0.7", 1, "0.910 of the first, 4.0000: NOT below 0.7"),
        ([4.0, 0.0], "0.6", 0, "(mean of 2) are 0.500 of the first"),
        ([4.0], "1", 1, "NOT below 1"),
    ],
)
def test_fell_is_about_the_last_ten_losses(tmp_path, capsys, losses, limit, exit_code, text):
    run = write_run(tmp_path / "a", losses)
    assert main(["compare", run, run]) == 0, "without --fell it doesn't matter"
    assert main(["compare", run, run, "--fell", limit]) == exit_code
    assert text in capsys.readouterr().out


def test_both_runs_have_to_fall_and_to_agree(tmp_path):
    fell, flat = write_run(tmp_path / "fell", LEARNT), write_run(tmp_path / "flat", [4.0] * 16)
    for pair in ((fell, flat), (flat, fell)):
        assert main(["compare", *pair, "--threshold", "1"]) == 0
        assert main(["compare", *pair, "--threshold", "1", "--fell", "0.7"]) == 1
    other = write_run(tmp_path / "other", [4.0, *[3.0] * 5, *[1.9] * 10])
    assert main(["compare", fell, other, "--fell", "0.7"]) == 1


def test_a_fall_that_cannot_be_judged_is_none(tmp_path, capsys):
    assert math.isnan(fall({1: 0.0, 2: 1.0})) and math.isnan(fall({1: 4.0, 2: math.nan}))
    run = write_run(tmp_path / "a", [0.0, 0.0])
    assert main(["compare", run, run, "--fell", "0.7"]) == 1
    for limit in ("0", "1.5", "nan"):
        assert main(["compare", run, run, "--fell", limit]) == 2
        assert "--fell" in capsys.readouterr().err


def test_the_quickstart_demands_that_the_loss_fell():
    lines = (Path(__file__).parent.parent / "scripts" / "quickstart.sh").read_text().splitlines()
    (line,) = [line for line in lines if "mindformers_core compare" in line]
    assert "--threshold 1e-4 --fell 0.7" in line
