"""What failures cost: the simulator against the closed form and a job that runs by the step; Daly's interval; auto."""

import json
import math
import random

import pytest

from mindformers_core.analysis.recovery import (
    Costs,
    Risks,
    best_interval,
    draw_failures,
    measured_ettr,
    replayed,
    seconds_of,
    simulate,
)
from mindformers_core.checkpoint.parts import Ranks
from mindformers_core.commands.command_line import main
from mindformers_core.recipe.sections import Checkpoint
from mindformers_core.trainer.records import Row
from mindformers_core.trainer.saving import Saving

COSTS = Costs(step=1.0, save=5.0, restart=20.0, load=5.0)


def by_the_step(costs, interval, failures, steps):
    """A job that does one thing after another until its next failure: its events, and number of steps done again."""
    events, lost, done, saved, clock, down = [(0.0, "start", 0)], 0, 0, 0, 0.0, costs.restart
    for gap, kind in [*failures, (math.inf, "")]:
        end, time, writing, runs, has_saved = clock + gap, clock + down, None, "", done < steps
        while time < end:
            runs, seconds = "step", costs.step
            if not has_saved and (done % interval == 0 or done == steps):
                runs, seconds = "save", costs.save + (max(0.0, writing[0] - time) if writing else 0.0)
            if time + seconds > end:
                break
            time, done, has_saved = time + seconds, done + (runs == "step"), runs == "save"
            events.append((time, runs, done))
            if has_saved:
                saved, writing = writing[1] if writing else saved, (time + costs.background, done)
                if writing[0] <= end:
                    events.append((writing[0], "complete", done))
                if done == steps:
                    break
        if writing and writing[0] <= end:
            saved = writing[1]
            if saved == steps:
                return sorted(events), lost
        if kind == "preemption" and clock + down < end:
            rest, done = (time + costs.step - end, done + 1) if runs == "step" else (0.0, done)
            end, saved = end + rest + costs.save + costs.background, done
        lost, done = (lost + done - saved, saved) if kind == "disk" else (lost, done)
        down, clock = costs.restart + (costs.load if kind != "memory" else 0), end
        events.append((clock, "death", 0))
    raise AssertionError


@pytest.mark.parametrize("seed", range(3))
def test_the_simulator_is_a_job_that_runs_by_the_step(seed):
    draws = random.Random(seed)
    for _ in range(60):
        save, background = draws.uniform(0.1, 6), draws.choice([0.0, draws.uniform(0, 30)])
        costs = Costs(draws.uniform(0.5, 2), save, background, draws.uniform(1, 9), draws.uniform(1, 9))
        interval, steps = draws.randint(1, 12), draws.randint(1, 90)
        failures = [*draw_failures(Risks(40.0, 0.6, 200.0), 12, draws.random())]
        events, lost = by_the_step(costs, interval, failures, steps)
        out = simulate(costs, interval, failures, steps)
        deaths = [event for event in events if event[1] == "death"]
        assert (out.steps, out.restarts, out.lost_steps) == (steps, len(deaths), lost)
        assert out.wall == pytest.approx(events[-1][0])


@pytest.mark.parametrize("mtbf", [90, 9000, 900_000])
def test_ettr_is_that_of_the_formula_and_highest_at_the_best_interval(mtbf):
    """Daly's (2006) eq. 20, exact for exponential failures, also in saves and starts; fixed intervals are worse."""
    best = best_interval(COSTS, Risks(mtbf))
    for seed in range(3):
        found = {}
        for interval in (10, 100, 1000, best):
            out = simulate(COSTS, interval, draw_failures(Risks(mtbf), 3000, seed))
            found[interval] = out.steps * COSTS.step / out.wall
            assert out.steps + out.saving + out.restarting <= out.wall
        assert max(found, key=found.get) == best
        start, segment = math.exp((COSTS.restart + COSTS.load) / mtbf), best * COSTS.step + COSTS.save
        assert found[best] == pytest.approx(best / (mtbf * start * math.expm1(segment / mtbf)), rel=0.03)


