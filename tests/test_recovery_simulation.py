"""What failures cost: the simulator against the closed form and a job that runs by the step; Daly's interval; auto."""

import json
import math
import random

import pytest
from support.job_events import failures_of, measured_ettr, pooled_ettr, simulated_ettr

from mindformers_core.analysis.recovery import Job, best_interval, draw_failures, seconds_of, simulate
from mindformers_core.checkpoint.parts import Ranks
from mindformers_core.commands.command_line import main
from mindformers_core.recipe.sections import Checkpoint
from mindformers_core.trainer.records import Row
from mindformers_core.trainer.saving import Saving

COSTS = {"step": 1.0, "save": 5.0, "restart": 20.0, "load": 5.0}


def by_the_step(job, interval, failures):
    """A job that does one thing after another until its next failure: its events, the last step that counts, number of
    steps done again, and seconds of saves that ended and of starts.
    """
    events, lost, done, saved, clock, down = [(0.0, "start", 0)], 0, 0, 0, 0.0, job.restart
    saving = starting = 0.0
    for gap, kind in failures:
        end, time, writing, has_saved = clock + gap, clock + down, None, True
        starting += min(gap, down)
        while time < end:
            runs, seconds = "step", job.step
            if not has_saved and done % interval == 0:
                runs, seconds = "save", job.save + (max(0.0, writing[0] - time) if writing else 0.0)
            if time + seconds > end:
                break
            time, done, has_saved = time + seconds, done + (runs == "step"), runs == "save"
            events.append((time, runs, done))
            if has_saved:
                saving += seconds
                saved, writing = writing[1] if writing else saved, (time + job.background, done)
                if job.background and writing[0] <= end:
                    events.append((writing[0], "complete", done))
        if writing and writing[0] <= end:
            saved = writing[1]
        if kind == "preemption" and clock + down < end:
            own = job.save + job.background + (max(0.0, writing[0] - end) if writing else 0.0)
            end, saving, saved = end + own, saving + own, done
        lost, done = (lost + done - saved, saved) if kind == "disk" else (lost, done)
        down, clock = job.restart + (job.load if kind != "memory" else 0), end
        events.append((clock, "death", 0))
    return sorted(events), done, lost, saving, starting


@pytest.mark.parametrize("seed", range(3))
def test_the_simulator_is_a_job_that_runs_by_the_step(seed):
    draws = random.Random(seed)
    for _ in range(60):
        background = draws.choice([0.0, draws.uniform(0, 30)])
        job = Job(40.0, draws.uniform(0.5, 2), draws.uniform(0.1, 6), background, 5.0, draws.uniform(1, 9), 0.6, 200.0)
        interval, count = draws.randint(1, 12), draws.randint(1, 12)
        failures = [*draw_failures(job, count, draws.random())]
        events, done, lost, *spent = by_the_step(job, interval, failures)
        out = simulate(job, interval, failures)
        assert (out["steps"], out["restarts"], out["lost_steps"] * count) == (done, count, pytest.approx(lost))
        assert out["wall"] == pytest.approx(events[-1][0])
        assert [out[part] * out["wall"] for part in ("saving", "restarting")] == pytest.approx(spent)


@pytest.mark.parametrize("mtbf", [90, 9000, 900_000])
def test_ettr_is_that_of_the_formula_and_highest_at_the_best_interval(mtbf):
    """Daly's (2006) eq. 20, exact for exponential failures, also in saves and starts; fixed intervals are worse."""
    job = Job(mtbf, **COSTS)
    best = best_interval(job)
    for seed in range(3):
        found = {
            each: simulate(job, each, draw_failures(job, 3000, seed))["ettr"] for each in (10, 100, 1000, 10_000, best)
        }
        assert max(found, key=found.get) == best
        start, segment = math.exp((job.restart + job.load) / mtbf), best * job.step + job.save
        assert found[best] == pytest.approx(best * job.step / (mtbf * start * math.expm1(segment / mtbf)), rel=0.03)


def test_best_interval():
    assert best_interval(Job(900_000, **COSTS)) == pytest.approx(math.sqrt(2 * 5 * 900_000), rel=2e-3)
    assert best_interval(Job(9000, **COSTS, from_disk=0.01)) == best_interval(Job(900_000, **COSTS))
    exact = min(range(1, 9999), key=lambda steps: math.expm1((steps * 0.01 + 5) / 90) / steps)  # of the formula above
    assert best_interval(Job(90, 0.01, 5.0)) == pytest.approx(exact, rel=2e-3)
    assert best_interval(Job(2.0, **COSTS)) == 2  # saving takes longer than the time between failures
    assert best_interval(Job(90, 2.0, 0.1, background=999)) == 500  # no save waits for another
    with pytest.raises(ValueError, match="from_disk: 0: give a part of the failures, above 0 and at most 1"):
        best_interval(Job(90, **COSTS, from_disk=0))


