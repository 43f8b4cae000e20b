"""What a job went through, as events, against the simulator: the ETTR of trials that were really run.

Events are tuples `(seconds, what, step)` by time: "start", the job is launched at first; "step" has ended; "save",
training goes on after one; "complete", the checkpoint of this step is, of a save beside training: later, or before
"save" where the job has waited for that; "death", step 0. The last is the end of the job. The step after a death may be
a lower one.
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
    known, done = _mean_job(passed), []
    for events, kinds in lived:
        events, waited = _steady(events, kinds, known, interval)
        failures = [(gap, kind) for (gap, _), kind in zip(failures_of(events), [*kinds, "memory"], strict=True)]
        simulated = simulate(known, interval, failures)
        done.append((_steps(events), events[-1][0] + waited, simulated["steps"], simulated["wall"]))
    steps, wall, simulated_steps, simulated_wall = map(sum, zip(*done))
    return steps * known.step / wall, simulated_steps * known.step / simulated_wall


def _lived(job):
    """The events of a trials' job, and the kinds of its deaths, each after all that the signalled job has still done.

    One that saves before it leaves, with the checkpoint whole, dies before that; "left" is the end of that save.
    """
    events, kinds = [tuple(event) for event in job["events"] if event[1] != "death"], []
    for trial in job["trials"]:
        time, end = trial["time"], trial["time"] + trial["ended"]
        done = [event for event in events if time < event[0] < end]
        own = [event for event in done if event[1:] in {("save", done[-1][2]), ("complete", done[-1][2])}]
        leaves = done and done[-1][1] == "save" and (len(own) == 2 or not job["async"])
        events = [event for event in events if not leaves or event not in own]
        time = max([time, *(event[0] for event in events if event[0] < end and event[1] != "death")])
        kinds.append("preemption" if leaves else "disk")
        events += [(time, "death", 0), *([(done[-1][0], "left", 0)] if leaves else [])]
    return sorted(events, key=lambda event: event[0]), kinds


def _steady(events, kinds, known, interval):
    """The same events from second 0 on, where each takes what it takes on average, and what a death ends less; and the
    seconds of saves before jobs left, after their deaths.

    A checkpoint that was complete before a death still is, and one that wasn't isn't.
    """
    clock, found, waited, kinds, before = 0.0, [(0.0, *events[0][1:])], 0.0, iter(kinds), events[0]
    written = saved = None  # when the newest checkpoint of this start is complete; its step
    whole = set()
    for now in events[1:]:
        if now[1] in ("complete", "left"):
            whole.add(now[2])
            continue
        starts, saves = before[1] in ("start", "death"), before[1] == "step" and before[2] % interval == 0
        wait = 0.0 if written is None else max(0.0, known.background - interval * known.step)
        most = known.restart if starts else known.save + wait if saves else known.step
        if now[1] == "death":
            clock += most * min(0.99, max(0.01, (now[0] - before[0]) / most))  # in it: at its end it has rounding
            if next(kinds) == "preemption":
                waited += known.save + known.background + max(0.0, (written or 0.0) - clock)
            elif written is not None:
                is_whole = saved in whole or not known.background
                clock = max(clock, written + 0.01 * known.step) if is_whole else min(clock, written - 0.01 * known.step)
            written = None
        else:
            clock += known.restart * starts + (known.step if now[1] == "step" else known.save + wait)
        if now[1] == "save":
            written, saved = clock + known.background, now[2]
        found.append((clock, *now[1:]))
        before = now
    return [*found[:-1], (clock + 0.01 * known.step, *found[-1][1:])], waited


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
    """What each step, save, checkpoint beside training and start has taken: a dict of lists, by the names of `Job`.

    A save that waits for the checkpoint before it begins after that; one that waits for its own isn't among them.
    """
    found, before, whole, ended = {name: [] for name in ("step", "save", "background", "starts")}, events[0], {}, {}
    for now in events[1:]:
        time, what, step = now
        if what == "complete":
            found["background"] += [time - ended[step]] if step in ended else []
            whole[step] = time
            continue
        seconds = time - before[0]
        if what == "step":
            found["step" if before[1] in ("step", "save") else "starts"].append(seconds)
        elif what == "save":
            found["save"] += [] if step in whole else [time - max([before[0], *whole.values()])]
            ended[step] = time
        else:  # "death", then maybe "left"
            whole, ended = {}, {}
        before = now
    step = fmean(found["step"] or [0.0])
    return found | {"restart": [seconds - step for seconds in found.pop("starts")]}
