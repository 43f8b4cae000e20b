"""What failures cost a job: a simulator of deaths, restarts and checkpoints, and the best interval between checkpoints.

Times are seconds of wall time. ETTR, the effective training time ratio, is productive over wall time: the seconds of
the steps that count, each once, over all. Pure Python.
"""

import math
import random
import re
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean, median

UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_ENDLESS = 10**18  # steps
_TIME = re.compile(rf"(\d{{1,12}}(?:\.\d+)?)\s*({'|'.join(UNITS)})?")


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a job.

    Attributes:
        step: of a step. save: that a save holds up training. background: from there until the checkpoint is complete,
            beside the next steps; a save waits for that before it.
        restart: of a start, from a death to the begin of the first new step, without loading. load: of a checkpoint.
    """

    step: float
    save: float = 0.0
    background: float = 0.0
    restart: float = 0.0
    load: float = 0.0


@dataclass(frozen=True)
class Risks:
    """How often a job ends early: exponential times between failures.

    Attributes:
        mtbf: mean seconds between failures of the whole job: those of a worker over the number of workers.
        from_disk: part of the failures after which the state is read from disk. After the others it is still in the
            memory of other machines, and the step that was running is lost.
        preempted: mean seconds between preemptions, which let the running step end and save.
    """

    mtbf: float
    from_disk: float = 1.0
    preempted: float = math.inf


@dataclass
class Outcome:
    """A simulated job: its steps, each counted once; seconds of wall time, those in which it only saved, and those of
    its starts; number of restarts, and of `lost_steps`, which were done again.
    """

    steps: int = 0
    wall: float = 0.0
    saving: float = 0.0
    restarting: float = 0.0
    restarts: int = 0
    lost_steps: int = 0


def seconds_of(text, name):
    """Seconds of `"90"`, `"1.5 min"`, `"6h"`, or of a number; an error begins with `name`.

    Raises:
        ValueError: it is neither, or isn't above 0.
    """
    found = _TIME.fullmatch(str(text).strip())
    if found is None or not (seconds := float(found[1]) * UNITS[found[2] or "s"]) > 0:
        raise ValueError(f"{name}: {text!r} is no time above 0: give seconds, or a unit of {', '.join(UNITS)}, as 6h")
    return seconds


def time_shown(seconds):
    """`"1.5 min"`."""
    unit = max((unit for unit in UNITS if UNITS[unit] <= seconds), key=UNITS.get, default="ms")
    return f"{seconds / UNITS[unit]:.3g} {unit}"


def best_interval(costs, risks):
    """Steps between checkpoints for the highest ETTR, at least 1; also so many that a save never waits for another.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), eq. 37,
    with the failures that read from disk: after others the age of a checkpoint doesn't matter.

    Raises:
        ValueError: no failure needs a checkpoint.
    """
    if not (risks.from_disk > 0 and math.isfinite(risks.mtbf)):
        raise ValueError("no failure needs a checkpoint on disk, so that no interval is the best one")
    mean = risks.mtbf / risks.from_disk
    part = costs.save / (2 * mean)
    seconds = mean
    if part < 1:
        seconds = math.sqrt(2 * costs.save * mean) * (1 + math.sqrt(part) / 3 + part / 9) - costs.save
    return max(1, round(seconds / costs.step), math.ceil(costs.background / costs.step))


def draw_failures(risks, count, seed):
    """A generator of `count` failures, `(seconds since the failure before, kind)`, kind "disk", "memory", "preemption".

    The same seed gives the same ones.
    """
    draws = random.Random(seed)
    rates = {
        "disk": risks.from_disk / risks.mtbf,
        "memory": (1 - risks.from_disk) / risks.mtbf,
        "preemption": 1 / risks.preempted,
    }
    for _ in range(count):
        yield draws.expovariate(sum(rates.values())), draws.choices([*rates], rates.values())[0]


def simulate(costs, interval, failures, steps=None):
    """The `Outcome` of a job that saves after each step whose number is a multiple of `interval`, and the last one.

    A failure may meet a start, a step or a save. A checkpoint counts once it is complete. The job begins with a start.

    Args:
        costs: the `Costs`.
        interval: steps between saves.
        failures: `(seconds since the failure before, kind)`, as of `draw_failures`.
        steps: of the job, which goes on undisturbed after the failures; default: it ends with them.
    """
    out, saved, down = Outcome(), 0, costs.restart
    failures, steps = (failures, _ENDLESS) if steps is None else (chain(failures, [(math.inf, "")]), steps)
    for gap, kind in failures:
        up = gap - down
        if up >= (left := _seconds_to_end(costs, interval, out.steps, steps)):
            out.wall, out.restarting = out.wall + down + left, out.restarting + down
            out.saving, out.steps = out.saving + left - (steps - out.steps) * costs.step, steps
            break
        out.wall, out.restarting, out.restarts = out.wall + gap, out.restarting + min(gap, down), out.restarts + 1
        down = costs.restart + (costs.load if kind != "memory" else 0)
        if up > 0:
            ran, complete, saving, rest = _progress(costs, interval, out.steps, steps, up)
            saved = saved if complete is None else complete
            out.steps, out.saving = out.steps + ran, out.saving + saving
            if kind == "preemption":
                own = costs.save + costs.background
                out.wall, out.saving = out.wall + rest + own, out.saving + own
                out.steps = saved = out.steps + (rest > 0)
        if kind == "disk":
            out.lost_steps, out.steps = out.lost_steps + out.steps - saved, saved
    return out


def _progress(costs, interval, done, steps, seconds):
    """What happens in `seconds` of training after step `done`, which don't reach the end of the last one's save.

    A few operations give it, however many steps these are.

    Returns:
        Number of steps; that of the last step with a complete checkpoint, or None; seconds of saves that ended; and
        those until the running step ends, 0 while it saves.
    """
    first, cycle = interval - done % interval, max(interval * costs.step, costs.background) + costs.save
    end = first * costs.step + costs.save  # of the first save
    count = max(0, (steps - 1) // interval - done // interval)  # saves before that of the last step
    ended, complete = (
        0 if seconds < at else min(count, 1 + int((seconds - at) // cycle)) for at in (end, end + costs.background)
    )
    before, most = (first + (ended - 1) * interval, interval) if ended else (0, first)
    most = min(most, steps - done - before)
    begun = end + (ended - 1) * cycle if ended else 0.0
    ran = min(most, int((seconds - begun) // costs.step))
    rest = (ran + 1) * costs.step - (seconds - begun) if ran < most else 0.0
    newest = done + first + (complete - 1) * interval if complete else None
    return before + ran, newest, begun - before * costs.step, rest


def _seconds_to_end(costs, interval, done, steps):
    """Seconds from step `done` until the checkpoint of the last one of `steps` is complete."""
    last = (steps - 1) // interval * interval  # the last save before that at the end
    count = max(0, last // interval - done // interval)
    waits = (count - 1) * max(0.0, costs.background - interval * costs.step) if count else 0.0
    waits += max(0.0, costs.background - (steps - last) * costs.step) if count else 0.0
    return (steps - done) * costs.step + (count + 1) * costs.save + waits + costs.background


def costs_of(rows):
    """The `Costs` by rows of metrics.jsonl of a run, where docs/metrics.md has their names; loading is in `restart`.

    Raises:
        ValueError: no row has the seconds of a save.
    """
    names = "save_seconds", "copy_seconds", "write_seconds", "start_seconds"
    saves, *others = ([row[name] for row in rows if name in row] for name in names)
    if not saves:
        raise ValueError("no checkpoint was saved")
    step, (copies, writing, start) = median(row["seconds"] for row in rows), (fmean(each or [0.0]) for each in others)
    return Costs(step, fmean(saves) + copies, writing, max(0.0, start - step))


def measured_ettr(events):
    """The ETTR of a job that ended, by its events: its steps, as long as their median, over its wall time.

    Args:
        events: tuples `(seconds, what, step)` by time: "start", the job is launched at first; "step" has ended; "save",
            training goes on after one; "complete", its checkpoint is; "death". A step after a death may be a lower one.
    """
    costs, _, steps = replayed(events)
    return steps * costs.step / (events[-1][0] - events[0][0])


def replayed(events):
    """`Costs`, failures and number of steps, for `simulate`, of a job with these events, as of `measured_ettr`.

    The cost of loading is in that of a start. A death that lost no step is one "memory".
    """
    ended = {step: time for time, what, step in events if what == "save"}
    writing = [time - ended[step] for time, what, step in events if what == "complete"]
    passed = [
        (now[0] - before[0], before[1], now[1]) for before, now in pairwise(e for e in events if e[1] != "complete")
    ]
    step = median(time for time, before, now in passed if now == "step" and before in ("step", "save"))
    saves = [time for time, _, now in passed if now == "save"]
    starts = [time - step for time, before, now in passed if now == "step" and before in ("start", "death")]
    costs = Costs(step, *(fmean(each or [0.0]) for each in (saves, writing, starts)))
    failures, last = [], events[0][0]
    for place, (time, what, _) in enumerate(events):
        if what == "death":
            reached = next((step for _, what, step in reversed(events[:place]) if what == "step"), 0)
            goes_on = next(step for _, what, step in events[place:] if what == "step")
            failures.append((time - last, "memory" if goes_on > reached else "disk"))
            last = time
    return costs, failures, max(step for _, what, step in events if what == "step")
