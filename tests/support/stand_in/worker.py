"""A rank of a job without MindSpore, of the package's own watcher, checkpoints and supervision: worker.py RUN POINTS.

Its model is a table of which each rank has rows, as many as ranks at first; ranks exchange what they have through
files of the first machine.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
from support.trial_points import Points

from mindformers_core import supervised
from mindformers_core.checkpoint.background import BackgroundSave
from mindformers_core.checkpoint.folders import newest_checkpoint, prune, step_folder
from mindformers_core.checkpoint.load import load, open_checkpoint
from mindformers_core.checkpoint.parts import Part, Ranks, on_all_ranks
from mindformers_core.checkpoint.save import save
from mindformers_core.checkpoint.slices import FileLayer
from mindformers_core.hangs.watcher import Watch

COLUMNS = 16
EVERY = {False: 2, True: 10}  # steps between saves; one beside training starts a process for each rank


def drawn(rows):
    """Some rows of the state at first."""
    return np.arange(COLUMNS) + 10.0 * np.array(rows)[:, None]


def measured(state, part):
    """What each row adds to the sum of a part of a step."""
    return [float(np.sin(row * (1 + part)).sum()) for row in state]


def updated(state, sums):
    """The state of a rank after a step."""
    return state + 0.1 * np.cos(state + sums[0] + sums[-1])


def calm_rows(size, steps):
    """The metrics of a job that nobody disturbs, of so many rows."""
    state = drawn(range(size))
    for step in range(1, steps + 1):
        sums = [sum(measured(state, part)) for part in range(3)]
        state = updated(state, sums)
        yield {"step": step, "loss": sums[0], "gradient_norm": sums[-1]}


def await_others():
    """What the scheduler does."""
    while any(each.status() != "zombie" for each in psutil.Process().parent().children() if each.pid != os.getpid()):
        time.sleep(0.2)


class Worker:
    """One rank, its `state`, some rows, and what it exchanges."""

    def __init__(self, run, points, is_async):
        self.rank, self.size = int(os.environ["RANK_ID"]), int(os.environ["MS_WORKER_NUM"])
        self.run, self.points, self.count, self.step = Path(run), Points(Path(points)), 0, 0
        self.folder = Path(os.environ[supervised.FOLDER]).with_suffix(".0")
        self.watch = Watch(f"stand_in.{os.getppid()}", self.rank, self.size, 1.5, False)
        self.ranks, self.told = Ranks(self.rank, self.gather), supervised.step_counter()
        whole = int(os.environ["MINDFORMERS_WORKERS"])
        box = tuple(rank * whole // self.size for rank in (self.rank, self.rank + 1))
        self.state, self.background, self.every = drawn(range(*box)), None, EVERY[is_async]
        self.part = Part("model", "table", "float64", (whole, COLUMNS), (box, (0, COLUMNS)))
        if is_async:
            self.background = BackgroundSave(self.ranks)

    def gather(self, value):
        """The values of all ranks, which they give as files."""
        self.count += 1
        own, paths = self.path(self.rank), {rank: self.path(rank) for rank in range(self.size)}
        own.with_suffix(".new").write_text(json.dumps(value))
        os.rename(own.with_suffix(".new"), own)
        with self.watch.recorder.issue("all_gather", ("dp",), tuple(paths), (1,), "float64", ""):
            while not all(path.exists() for path in paths.values()):
                time.sleep(0.005)
        return {rank: json.loads(path.read_text()) for rank, path in paths.items()}

    def path(self, rank):
        """The file of a rank in this exchange."""
        return self.folder / f"gathered.{self.count}.{rank}.json"

    def hear(self, *_):
        """SIGTERM."""
        self.watch.board.ask_to_leave(self.rank)

    def load(self):
        """From the newest checkpoint, if there is one; the rows of later steps are deleted."""
        folder = on_all_ranks(self.ranks, lambda: newest_checkpoint(self.run))[0]
        if folder is not None:
            self.points.passed("loading")
            checkpoint = open_checkpoint(folder)
            load(checkpoint, [self.part], self.fill, self.ranks)
            self.step = checkpoint.state["step"]
        rows = self.run / "metrics.jsonl"
        if self.rank == 0:
            lines = rows.read_text().splitlines(keepends=True) if rows.exists() else []
            rows.write_text("".join(line for line in lines if json.loads(line)["step"] <= self.step))

    def fill(self, _, array):
        """What is loaded."""
        self.state = array.view(np.float64).copy()

    def train(self):
        """A step: every number depends on all ranks, and on the numbers before."""
        self.points.steps, self.told[0] = self.step, self.step + 1
        self.points.read()
        sums = []
        for part, phase in enumerate(("forward", "between micro-steps", "backward")):
            self.points.passed(phase)
            sums.append(sum(sum(self.gather(measured(self.state, part)).values(), [])))
        self.points.passed("update")
        if self.background is not None:
            self.background.await_copies()
        self.state = updated(self.state, sums)
        self.step, self.told[1] = self.step + 1, self.told[1] + 1
        self.points.steps = self.step
        self.points.event("step")
        if self.rank == 0:
            with (self.run / "metrics.jsonl").open("a") as rows:
                rows.write(json.dumps({"step": self.step, "loss": sums[0], "gradient_norm": sums[-1]}) + "\n")

    def save(self, settles):
        """Save, beside training or not."""
        folder, document = step_folder(str(self.run), self.step), json.dumps({"format": 1, "step": self.step})
        given = folder, [self.part], lambda _: self.state, {"state.json": document.encode()}
        if self.background is not None:
            self.background.settle()
            self.background.start(*given, (2, 0))
            self.points.passed("saving beside training")
            if settles:
                self.background.settle()
        else:
            save(*given, self.ranks, files=self.points.files(FileLayer))
            on_all_ranks(self.ranks, lambda: prune(folder, 2) if self.rank == 0 else None)
        self.points.event("save")

    def work(self, steps, local):
        """All steps, with checkpoints; a machine has `local` ranks."""
        signal.signal(signal.SIGTERM, self.hear)
        self.points.read()
        self.points.passed("starting")
        self.run.mkdir(exist_ok=True)
        if self.size <= local:
            self.watch.await_ranks("")
        self.load()
        self.told[2] = 2
        while self.step < steps:
            self.train()
            leaves = self.watch.board.leave_after(self.rank, self.step)
            leaves = any(self.gather(leaves).values()) and self.step < steps  # of any machine
            if leaves or self.step % self.every == 0 or self.step == steps:
                self.save(leaves or self.step == steps)
            if leaves:
                self.gather(None)
                sys.exit(supervised.FOR_OTHERS)
        self.gather(None)
        if self.background is not None:
            self.background.close()


if __name__ == "__main__":
    run, points, steps, is_async, local = sys.argv[1:]
    if os.environ["MS_ROLE"] == "MS_SCHED":
        await_others()
    else:
        Worker(run, points, is_async == "True").work(int(steps), int(local))
