"""Trials of recovery: a job whose processes are killed, stopped and asked to leave, at random times, until it is done.

    .venv/bin/python tests/trials.py 60 --seed 1

Every job of 4 ranks (dp 2 x tp 2) is disturbed about ten times, half of the jobs save beside training. Then its losses
have to be those of a job that nobody disturbs, bit by bit, and nothing of it may be left. A line tells each trial.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml
from support.launch import ROOT, free_port

SIGNALS = {signal.SIGKILL: 5, signal.SIGTERM: 3, signal.SIGSTOP: 2}  # of so many of all trials
PHASES = {"step": 5, "saving": 3, "starting": 2}
STEPS, OF_A_JOB = 60, 10
RECIPE = {
    "training": {"steps": STEPS, "local_batch_size": 2, "global_batch_size": 8},
    "parallelism": {"data_parallel_shard": 2, "tensor_parallel": 2, "zero_level": 1, "zero_threshold_kb": 0},
    "optimizer": {"type": "AdamW"},
    "lr_scheduler": {"type": "CosineWithWarmUpLR", "learning_rate": 1e-3, "warmup_steps": 2},
    "train_dataset": {"seq_length": 32, "max_bytes": 200000},
    "model": {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32,
    },
    "checkpoint": {"enable_save": True, "save_interleaved_steps": 2, "keep_last": 3},
    "monitor": {"log_interval": 1, "plot": False},
    "context": {"communication_timeout": 4},
}  # fmt: skip


class Job:
    """A job of the recipe in a folder, under the supervisor.

    Args:
        folder: of everything that it writes.
        ranks: their number.
        overrides: of the recipe; `variables`: of the environment.
    """

    def __init__(self, folder, ranks, *overrides, **variables):
        self.run, self.port = folder / "run", free_port()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
        words = ["-m", "mindformers_core", "train", "--config", str(folder / "recipe.yaml")]
        words += [f"training.output_dir={self.run}", *overrides]
        place = ["127.0.0.1", self.port, 0, folder / "log", "True", 60]
        command = ["bash", ROOT / "scripts/msrun_launch.sh", " ".join(words), ranks, ranks, *place]
        self.told, self.output = folder / "log" / "supervisor", folder / "output.txt"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3", "RESTARTS": "1000", "BACKOFF": "0"}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*map(str, command)], stdout=output, stderr=output, cwd=folder, env=environment | variables
            )

    def rows(self):
        """The rows of the run's metrics that are whole."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

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

    def is_saving(self):
        """Whether a checkpoint is being written just now."""
        return any((self.run / "checkpoint").glob("*.incomplete"))

    def end(self):
        """Kill what is left."""
        for process in [self.process, *self.processes().values()]:
            process.kill()
        self.process.wait()

    def wait(self, seconds, until=lambda: False):
        """Wait for the end of the job, or until something holds. Returns whether one of the two has come."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and not until():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


def disturb(job, rng, seconds=240):
    """One trial: wait for some steps, for the phase, and send a signal. Returns a line about it, None at the end."""
    number, phase, target = (rng.choices([*each], [*each.values()])[0] for each in (SIGNALS, PHASES, TARGETS))
    wanted = len(job.rows()) + rng.randint(1, 3) if phase != "starting" else 0
    assert job.wait(seconds, lambda: len(job.rows()) >= wanted and target in job.processes()), job.output.read_text()[
        -3000:
    ]
    if phase == "saving":
        job.wait(seconds, job.is_saving)
    time.sleep(rng.random() * {"step": 0.4, "saving": 0.02, "starting": 12.0}[phase])
    process, step = job.processes().get(target), len(job.rows())
    if job.process.poll() is not None:
        return None
    if process is None:  # it has ended meanwhile
        return disturb(job, rng)
    process.send_signal(number)
    return f"{signal.Signals(number).name} at {target}, {phase}, after step {step}"


TARGETS = {"rank 0": 2, "rank 1": 2, "rank 2": 2, "rank 3": 2, "scheduler": 1}


def check(job, calm):
    """Raise AssertionError unless the job is done, as the calm one, and nothing of it is left."""
    assert job.wait(300), "the job doesn't end"
    assert job.process.returncode == 0, job.output.read_text()[-3000:]
    left = job.processes()
    assert not left, left
    assert str(job.port) not in {str(each.laddr.port) for each in psutil.net_connections() if each.status == "LISTEN"}
    told = [[(row["step"], row["loss"], row["gradient_norm"]) for row in each] for each in (job.rows(), calm)]
    assert told[0] == told[1], [pair for pair in zip(*told) if pair[0] != pair[1]][:3]


def trials(folder, count, seed, say=print):
    """Run so many trials; the number of those that were. Errors as of `check`."""
    rng, done, calm = random.Random(seed), 0, None
    job = Job(folder / "calm", 4)
    try:
        assert job.wait(300)
        calm = job.rows()
        assert len(calm) == STEPS, job.output.read_text()[-3000:]
        while done < count:
            job = Job(folder / "job", 4, f"checkpoint.async_save={rng.random() < 0.5}")
            begun, before = time.monotonic(), done
            while done < min(count, before + OF_A_JOB) and (line := disturb(job, rng)) is not None:
                done += 1
                say(f"{done}: {line}", flush=True)
            check(job, calm)
            text = job.output.read_text()
            restarts = text.count("supervisor: exit code")
            say(
                f"done after {restarts} restarts, {time.monotonic() - begun:.0f} s; bit by bit the calm run", flush=True
            )
            shutil.rmtree(folder / "job")
    finally:
        job.end()
    return done


def main():
    """Run the trials that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trials_") as folder:
        trials(Path(folder), args.count, args.seed)


if __name__ == "__main__":
    sys.exit(main())
