"""Places of a job at which a trial sends a signal: a recipe's dataset, which sets them up in the ranks that open it.

The file `plan` of a folder is one trial, a JSON object: `phase`, one of PHASES; `rank`, whose process comes to the
place; `after`, a number of steps to be done before; `passes`, how often it has to come there; `delay`, seconds from
there to the signal, beside what the rank does; `target`, "rank", "writer" (that saves beside training) or "scheduler";
`signal`. Whoever takes the file sends the signal, and writes it into `fired`; rank 0 writes what the job does into
`events`, as of `job_events`. Times are monotonic.
"""

import json
import os
import threading
import time
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path

import numpy as np
import psutil

PHASES = (
    "starting", "loading", "forward", "backward", "between micro-steps", "update", "saving", "saving beside training",
)  # fmt: skip


class Samples:
    """Token ids and the next ones, each sample a function of its number."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        if str(index) == os.environ.get("BAD_SAMPLE"):
            raise KeyError("a bad sample")
        tokens = np.random.default_rng(index).integers(0, 250, 2)
        row = (tokens[0] + np.arange(33) * (1 + tokens[1] % 5)) % 251
        return row[:-1].astype(np.int32), row[1:].astype(np.int32)


def samples(section, *_):
    """The dataset; `section.options` has the folder, `points`, or nothing."""
    if folder := section.options.get("points"):
        set_up(folder)
    return Samples()


@cache
def set_up(folder):
    """Once a process."""
    Points(Path(folder)).set_up()


class Points:
    """The places in this process; `passed` is told by each."""

    def __init__(self, folder):
        self.folder, self.rank = folder, int(os.environ["RANK_ID"])
        self.plan, self.steps, self.passes, self.where = None, 0, 0, None

    def read(self):
        """Look for a trial of this rank."""
        with suppress(FileNotFoundError):
            plan = json.loads((self.folder / "plan").read_text())
            if plan["rank"] == self.rank and plan != self.plan:
                self.plan, self.passes = plan, 0

    def passed(self, phase):
        """This rank is at a place."""
        plan = self.plan
        if plan is None or plan["phase"] != phase or self.steps < plan["after"]:
            return
        self.passes += 1
        if self.passes > plan["passes"]:
            self.plan = None
            with suppress(FileNotFoundError):
                os.unlink(self.folder / "plan")
                if plan["delay"]:
                    threading.Timer(plan["delay"], self.fire, (plan,)).start()
                else:
                    self.fire(plan)

    def fire(self, plan):
        """Send the signal."""
        self.tell("fired", plan | {"time": time.monotonic(), "step": self.steps})
        os.kill(self.process(plan["target"]), plan["signal"])

    def process(self, target):
        """The number of a process."""
        end = time.monotonic() + 5
        while target == "writer" and time.monotonic() < end:
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    if "mindformers_core.checkpoint.writer" in child.cmdline():
                        return child.pid
        for process in psutil.Process().parent().children() if target == "scheduler" else ():
            with suppress(psutil.Error):
                if process.environ().get("MS_ROLE") == "MS_SCHED":
                    return process.pid
        return os.getpid()

    def tell(self, file, what):
        """Add a line."""
        with (self.folder / file).open("a") as lines:
            lines.write(json.dumps(what) + "\n")

    def event(self, what):
        """Rank 0 tells what the job has done."""
        if self.rank == 0:
            self.tell("events", (time.monotonic(), what, self.steps))

    def files(self, layer):
        """A `FileLayer` of which each call that changes the disk is a place."""

        class Files(layer):
            """It."""

        for name in ("open", "write", "sync", "rename"):
            self.before(Files, name, lambda *_: self.passed("saving"))
        return Files()

    def set_up(self):
        """Put the places into the package's functions."""
        from mindformers_core.checkpoint import background, checkpointer, slices
        from mindformers_core.hangs.recorder import Recorder
        from mindformers_core.trainer import memory, passes, trainer

        points = self

        def issued(_, *arguments):
            is_backward = points.where == "forward" and len(arguments) > 6 and arguments[6] is not None
            points.where = "backward" if is_backward else points.where
            points.passed(points.where)

        def begun(job, *_):
            points.read()
            points.steps, points.where, points.runs = job.step, "forward", job.plan.runs
            points.began = time.monotonic()

        def ran(*_):
            if os.environ.get("SLOW_RANK") == str(self.rank):  # twice as slow as others, on any machine
                time.sleep(max(0.3, time.monotonic() - points.began))
            points.runs -= 1
            points.where = "forward" if points.runs else "update"
            if points.runs:
                points.passed("between micro-steps")

        def stepped(job, *_):
            points.steps, points.where = job.step, None
            points.event("step")

        self.before(Recorder, "issue", issued)
        self.before(trainer.Trainer, "train_step", begun, stepped)
        self.before(passes, "_several", ran)
        self.before(checkpointer.Checkpointer, "await_copies", lambda *_: points.passed("update"))
        self.before(memory, "resume", lambda *_: points.passed("loading"))
        self.before(trainer, "save_job", after=lambda *_: points.event("save"))
        self.before(background.BackgroundSave, "start", after=lambda *_: points.passed("saving beside training"))
        save = checkpointer.save
        checkpointer.save = lambda *given: save(*given, files=points.files(slices.FileLayer))
        self.read()
        self.passed("starting")

    def before(self, owner, name, call=lambda *_: None, after=lambda *_: None):
        """Let a function be called before another one, and one after it."""
        function = getattr(owner, name)

        @wraps(function)
        def both(*arguments, **keywords):
            call(*arguments)
            result = function(*arguments, **keywords)
            after(*arguments)
            return result

        setattr(owner, name, both)