@pytest.mark.parametrize("background", [0.0, 7.0, 20.0])
def test_the_measured_ettr_is_that_of_the_simulator(background):
    """The events of a job give the simulator all that its ETTR depends on."""
    failures = [(25.5, "disk"), (4.0, "disk"), (33.2, "disk"), (50.3, "disk"), (200.1, "memory")]
    events, done, lost, *_ = by_the_step(Job(math.inf, 1.0, 2.0, background, 10.0), 8, failures)
    assert lost >= 5 and failures_of(events[:-1])[:-1] == [pytest.approx(each) for each in failures[:-1]]
    assert measured_ettr(events[:-1]) == pytest.approx(done / 313.1, 0.01)
    assert simulated_ettr(events[:-1], 8) == pytest.approx(measured_ettr(events[:-1]), 0.01)
    assert simulated_ettr(events[:-1], 2) < 0.9 * measured_ettr(events[:-1])
    deaths = [{"time": time, "ended": 0.0} for time, what, _ in events[:-1] if what == "death"]
    job = {"events": events[:-1], "trials": deaths, "async": background > 0}
    assert pooled_ettr([job, job], 8)[1] == pytest.approx(pooled_ettr([job, job], 8)[0], 0.01)
    assert pooled_ettr([job, job], 2)[1] < 0.9 * pooled_ettr([job, job], 8)[0]


def test_the_ettr_of_trials_on_paper():
    """A start takes 10 s, a step 1 s, a save after two steps 2 s, and its checkpoint 3 s from there.

    A process dies before the checkpoint of step 4 is complete, which so is lost, and SIGTERM saves after step 5, when
    that of step 4 is.
    """
    lives = (
        [(0, "start", 0), (11, "step", 1), (12, "step", 2), (14, "save", 2), (15, "step", 3), (16, "step", 4)],
        [(17, "complete", 2), (19, "save", 4)],
        [(30, "step", 3), (31, "step", 4), (33, "save", 4), (34, "step", 5), (36, "complete", 4)],
        [(41, "complete", 5), (41.01, "save", 5), (52, "step", 6), (54, "save", 6), (55, "step", 7), (56, "step", 8)],
        [(57, "complete", 6), (62, "complete", 8), (62.01, "save", 8)],
    )
    trials = [{"time": 18.9, "ended": 0.2}, {"time": 33.5, "ended": 8.0}]
    job = {"events": sum(lives, []), "trials": trials, "async": True}
    assert pooled_ettr([job], 2) == pytest.approx((8 / 59, 8 / 59), rel=0.01)


def test_times():
    assert [seconds_of(text) for text in (90, 1.5, "1.5 min", "6h", "200ms")] == [90, 1.5, 90, 21600, 0.2]
    for text in ("6x", "-1s", "0", "", True):
        with pytest.raises(ValueError, match=".* is no time above 0: give seconds, or a unit of ms, s, min, h, d, as"):
            seconds_of(text)


def test_the_command(capsys):
    text = "recovery --simulate --mtbf 6000h --workers 1000 --restart 1.5min --step 2s --save 10"
    given = text.split()
    assert main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mtbf 2.16e+04, step 2, save 10, background 0, restart 90, load 0,")
    assert ["Daly's formula, the best one here" in line for line in lines].count(True) == 1 and len(lines) == 15
    assert main([*given, "--json", "--from_disk", "0.1", "--preempted", "1d"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["daly"] == best_interval(Job(216_000, 2.0, 10.0)) and document["job"]["mtbf"] == 21600
    for row in document["intervals"]:
        assert sum(row[part] for part in ("ettr", "saving", "restarting", "lost")) == pytest.approx(1)
    assert [main(given[:-2]), main([*given, "--from_disk", "2"]), main([*given, "--load", "no"])] == [2, 2, 2]
    told = capsys.readouterr().err
    assert "--save: missing" in told and "from_disk: 2: give a part" in told and "--load: 'no' is no time" in told


def test_auto_saves_as_often_as_the_slowest_rank_says(capsys):
    """All ranks save after the same steps, those of `keep_every` too, and a save that isn't made is no measurement."""

    class Checkpointer:
        seconds = {"save_seconds": 0.75}

    section = Checkpoint(save_interleaved_steps="auto", mtbf="50s", keep_every=7)
    slow = {"step": 0.5, "save": 2.0, "background": 0.0}
    gathered = [lambda own: {0: own, 1: slow}, lambda own: {0: slow | {"step": 0.1, "save": 0.75}, 1: slow}]
    saved = []
    for rank, gather in enumerate(gathered):
        saving, steps = Saving(section, Ranks(rank, gather), Checkpointer), []
        for step in range(101, 170):
            row = Row(step=step, seconds=0.1)
            if saving.is_due(row):
                saving.add(row, "" if step > 105 else None)
                steps.append(step)
                assert ("save_seconds" in row) == (step > 105)
        saved.append(steps)
    interval = best_interval(Job(50.0, 0.5, 2.0))
    assert saved[0] == saved[1] == [105, 110, 112, 119, 126, 133, 140, 147, 154, 161, 168]
    assert interval > 7
    assert capsys.readouterr().out.count(f"auto: every {interval} steps, since one takes 500 ms, a save 2 s, and") == 1


@pytest.mark.parametrize(
    "keys, told",
    [
        ({"save_interleaved_steps": "often"}, "save_interleaved_steps: 'often' is neither a number of steps nor auto"),
        ({"save_interleaved_steps": "auto"}, "mtbf: missing: save_interleaved_steps: auto needs the mean time"),
        ({"mtbf": "6x"}, "mtbf: '6x' is no time above 0"),
    ],
)
def test_wrong_keys(keys, told):
    with pytest.raises(ValueError, match=told):
        Checkpoint(**keys)
