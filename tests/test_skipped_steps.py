"""Steps that are skipped without a loss scale, and norms of gradients by patterns, in a run that goes on."""

import json

from test_own_model_training import recipe

from mindformers_core.commands.command_line import main

__all__ = ["recipe"]


def test_steps_that_are_not_finite_are_skipped(recipe, tmp_path, capfd):
    """Where the recipe says so, in float32 without a loss scale; their number goes on in a resumed run, and is limited.

    The norms of groups are parts of the norm of all.
    """
    norms = "monitor.gradient_norms=['blocks.0.*', '*.weight']"
    skips = "precision.skip_not_finite=true", "precision.skipped_steps=1", f"training.output_dir={tmp_path / 'run'}"
    zero = "train_dataset.options={change: 'x * (first not in (4, 12, 16)), y'}"
    command = ["train", "--config", recipe, *skips, norms, zero, "training.resume=auto"]
    assert main([*command, "training.steps=4"]) == 0
    folder = tmp_path / "run/checkpoint"
    state = json.loads((folder / "step_4/state.json").read_text())
    assert (state["skipped"], state["skipped_in_a_row"]) == (2, 1)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [0, 1, 1, 2] and rows[1]["gradient_norm"] is None
    first, *_ = rows
    assert first["gradient_norm *.weight"] == first["gradient_norm"] > first["gradient_norm blocks.0.*"] > 0
    assert main([*command, "training.steps=9"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert (
        "at step 5 " in error and "2 steps in a row are skipped, more than precision.skipped_steps, and 2 wei" in error
    )
