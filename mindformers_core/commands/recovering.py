"""`recovery --simulate`: what failures cost a job, for intervals between its checkpoints, as a table or JSON."""

import json
import math
from dataclasses import asdict, fields

from mindformers_core.analysis.recovery import (
    Costs,
    Risks,
    best_interval,
    costs_of,
    draw_failures,
    seconds_of,
    simulate,
    time_shown,
)
from mindformers_core.commands.compare import read_rows
from mindformers_core.hints import columns
from mindformers_core.scopes import errors_at

_FAILURES = 4_000  # of a simulated job
_STEPS = range(-6, 7)  # the grid: powers of the square root of 2, from an eighth to eight times Daly's interval
_HEAD = ("interval", "time", "ETTR", "saving", "starting", "lost", "lost at a failure", "")


def recovery(arguments):
    """The report of the parsed `arguments`, a text: a row for each interval, of a job with 4,000 failures.

    Raises:
        ValueError: a time, part or number that is missing or out of its range; a run that has saved nothing.
        FileNotFoundError: the run has no metrics.
    """
    costs, risks = _costs(arguments), _risks(arguments)
    daly = best_interval(costs, risks)
    grid = {max(1, round(daly * 2 ** (place / 2))) for place in _STEPS} | {*arguments.intervals}
    found = [_figures(costs, risks, interval, arguments.seed) for interval in sorted(grid)]
    best = max(found, key=lambda row: row["ettr"])
    if arguments.json:
        document = {"costs": asdict(costs), "risks": asdict(risks), "daly": daly, "best": best["interval"]}
        return json.dumps(document | {"intervals": found}, indent=1)
    times = asdict(costs) | {"mtbf": risks.mtbf, "preempted": risks.preempted}
    given = [f"{name} {time_shown(seconds)}" for name, seconds in times.items() if 0 < seconds < math.inf]
    named = (daly, "Daly's formula"), (best["interval"], "the best one here")
    rows = [(*_cells(row), ", ".join(name for each, name in named if each == row["interval"])) for row in found]
    lines = [", ".join(given), *columns([_HEAD, *rows])]
    if arguments.steps:
        wall, restarts = (arguments.steps * best[name] / best["steps"] for name in ("wall", "restarts"))
        lines.append(
            f"{arguments.steps:,} steps, saved every {best['interval']}: {time_shown(wall)}, {restarts:,.1f} restarts"
        )
    return "\n".join(lines)


def _costs(arguments):
    """The `Costs` of flags, and of the run where they aren't given."""
    names, measured = [entry.name for entry in fields(Costs)], {}
    if arguments.measured:
        with errors_at(f"{arguments.measured}: "):
            measured = asdict(costs_of([*read_rows(arguments.measured).values()]))
    given = {name: seconds_of(text, f"--{name}") for name in names if (text := getattr(arguments, name)) is not None}
    for name in ("step", "save", "restart"):
        if name not in measured | given:
            raise ValueError(f"--{name}: missing: give its seconds, or --run with a run folder that has checkpoints")
    return Costs(**measured | given)


def _risks(arguments):
    if not 0 <= arguments.from_disk <= 1:
        raise ValueError(f"--from-disk {arguments.from_disk:g}: give a part of the failures, from 0 to 1")
    mtbf = seconds_of(arguments.mtbf, "--mtbf") / arguments.workers
    preempted = math.inf if arguments.preempted is None else seconds_of(arguments.preempted, "--preempted")
    return Risks(mtbf, arguments.from_disk, preempted)


def _figures(costs, risks, interval, seed):
    out = simulate(costs, interval, draw_failures(risks, _FAILURES, seed))
    spent = {"ettr": out.steps * costs.step, "saving": out.saving, "restarting": out.restarting}
    spent["lost"] = out.wall - sum(spent.values())
    return {
        "interval": interval,
        "seconds": interval * costs.step,
        **{name: seconds / out.wall for name, seconds in spent.items()},
        **{name: getattr(out, name) for name in ("steps", "wall", "restarts")},
        "lost_steps": out.lost_steps / out.restarts,
        "lost_seconds": spent["lost"] / out.restarts,
    }


def _cells(row):
    parts = [f"{row[name]:.2%}" for name in ("ettr", "saving", "restarting", "lost")]
    lost = f"{row['lost_steps']:,.1f} steps, {time_shown(row['lost_seconds'])}"
    return f"{row['interval']:,} steps", time_shown(row["seconds"]), *parts, lost
