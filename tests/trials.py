"""Trials of recovery: a job whose processes are killed, stopped and asked to leave, at chosen places, until it is done.

    .venv/bin/python tests/trials.py 60 --seed 1 --record trials.jsonl

Each trial is a signal to a random rank, the scheduler, or a process that saves, in a random phase of a random step:
`support/trial_points.py`. Every second job of 4 ranks (dp 2 x tp 2) saves beside training. Their losses have to be
those of a job that nobody disturbs, bit by bit, and nothing of them may be left. A line tells each trial.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from socket import gethostname

import psutil
import yaml
from support.launch import ROOT, TESTS, free_port
from support.stand_in import worker
from support.trial_points import PHASES

from mindformers_core.checkpoint.folders import step_of

SIGNALS = {signal.SIGKILL: 5, signal.SIGTERM: 3, signal.SIGSTOP: 3}  # of so many of all trials
TARGETS = {"rank": 6, "scheduler": 1}
DELAYS = {"starting": 6.0, "loading": 0.2, "saving": 0.0, "saving beside training": 0.8}  # seconds at most; else 0.05
REPORTED = re.compile("Where the ranks are:|^SIGTERM: ", re.MULTILINE)
STEPS, STAND_IN = 40, TESTS / "support" / "stand_in"
RECIPE = {
    "training": {"steps": STEPS, "local_batch_size": 2, "global_batch_size": 8},
    "parallelism": {"data_parallel_shard": 2, "tensor_parallel": 2, "zero_level": 1, "zero_threshold_kb": 0},
    "optimizer": {"type": "AdamW"},
    "lr_scheduler": {"type": "CosineWithWarmUpLR", "learning_rate": 1e-3, "warmup_steps": 2},
    "train_dataset": {"seq_length": 32, "factory": "support.trial_points:samples"},
    "model": {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32,
    },
    "checkpoint": {"enable_save": True, "save_interleaved_steps": 2, "keep_last": 3},
    "monitor": {"log_interval": 1, "plot": False},
    "context": {"communication_timeout": 4},
}  # fmt: skip


class Job:
    """A job of the recipe in a folder, under the supervisor; `path` are folders of Python's.

    Args:
        folder: of everything that it writes; trials lie in its folder `points`.
        ranks: their number.
        overrides: of the recipe; `variables`: of the environment.
        machine: its number among `machines`, of which each has an equal part of the ranks.
    """

    path = ROOT, TESTS

    def __init__(self, folder, ranks, *overrides, machine=0, machines=1, **variables):
        self.run, self.port, self.points = folder / "run", free_port(), folder / "points"
        self.local = ranks // machines
        self.points.mkdir(parents=True, exist_ok=True)
        self.is_async, self.whole = "checkpoint.async_save=True" in overrides, {}  # step of a checkpoint -> time
        dataset = RECIPE["train_dataset"] | {"options": {"points": str(self.points)}}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"train_dataset": dataset}))
        words = self.words(folder / "recipe.yaml", *overrides)
        place = ["127.0.0.1", self.port, machine, folder / "log", "True", 60]
        command = ["bash", ROOT / "scripts/msrun_launch.sh", " ".join(words), ranks, self.local, *place]
        self.told = folder / "log" / f"supervisor.{gethostname()}.{machine}"
        self.output = folder / f"output_{machine}.txt"
        path = os.pathsep.join(map(str, self.path))
        environment = {**os.environ, "PYTHONPATH": path, "GLOG_v": "3", "RESTARTS": "1000", "BACKOFF": "0"}
        self.begun = time.monotonic()
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*map(str, command)], stdout=output, stderr=output, cwd=folder, env=environment | variables
            )

    def words(self, recipe, *overrides):
        """The command of a rank."""
        return [
            "-m",
            "mindformers_core",
            "train",
            "--config",
            str(recipe),
            f"training.output_dir={self.run}",
            *overrides,
        ]

    def calm_rows(self, ranks):
        """Its rows, where nobody disturbs it, to the end."""
        assert self.wait(600), self.tail()
        return self.rows()

    def rows(self):
        """The rows of the run's metrics that are whole."""
        return read_lines(self.run / "metrics.jsonl")

    def fired(self):
        """The trials of which the signal is sent."""
        return read_lines(self.points / "fired")

    def restarts(self):
        """How often the supervisor has started it again."""
        return self.output.read_text().count("supervisor: exit code")

    def tail(self):
        """The end of its output."""
        return self.output.read_text()[-3000:]

    def is_noticed(self):
        """Whether a rank of the start that runs has reported a hang or a death, or the launcher a dead scheduler."""
        logs = (path.read_text(errors="replace") for path in self.told.parent.glob("worker_*.log"))
        return "scheduler is gone" in self.output.read_text().rpartition("restart ")[2] or any(
            map(REPORTED.search, logs)
        )

    def look(self):
        """Note when checkpoints were complete: rank 0 can't tell it once it is stopped, but its writer may go on."""
        for path in (self.run / "checkpoint").glob("step_*[0-9]"):
            with suppress(FileNotFoundError):  # it is pruned
                age = time.time() - path.stat().st_ctime  # when it got its name
                self.whole.setdefault(step_of(str(path)), time.monotonic() - age)

    def events(self):
        """What it has done, as of `job_events`."""
        events = [(self.begun, "start", 0), *map(tuple, read_lines(self.points / "events"))]
        saved = {step for _, what, step in events if what == "save"}
        events += [(when, "save", step) for step, when in self.whole.items() if step not in saved]
        events += [(when, "complete", step) for step, when in self.whole.items() if self.is_async]
        return sorted(events + [(each["time"], "death", 0) for each in self.fired()])

    def processes(self):
        """`{"rank 0" …, "scheduler": the process}` of those that live, and of others `{"… of rank 0": …}`."""
        found = {}
        for process in psutil.process_iter(["environ", "status"]):
            environment = process.info["environ"] or {}
            if environment.get("MINDFORMERS_SUPERVISOR") == str(self.told) and process.info["status"] != "zombie":
                role = environment.get("MS_ROLE")
                name = {"MS_WORKER": f"rank {environment.get('RANK_ID')}", "MS_SCHED": "scheduler"}.get(
                    role, "launcher"
                )
                while name in found:
                    name = f"child of {name}"
                found[name] = process
        return found

    def end(self):
        """Kill what is left."""
        for process in [self.process, *self.processes().values()]:
            process.kill()
        self.process.wait()

    def wait(self, seconds, until=lambda: False):
        """Wait for the end of the job, or until something holds. Returns whether one of the two has come."""
        end = time.monotonic() + seconds
        while goes_on := self.process.poll() is None and not until():
            if time.monotonic() > end:
                break
            self.look()
            time.sleep(0.05)
        self.look()
        return not goes_on