def test_best_interval():
    assert best_interval(COSTS, Risks(900_000)) == pytest.approx(math.sqrt(2 * 5 * 900_000), rel=2e-3)
    assert best_interval(COSTS, Risks(9000, from_disk=0.01)) == best_interval(COSTS, Risks(900_000))
    assert best_interval(COSTS, Risks(2.0)) == 2  # saving takes longer than the time between failures
    assert best_interval(Costs(2.0, 0.1, background=999), Risks(90)) == 500  # no save waits for another
    with pytest.raises(ValueError, match="no failure needs a checkpoint on disk"):
        best_interval(COSTS, Risks(90, from_disk=0))


@pytest.mark.parametrize("background", [0.0, 7.0])
def test_measured_ettr_is_simulated(background):
    """What is worked out of the events of a job gives the simulator all that the job's ETTR depends on."""
    costs, failures = (
        Costs(1.0, 2.0, background, 10.0),
        [(25.5, "disk"), (4.0, "disk"), (33.2, "memory"), (50.3, "disk")],
    )
    events, lost = by_the_step(costs, 8, failures, 60)
    found, *others = replayed(events)
    out = simulate(found, 8, *others)
    assert lost >= 5 and others == [[*failures], 60]
    assert measured_ettr(events) == pytest.approx(60 / events[-1][0]) == pytest.approx(60 * found.step / out.wall, 0.01)


def test_times():
    assert [seconds_of(text, "--a") for text in (90, 1.5, "1.5 min", "6h", "200ms")] == [90, 1.5, 90, 21600, 0.2]
    for text in ("6x", "-1s", "0", "", True):
        with pytest.raises(ValueError, match="--a: .* is no time above 0: give seconds, or a unit of ms, s, min"):
            seconds_of(text, "--a")


def test_the_command(capsys):
    given = [
        "recovery",
        "--simulate",
        "--mtbf",
        "6000h",
        "--workers",
        "1000",
        "--step",
        "2s",
        "--save",
        "10",
        "--restart",
        "1.5min",
        "--intervals",
        "7",
    ]
    assert main([*given, "--steps", "100000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 2 s, save 10 s, restart 1.5 min, mtbf 6 h" and lines[2].startswith("7 steps ")
    assert ["Daly's formula, the best one here" in line for line in lines].count(True) == 1
    assert lines[-1].startswith("100,000 steps, saved every ") and lines[-1].endswith(" restarts")
    assert main([*given, "--json", "--from-disk", "0.1", "--preempted", "1d"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["daly"] == best_interval(Costs(2.0, 10.0), Risks(216_000)) and document["risks"]["mtbf"] == 21600
    for row in document["intervals"]:
        assert sum(row[part] for part in ("ettr", "saving", "restarting", "lost")) == pytest.approx(1)
    assert main([*given[:-4]]) == 2 and main([*given, "--from-disk", "2"]) == 2
    assert "--restart: missing" in (told := capsys.readouterr().err) and "--from-disk 2: give a part" in told


def test_auto_saves_as_often_as_the_slowest_rank_says(capsys):
    """All ranks save after the same steps, those of `keep_every` too, and a save that isn't made is no measurement."""

    class Checkpointer:
        seconds = {"save_seconds": 0.5, "copy_seconds": 0.25}

    section = Checkpoint(save_interleaved_steps="auto", mtbf="50s", keep_every=7)
    gathered = [lambda own: {0: own, 1: [0.5, 2.0, 0.0]}, lambda own: {0: [0.4, 0.1, 0.0], 1: [0.5, 2.0, 0.0]}]
    saved = []
    for rank, gather in enumerate(gathered):
        saving, steps = Saving(section, Ranks(rank, gather), Checkpointer), []
        for step in range(101, 170):
            row = Row(step=step, seconds=0.1)
            if saving.is_due(row):
                saving.add(row, "" if step > 105 else None)
                steps.append(step)
                assert ("copy_seconds" in row) == (step > 105)
        saved.append(steps)
    interval = best_interval(Costs(0.5, 2.0), Risks(50.0))
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
