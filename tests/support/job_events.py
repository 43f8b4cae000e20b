"""What a job went through, as events, against the simulator: the ETTR of trials that were really run.

Events are tuples `(seconds, what, step)` by time: "start", the job is launched at first; "step" has ended; "save",
training goes on after one; "complete", its checkpoint is, of a save beside training; "death", step 0. The last is the
end of the job. The step after a death may be a lower one.
"""

from itertools import pairwise
from statistics import fmean

from mindformers_core.analysis.recovery import Job, simulate


def measured_ettr(events):
    """The number of steps, each as long as their mean, over the wall time of the job."""
    return _steps(events) * _job(events).step / (events[-1][0] - events[0][0])


def simulated_ettr(events, interval, kind="disk"):
    """That of the simulator, for the job's average times and its deaths, saved every `interval` steps.

    Args:
        kind: of its deaths; "memory" for a job with `replicas`.
    """
    return simulate(_job(events), interval, failures_of(events, kind))["ettr"]


def new_events(rows, known, now):
    """Events of the rows of a running job's metrics.jsonl that aren't `known`, a dict that this fills: step -> seconds.

    A row is written after the save of its step, where it has one. Call this often, and sort all events in the end.
    """
    for row in rows:
        if known.get(row["step"]) != row["seconds"]:  # a step that is done again takes another time
            known[row["step"]], save = row["seconds"], row.get("save_seconds", 0.0)
            yield now - save, "step", row["step"]
            if save:
                yield now, "save", row["step"]


def failures_of(events, kind="disk"):
    """The failures of `simulate`, and the end of the job as a last one, which loses nothing."""
    times = [time for time, what, _ in events if what in ("start", "death")]
    failures = [(after - before, kind) for before, after in pairwise(times)]
    return [*failures, (events[-1][0] - times[-1], "memory")]


def _steps(events):
    return max(step for _, what, step in events if what == "step")


def _job(events):
    """The `Job` that these events show; loading is a part of its starts."""
    ended = {step: time for time, what, step in events if what == "save"}
    writing = [time - ended[step] for time, what, step in events if what == "complete"]
    pairs = list(pairwise(event for event in events if event[1] != "complete"))
    passed = [(now[0] - before[0], before[1], now[1]) for before, now in pairs]
    step = fmean(time for time, before, now in passed if now == "step" and before in ("step", "save"))
    saves = [time for time, _, now in passed if now == "save"]
    starts = [time - step for time, before, now in passed if now == "step" and before in ("start", "death")]
    return Job(float("inf"), step, *(fmean(each or [0.0]) for each in (saves, writing, starts)))