class StandIn(Job):
    """A job of ranks that start in milliseconds: `support/stand_in/worker.py`.

    What it shares with a job of a recipe: launch script, supervisor, watchers, supervised steps, checkpoints.
    """

    path, steps = (STAND_IN, ROOT, TESTS), STEPS

    def words(self, recipe, *overrides):
        return [str(STAND_IN / "worker.py"), *map(str, (self.run, self.points, self.steps, self.is_async, self.local))]

    def calm_rows(self, ranks):
        self.end()  # what it computes is known
        return [*worker.calm_rows(ranks, self.steps)]


def read_lines(path):
    """The JSON objects of the whole lines of a file, none where there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def draw(rng, ranks, is_async, after, has_saved):
    """A trial as of `trial_points`, for a job that has done so many steps, and has a checkpoint or not."""
    none = set() if has_saved else {"loading"}
    none |= set() if is_async else {"saving beside training"}
    phase = rng.choice([phase for phase in PHASES if phase not in none])
    number, target = (rng.choices([*each], [*each.values()])[0] for each in (SIGNALS, TARGETS))
    if phase == "saving beside training" and target == "rank" and number == signal.SIGKILL:
        target = rng.choice(("rank", "writer"))
    most = {"between micro-steps": 0, "update": 0, "saving": 6}.get(phase, 3 if phase in ("forward", "backward") else 0)
    return {
        "phase": phase, "rank": rng.randrange(ranks), "after": 0 if phase in PHASES[:2] else after + rng.randint(0, 2),
        "passes": rng.randint(0, most), "delay": rng.choice((0.0, rng.random() * DELAYS.get(phase, 0.05))),
        "target": target, "signal": int(number),
    }  # fmt: skip


def disturb(job, plan, seconds=300):
    """One trial, until the job is started again: a dict; None where the job has ended before.

    `noticed` are the seconds from the signal until a process has reported it, `ended` those until all have ended.
    """
    count, restarts = len(job.fired()), job.restarts()
    (job.points / "new").write_text(json.dumps(plan | {"number": count}))
    os.rename(job.points / "new", job.points / "plan")
    assert job.wait(seconds, lambda: len(job.fired()) > count), f"{plan}\n{job.tail()}"
    if len(job.fired()) == count:
        return None
    found = job.fired()[-1]
    assert job.wait(seconds, lambda: job.is_noticed() or job.restarts() > restarts), f"{plan}\n{job.tail()}"
    found["noticed"] = time.monotonic() - found["time"]
    assert job.wait(seconds, lambda: job.restarts() > restarts), f"{plan}\n{job.tail()}"
    return found | {"ended": time.monotonic() - found["time"]}


def check(job, calm):
    """Raise AssertionError unless the job is done, as the calm one, and nothing of it is left."""
    assert job.wait(300), "the job doesn't end"
    assert job.process.returncode == 0, job.tail()
    left = job.processes()
    assert not left, left
    assert str(job.port) not in {str(each.laddr.port) for each in psutil.net_connections() if each.status == "LISTEN"}
    told = [[(row["step"], row["loss"], row["gradient_norm"]) for row in each] for each in (job.rows(), calm)]
    assert told[0] == told[1], [pair for pair in zip(*told) if pair[0] != pair[1]][:3]


def trials(folder, count, seed, say=print, kind=Job, ranks=4, of_a_job=25):
    """Run so many trials with jobs of a kind, and yield a dict for each, its `trials`, `events` and `rows`.

    A job has `of_a_job` of them at most; every second one saves beside training. Errors as of `check`.
    """
    rng, done, is_async = random.Random(seed), 0, False
    job = kind(folder / "calm", ranks)
    try:
        calm = job.calm_rows(ranks)
        assert len(calm) == STEPS, job.tail()
        while done < count:
            found = []
            job = kind(folder / "job", ranks, f"checkpoint.async_save={is_async}")
            while done < count and len(found) < of_a_job and job.process.poll() is None:
                after = job.rows()[-1]["step"] if job.rows() else 0
                has_saved = any((job.run / "checkpoint").glob("step_*[0-9]"))
                if trial := disturb(job, draw(rng, ranks, is_async, after, has_saved)):
                    found.append(trial)
                    done += 1
                    say(
                        f"{done}: {signal.Signals(trial['signal']).name} at {trial['target']} of rank {trial['rank']}, "
                        f"{trial['phase']}, after step {trial['step']}; noticed after {trial['noticed']:.1f} s, "
                        f"all have ended after {trial['ended']:.1f} s",
                        flush=True,
                    )
            check(job, calm)
            say(f"done after {job.restarts()} restarts; bit by bit the calm run", flush=True)
            yield {"async": is_async, "trials": found, "events": job.events(), "rows": job.rows()}
            shutil.rmtree(folder / "job")
            is_async = not is_async
    finally:
        job.end()


def main():
    """Run the trials that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stand_in", action="store_true", help="ranks without MindSpore, which start at once")
    parser.add_argument("--record", type=Path, help="a file that gets a line of JSON for each job")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trials_") as folder:
        for job in trials(Path(folder), args.count, args.seed, kind=StandIn if args.stand_in else Job):
            if args.record:
                with args.record.open("a") as file:
                    file.write(json.dumps(job) + "\n")


if __name__ == "__main__":
    sys.exit(main())
