"""Compares two runs: the largest relative difference of their loss curves, and the decrease of either's loss."""

import json
import math
import os

from mindformers_core.scopes import errors_at

_LAST = 10  # a single loss depends on its batch; the mean of the last ones counts


def read_losses(run):
    """`{step: loss}` of a run folder, or of a metrics.jsonl file; NaN for a loss that wasn't finite, which is null.

    Errors as of `read_rows`.
    """
    return {step: math.nan if row["loss"] is None else row["loss"] for step, row in read_rows(run).items()}


def read_rows(run):
    """`{step: row}` of a run folder, or of a metrics.jsonl file.

    Raises:
        FileNotFoundError: no metrics there. ValueError: a line that isn't a metrics line, a step twice, or no line.
    """
    path = os.path.join(run, "metrics.jsonl") if os.path.isdir(run) else run
    if not os.path.isfile(path):
        raise FileNotFoundError(f"'{run}' is no run folder, with a metrics.jsonl in it, and no metrics file")
    rows = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                step, row["loss"] = int(row["step"]), row["loss"] and float(row["loss"])
            except (ValueError, KeyError, TypeError) as error:
                shown = line.strip()[:80]
                raise ValueError(f"{path}, line {number}: no metrics line with a step and a loss: {shown!r}") from error
            if step in rows:
                raise ValueError(f"{path}, line {number}: step {step} is there twice")
            rows[step] = row
    if not rows:
        raise ValueError(f"{path} is empty: the run ended before its first step")
    return rows


def largest_difference(first, second):
    """`(difference, step)`: the largest of `|a - b| / max(|a|, |b|)` over the common steps of two `{step: loss}`.

    A loss that is not a number differs infinitely.

    Raises:
        ValueError: they have no step in common.
    """
    common = first.keys() & second.keys()
    if not common:
        raise ValueError(f"they have no step in common: one has {_steps(first)}, the other {_steps(second)}")
    difference, step = max((_relative(first[step], second[step]), -step) for step in common)
    return difference, -step


def fall(losses):
    """The mean of the last 10 losses, or of all, divided by the first, for a `{step: loss}`.

    NaN if a loss is NaN, or the first is 0.
    """
    first, last = losses[min(losses)], [losses[step] for step in sorted(losses)[-_LAST:]]
    return sum(last) / len(last) / first if first else math.nan


def compare_runs(run_a, run_b, threshold, fell=None):
    """Print the largest difference of two runs, and `fall` of each; errors as in `read_losses`.

    Args:
        run_a, run_b: run folders, or metrics files.
        threshold: the largest allowed relative difference of two losses.
        fell: limit that `fall` of either run must be below, more than 0 and at most 1; None: `fall` isn't checked.

    Returns:
        Whether the difference and `fall` are within their limits.
    """
    if fell is not None and not 0 < fell <= 1:
        raise ValueError(f"--fell {fell:g}: give a part of the first loss, more than 0 and at most 1, as 0.7")
    runs = [(run, read_losses(run)) for run in (run_a, run_b)]
    (_, losses_a), (_, losses_b) = runs
    with errors_at(f"{run_a} and {run_b} can't be compared: "):
        difference, step = largest_difference(losses_a, losses_b)
    holds, common = difference <= threshold, losses_a.keys() & losses_b.keys()
    for run, losses in runs:
        if len(losses) > len(common):  # of a run that was resumed, or that ended earlier
            print(f"note: {run} has {_steps(losses)}, of which {_steps(common)} are in both")
    print(
        f"{len(common)} steps; largest relative difference of the loss {difference:.3e} at step {step} "
        f"({losses_a[step]:.7g} and {losses_b[step]:.7g}): {'within' if holds else 'ABOVE'} the threshold {threshold:g}"
    )
    for run, losses in runs if fell is not None else ():
        part, count = fall(losses), min(_LAST, len(losses))
        print(
            f"{run}: the last losses (mean of {count}) are {part:.3f} of the first, {losses[min(losses)]:.4f}: "
            f"{'' if part < fell else 'NOT '}below {fell:g}"
        )
        holds = holds and part < fell
    if difference > threshold:
        print("the first operator that differs: python -m mindformers_core diff A B, of two recipes or recorded runs")
    return holds


def _steps(numbers):
    return f"{len(numbers)} steps ({min(numbers)} to {max(numbers)})"


def _relative(one, other):
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0
