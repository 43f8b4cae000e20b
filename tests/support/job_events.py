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


def pooled_ettr(jobs, interval):
    """`(measured, simulated)` ETTR of jobs that save alike, all together; `jobs`: dicts as of `trials.trials`.

    On a machine that others load one start takes three times as long as another one, and a simulator of average times
    believes in steps that there weren't. So time is counted here by what was done, each step as long as their mean.
    """
    lived, passed = [_lived(job) for job in jobs], {}
    for events, _ in lived:
        for name, seconds in _seconds(events).items():
            passed.setdefault(name, []).extend(seconds)
    known, steps, wall, failures = _mean_job(passed), 0, 0.0, []
    for events, kinds in lived:
        events = _steady(events, known, interval)
        failures += [(gap, kind) for (gap, _), kind in zip(failures_of(events), [*kinds, "memory"], strict=True)]
        steps, wall = steps + _steps(events), wall + events[-1][0]
    wall += sum(kind == "preemption" for _, kind in failures) * (known.save + known.background)
    return steps * known.step / wall, simulate(known, interval, failures)["ettr"]


def _lived(job):
    """The events of a trials' job, and the kinds of its deaths, each after all that the signalled job has still done.

    One that saves before it leaves dies before that.
    """
    events, kinds = [tuple(event) for event in job["events"] if event[1] != "death"], []
    for trial in job["trials"]:
        time, end = trial["time"], trial["time"] + trial["ended"]
        saves = [event for event in events if event[1] == "save" and time < event[0] < end]
        if saves:
            events.remove(saves[-1])
            end = saves[-1][0]
        time = max([time, *(event[0] for event in events if event[0] < end and event[1] != "death")])
        kinds.append("preemption" if saves else "disk")
        events.append((time, "death", 0))
    return sorted(events, key=lambda event: event[0]), kinds


def _steady(events, known, interval):
    """The same events from second 0 on, where each takes what it takes on average, and what a death ends less."""
    clock, found = 0.0, [(0.0, *events[0][1:])]
    for before, now in pairwise(event for event in events if event[1] != "complete"):
        starts = before[1] in ("start", "death")
        if now[1] == "death":
            saves = before[1] == "step" and before[2] % interval == 0
            most = known.restart if starts else known.save if saves else known.step
            clock += most * min(0.99, max(0.01, (now[0] - before[0]) / most))  # in it: at its end it has rounding
        else:
            clock += known.restart * starts + (known.step if now[1] == "step" else known.save)
        found.append((clock, *now[1:]))
    return [*found[:-1], (clock + 0.01 * known.step, *found[-1][1:])]


def failures_of(events, kind="disk"):
    """The failures of `simulate`, and the end of the job as a last one, which loses nothing."""
    times = [time for time, what, _ in events if what in ("start", "death")]
    failures = [(after - before, kind) for before, after in pairwise(times)]
    return [*failures, (events[-1][0] - times[-1], "memory")]


def _steps(events):
    return max(step for _, what, step in events if what == "step")


def _job(events):
    """The `Job` that these events show; loading is a part of its starts."""
    return _mean_job(_seconds(events))


def _mean_job(seconds):
    return Job(float("inf"), **{name: fmean(each or [0.0]) for name, each in seconds.items()})


def _seconds(events):
    """What each step, save, checkpoint beside training and start has taken: a dict of lists, by the names of `Job`."""
    ended = {step: time for time, what, step in events if what == "save"}
    writing = [max(0.0, time - ended[step]) for time, what, step in events if what == "complete" and step in ended]
    pairs = list(pairwise(event for event in events if event[1] != "complete"))
    passed = [(now[0] - before[0], before[1], now[1]) for before, now in pairs]
    steps = [time for time, before, now in passed if now == "step" and before in ("step", "save")]
    starts = [time - fmean(steps) for time, before, now in passed if now == "step" and before in ("start", "death")]
    saves = [time for time, _, now in passed if now == "save"]
    return {"step": steps, "save": saves, "background": writing, "restart": starts}
