"""Are two runs the same run? The largest relative difference of their loss curves; and have they learnt anything?"""

import json
import math
import os

__all__ = ["read_losses", "largest_difference", "compare_runs", "fall"]

_LAST = 10  # a single loss depends on its batch; the mean of the last ones counts


def read_losses(run):
    """`{step: loss}` of a run folder, or of a metrics.jsonl file.

    Raises:
        FileNotFoundError: no metrics there. ValueError: a line that isn't a metrics line, a step twice, or no line.
    """
    path = os.path.join(run, "metrics.jsonl") if os.path.isdir(run) else run
    if not os.path.isfile(path):
        raise FileNotFoundError(f"'{run}' is no run folder, with a metrics.jsonl in it, and no metrics file")
    losses = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                step, loss = int(row["step"]), float(row["loss"])
            except (ValueError, KeyError, TypeError) as error:
                shown = line.strip()[:80]
                raise ValueError(f"{path}, line {number}: no metrics line with a step and a loss: {shown!r}") from error
            if step in losses:
                raise ValueError(f"{path}, line {number}: step {step} is there twice")
            losses[step] = loss
    if not losses:
        raise ValueError(f"{path} is empty: the run ended before its first step")
    return losses


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
    """The mean of the last 10 losses (of all, where there are fewer) over the first, for a `{step: loss}`.

    Not a number where a loss isn't one, or the first is 0.
    """
    steps = sorted(losses)
    last = [losses[step] for step in steps[-_LAST:]]
    first = losses[steps[0]]
    return sum(last) / len(last) / first if first else math.nan


def compare_runs(run_a, run_b, threshold, fell=None):
    """Print the largest difference of two runs, and with `fell` how far their losses fell. Errors as in the others.

    Args:
        run_a, run_b: run folders, or metrics files.
        threshold: the largest relative difference that runs may have.
        fell: what `fall` of either run must be below, more than 0 and at most 1; None: whatever it is.

    Returns:
        Whether both hold.
    """
    if fell is not None and not 0 < fell <= 1:
        raise ValueError(f"--fell {fell:g}: give a part of the first loss, more than 0 and at most 1, as 0.7")
    losses_a, losses_b = read_losses(run_a), read_losses(run_b)
    try:
        difference, step = largest_difference(losses_a, losses_b)
    except ValueError as error:
        raise ValueError(f"{run_a} and {run_b} can't be compared: {error}") from None
    same, common = difference <= threshold, losses_a.keys() & losses_b.keys()
    for run, losses in ((run_a, losses_a), (run_b, losses_b)):
        if len(losses) > len(common):  # of a run that was resumed, or that ended earlier
            print(f"note: {run} has {_steps(losses)}, of which {_steps(common)} are in both")
    print(
        f"{len(common)} steps; largest relative difference of the loss {difference:.3e} at step {step} "
        f"({losses_a[step]:.7g} and {losses_b[step]:.7g}): {'within' if same else 'ABOVE'} the threshold {threshold:g}"
    )
    if fell is None:
        return same
    falls = [_tell_fall(run, losses, fell) for run, losses in ((run_a, losses_a), (run_b, losses_b))]
    return same and all(falls)


def _steps(numbers):
    return f"{len(numbers)} steps ({min(numbers)} to {max(numbers)})"


def _tell_fall(run, losses, limit):
    part = fall(losses)
    good = part < limit
    print(
        f"{run}: the last losses (mean of {min(_LAST, len(losses))}) are {part:.3f} of the first, "
        f"{losses[min(losses)]:.4f}: {'' if good else 'NOT '}below {limit:g}"
    )
    return good


def _relative(one, other):
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0
