"""`recovery --simulate`: what failures cost a job, for intervals between its checkpoints, as a table or JSON."""

import json
from dataclasses import asdict, fields

from mindformers_core.analysis.recovery import Job, best_interval, costs_of, draw_failures, seconds_of, simulate
from mindformers_core.commands.compare import read_rows
from mindformers_core.hints import columns
from mindformers_core.scopes import errors_at

_FAILURES = 4_000  # of a simulated job
_GRID = range(-6, 7)  # powers of the square root of 2: from an eighth to eight times Daly's interval
_PARTS = "ettr", "saving", "restarting", "lost"
_HEAD = "interval", *_PARTS, "lost at a failure", ""


def recovery(arguments):
    """The report of the parsed `arguments`, a text: a row for each interval, of a job with 4,000 failures.

    Raises:
        ValueError: a time is missing, or wrong; a run that has saved nothing. FileNotFoundError: it has no metrics.
    """
    given = {}
    for entry in fields(Job):
        if (value := getattr(arguments, entry.name)) is not None:
            with errors_at(f"--{entry.name}: "):
                given[entry.name] = seconds_of(value) if isinstance(value, str) else value
    if arguments.measured:
        with errors_at(f"{arguments.measured}: "):
            given = costs_of([*read_rows(arguments.measured).values()]) | given
    if missing := [name for name in ("step", "save") if name not in given]:
        raise ValueError(f"--{missing[0]}: missing: give its seconds, or --run with a run folder that has checkpoints")
    job = Job(**given | {"mtbf": given["mtbf"] / arguments.workers})
    daly = best_interval(job)
    grid = sorted({max(1, round(daly * 2 ** (place / 2))) for place in _GRID})
    found = {interval: simulate(job, interval, draw_failures(job, _FAILURES, seed=0)) for interval in grid}
    best = max(found, key=lambda interval: found[interval]["ettr"])
    if arguments.json:
        rows = [{"interval": interval, **each} for interval, each in found.items()]
        return json.dumps({"job": asdict(job), "daly": daly, "best": best, "intervals": rows}, indent=1)
    lines = [_HEAD]
    for interval, each in found.items():
        parts = (f"{each[part]:.2%}" for part in _PARTS)
        lost = f"{each['lost_steps']:,.1f} steps, {each['lost_seconds']:,.1f} s"
        marks = ["Daly's formula"] * (interval == daly) + ["the best one here"] * (interval == best)
        lines.append((f"{interval:,} steps, {interval * job.step:,.1f} s", *parts, lost, ", ".join(marks)))
    return "\n".join([", ".join(f"{name} {value:,.4g}" for name, value in asdict(job).items()), *columns(lines)])
