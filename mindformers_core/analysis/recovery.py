"""What failures cost a job: a simulator of deaths, restarts and checkpoints, and the best interval between checkpoints.

ETTR, the effective training time ratio, is the time of the steps that count, each once, over wall time. Pure Python.
"""

import math
import random
import re
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, median

KINDS = "disk", "memory", "preemption"  # of failures
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(rf"(\d{{1,12}}(?:\.\d+)?)\s*({'|'.join(_UNITS)})?")


@dataclass(frozen=True)
class Job:
    """What a job takes, and how often it fails, in seconds; failures come at random, in starts and saves, too."""

    mtbf: float  # mean time between failures of the whole job: that of a worker over their number
    step: float
    save: float  # that a save holds up training
    background: float = 0.0  # from there until the checkpoint is complete, beside steps; the next save waits for that
    restart: float = 0.0  # from a failure to the begin of the first new step, without `load`, which is of a checkpoint
    load: float = 0.0
    from_disk: float = 1.0  # part of the failures, above 0, after which `load` is needed: after others, of which the
    # state is in the memory of other machines, only the step that ran is lost
    preempted: float = math.inf  # mean time between preemptions, before which the job saves


def seconds_of(text):
    """Seconds of `"90"`, `"1.5 min"`, `"6h"`, or of a number; `ValueError` where it is neither, or isn't above 0."""
    found = _TIME.fullmatch(str(text).strip())
    if found is None or not (seconds := float(found[1]) * _UNITS[found[2] or "s"]) > 0:
        raise ValueError(f"{text!r} is no time above 0: give seconds, or a unit of {', '.join(_UNITS)}, as 6h")
    return seconds


def best_interval(job):
    """Steps between checkpoints for the highest ETTR, at least 1; also so many that a save never waits for another.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), eq. 37,
    with the failures that read from disk: after others the age of a checkpoint doesn't matter. `ValueError` where
    `from_disk` is out of its range.
    """
    if not 0 < job.from_disk <= 1:
        raise ValueError(f"from_disk: {job.from_disk:g}: give a part of the failures, above 0 and at most 1")
    seconds = mean = job.mtbf / job.from_disk
    part = job.save / (2 * mean)
    if part < 1:
        seconds = math.sqrt(2 * job.save * mean) * (1 + math.sqrt(part) / 3 + part / 9) - job.save
    return max(1, round(seconds / job.step), math.ceil(job.background / job.step))


def draw_failures(job, count, seed):
    """A generator of `count` failures, `(seconds since the one before, one of KINDS)`: the same ones for a seed."""
    draws, rates = random.Random(seed), (job.from_disk / job.mtbf, (1 - job.from_disk) / job.mtbf, 1 / job.preempted)
    for _ in range(count):
        yield draws.expovariate(sum(rates)), *draws.choices(KINDS, rates)


def simulate(job, interval, failures):
    """A job that saves every `interval` steps, from its first start to its last failure; a checkpoint counts once it is
    complete. The `failures`, at least one, are as of `draw_failures`; the job's times of them aren't read.

    Returns:
        A dict: `steps` that count; `wall`, seconds; `ettr`, `saving`, `restarting`, `lost`, parts of that; `restarts`;
        `lost_steps` and `lost_seconds`, of a failure on average: whole steps that are done again, and all lost time.
    """
    out, saved, down = Counter(), 0, job.restart
    wait = max(0.0, job.background - interval * job.step)  # of a save for that before it
    cycle = interval * job.step + wait + job.save
    for gap, kind in failures:
        out.update(wall=gap, restarting=min(gap, down), restarts=1)
        if gap > down:
            base = out["steps"] // interval * interval
            time = gap - down + (out["steps"] - base) * job.step + wait  # as if from step `base` on, after a wait
            ended, complete = int(time // cycle), int((time - job.background) // cycle)
            out["saving"] += ended * (job.save + wait) - (wait if ended else 0)
            ran = (time - ended * cycle - (0 if ended else wait)) // job.step
            out["steps"] = base + ended * interval + min(interval, int(ran))
            saved = base + complete * interval if complete > 0 else saved
            if kind == "preemption":
                before = max(0.0, job.background + ended * cycle - time) if ended else 0.0  # until that is complete
                saved, own = out["steps"], before + job.save + job.background
                out.update(wall=own, saving=own)
        if kind == "disk":
            out["lost_steps"], out["steps"] = out["lost_steps"] + out["steps"] - saved, saved
        down = job.restart + (job.load if kind != "memory" else 0)
    spent = {"ettr": out["steps"] * job.step, "saving": out["saving"], "restarting": out["restarting"]}
    spent["lost"] = out["wall"] - sum(spent.values())
    failing = {"lost_steps": out["lost_steps"] / out["restarts"], "lost_seconds": spent["lost"] / out["restarts"]}
    return dict(out) | {name: seconds / out["wall"] for name, seconds in spent.items()} | failing


def costs_of(rows):
    """The times `step`, `save` and `background` of a `Job` by rows of metrics; `ValueError` where none is of a save."""
    saves, writing = ([row[name] for row in rows if name in row] for name in ("save_seconds", "write_seconds"))
    if not saves:
        raise ValueError("no checkpoint was saved")
    return {"step": median(row["seconds"] for row in rows), "save": fmean(saves), "background": fmean(writing or [0.0])}
