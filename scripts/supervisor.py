"""Runs a launch, and where it ends by a death starts it again: on the same ranks, or on as many as there are.

Both launch scripts call this where `RESTARTS` is set; docs/recovery.md has all variables. Nothing is read from logs:
processes tell the step that they are in, and the error that ends them (`mindformers_core.supervised`).
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np
from processes import become_subreaper, end_with_parent, kill_children

from mindformers_core.files import lock_folder
from mindformers_core.recipe.fitting import fitting_ranks
from mindformers_core.supervised import FOLDER, FOR_OTHERS, MEMORY

POLL_SECONDS = 0.2
LONGEST_PAUSE = 60  # seconds
SHARED, PREFIX = Path("/dev/shm"), "mindformers."
FROM_OUTSIDE = {128 + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
TRAIN = ["-m", "mindformers_core", "train"]
SETTINGS = {"RESTARTS": 0, "MIN_WORKERS": None, "REJOIN_TIMEOUT": 600, "BACKOFF": 1, "TIME_LIMIT": None}  # defaults


def main():
    """Read arguments and variables, and supervise; the exit code is that of the last launch."""
    parser = argparse.ArgumentParser(prog="supervisor.py", description=__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--log_dir", type=Path, required=True)
    launch, command = (sys.argv.index(word) for word in ("--launch", "--command"))
    args = parser.parse_args(sys.argv[1:launch])
    try:
        settings = read_settings(os.environ, args.workers)
    except ValueError as error:
        parser.exit(2, f"supervisor: {error}\n")
    become_subreaper()
    supervisor = Supervisor(
        args.workers, args.log_dir, sys.argv[launch + 1 : command], sys.argv[command + 1 :], settings
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, supervisor.hear)
    with held_memory() as folder:
        os.environ[MEMORY] = folder
        sys.exit(supervisor.run())


def read_settings(environ, workers):
    """`SETTINGS` from the environment: a dict, in lower case.

    Raises:
        ValueError: one is no whole number from 0 up, more workers are asked for than there are, or as of `slots`.
    """
    found = {}
    for name, default in SETTINGS.items():
        text = environ.get(name, "")
        if text and not text.isdecimal():
            raise ValueError(f"{name}={text!r}: give a whole number from 0 up")
        found[name.lower()] = int(text) if text else default
    least = found["min_workers"] = found["min_workers"] or workers
    if least > workers:
        raise ValueError(f"MIN_WORKERS={least}, but there are {workers} workers: give at most {workers}")
    slots(environ, workers)
    return found


def slots(environ, workers):
    """The processes, numbers from 0, that `EXCLUDE` doesn't say not to use: it names a file with them, or has them.

    Raises:
        ValueError: a word is no number of a process.
    """
    text = given = environ.get("EXCLUDE", "")
    if os.path.isfile(given):
        text = Path(given).read_text()
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isdecimal() or int(word) >= workers:
            raise ValueError(
                f"EXCLUDE={given!r}: {word!r} is no process: give numbers from 0 to {workers - 1}, or a file"
            )
    return sorted({*range(workers)}.difference(map(int, words)))


@contextmanager
def held_memory():
    """The path of a new folder of memory that outlives the processes of a job; it is removed at the end of the block.

    Those of processes that were killed, which hold no lock any more, are removed, too.
    """
    for left in SHARED.glob(f"{PREFIX}*"):
        with suppress(OSError), lock_folder(left):
            shutil.rmtree(left)
    made = tempfile.mkdtemp(prefix=f".{PREFIX}", dir=SHARED)
    with lock_folder(made):  # before it has the name that others look for
        folder = os.path.join(SHARED, os.path.basename(made).removeprefix("."))
        os.rename(made, folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Supervisor:
    """Starts of one job.

    Args:
        workers: number of processes that the job is meant for.
        log_dir: folder of the launch; what processes tell lies in its folder `supervisor`.
        launch: the launcher's command, in which `{workers}` stands for their number.
        command: of the job, which follows it.
        settings: as of `read_settings`.
    """

    def __init__(self, workers, log_dir, launch, command, settings):
        self.workers, self.folder, self.launch = workers, (log_dir / "supervisor").resolve(), launch
        self.command, self.settings = command, settings
        self.child, self.signal = None, None  # the launch that runs; the signal that ends this process
        self.seen, self.goes_on = set(), False  # errors of starts before; whether the job has its run folder
        self.there, self.looked, self.wrong = [*range(workers)], None, None  # slots; those seen before; what was said
        self.trains, self.sizes = command[: len(TRAIN)] == TRAIN, cache(self._sizes)

    def hear(self, number, frame):
        """A signal that ends this process: the launch gets it; the second one, as Ctrl-C, ends the launch at once."""
        if self.signal and self.child:
            self.child.send_signal(signal.SIGINT)
        self.signal = self.signal or number

    def run(self):
        """Start the job until it is done, or can't go on. Returns the exit code for the shell."""
        settings, begun, pause = self.settings, time.monotonic(), self.settings["backoff"]
        restarts, code = 0, 1
        while True:
            ranks, overrides = self._fitting()
            if ranks is None:
                return code
            code, leaves = self._start(ranks, overrides, restarts)
            told = Told(self.folder)
            self.goes_on = self.goes_on or told.run is not None
            if self.signal or code == 0:
                return code
            end = self._reason_to_end(code, told, restarts == 0)
            if leaves and code == FOR_OTHERS:
                say("goes on with other workers")
                continue
            if end is None and restarts == settings["restarts"]:
                end = f"the {restarts} restarts of RESTARTS are used up"
            if end is None and settings["time_limit"] and time.monotonic() - begun > settings["time_limit"]:
                end = f"the {settings['time_limit']} s of TIME_LIMIT are over"
            if end is not None:
                say(end)
                return code
            restarts += 1
            pause = settings["backoff"] if told.done else min(2 * pause, LONGEST_PAUSE)
            say(f"exit code {code}: restart {restarts} of {settings['restarts']} in {pause} s")
            self._wait(pause)
            if self.signal:
                return code

    def _reason_to_end(self, code, told, is_first):
        """Why another start would end alike, a text; None: it may not."""
        if code in FROM_OUTSIDE:
            return None
        own = {(step, error) for step, error, theirs in told.ends if theirs != FOR_OTHERS}
        errors = own or {(step, error) for step, error, _ in told.ends} or {(told.step, f"exit code {code}")}
        if code == FOR_OTHERS and not told.ends:  # as a signal asked
            return None
        again = sorted(errors & self.seen)
        self.seen |= errors
        if again:
            return f"the same error twice, at step {again[0][0]}: {again[0][1]}"
        if is_first and (told.has_steps or self.trains) and not told.done and code < 128 and code != FOR_OTHERS:
            return "it has ended before its first step was done"
        return None

    def _fitting(self):
        """`(ranks, overrides)` of the next start, waiting for workers; `(None, None)` where none can be."""
        least, end = self.settings["min_workers"], time.monotonic() + self.settings["rejoin_timeout"]
        while len(there := self._slots()) < least:
            if self.signal or time.monotonic() > end:
                say(f"{len(there)} of {self.workers} workers are there, fewer than MIN_WORKERS={least}")
                return None, None
            self._wait(POLL_SECONDS)
        return self.sizes(len(there))

    def _slots(self):
        """As `slots`; those of before while the file of `EXCLUDE` has another word in it, which is told once."""
        try:
            self.there, self.wrong = slots(os.environ, self.workers), None
        except (ValueError, OSError) as error:
            if self.wrong != str(error):
                self.wrong = str(error)
                say(self.wrong)
        return self.there

    def _sizes(self, available):
        """`(ranks, overrides)` of a start on so many slots; `(None, None)` where none can be, which is told."""
        if not self.trains or available == self.workers:
            return available, []
        parser = argparse.ArgumentParser()
        parser.add_argument("--config")
        known, rest = parser.parse_known_args(self.command[len(TRAIN) :])
        given = known.config, [text for text in rest if not text.startswith("-")], self.workers
        try:
            return fitting_ranks(*given, available, self.settings["min_workers"])
        except (ValueError, OSError) as error:
            say(str(error))
            return None, None

    def _start(self, ranks, overrides, restarts):
        """Run a launch to its end: its exit code, and whether it was asked to leave, since other workers are there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        words = [*self.command, *overrides, *["training.resume=auto"] * (self.goes_on and self.trains)]
        told = {FOLDER: self.folder, "MINDFORMERS_RESTART": restarts, "MINDFORMERS_WORKERS": self.workers}
        if ranks < self.workers:
            devices = ",".join(map(str, self.there[:ranks]))
            told |= {"ASCEND_RT_VISIBLE_DEVICES": devices, "CUDA_VISIBLE_DEVICES": devices}
        return self._launch(ranks, words, {name: str(value) for name, value in told.items()})

    def _launch(self, ranks, words, told):
        command = [word.replace("{workers}", str(ranks)) for word in self.launch]
        self.child = subprocess.Popen(
            [*command, *words], env={**os.environ, **told}, start_new_session=True, preexec_fn=end_with_parent
        )
        is_told = leaves = False
        while self.child.poll() is None:
            time.sleep(POLL_SECONDS)
            leaves = leaves or self._prefers_others(ranks)
            if not is_told and (self.signal or leaves):
                is_told = True
                self.child.send_signal(signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM)
        kill_children(os.getpid())
        code, self.child = self.child.returncode, None
        return 128 - code if code < 0 else code, leaves

    def _prefers_others(self, ranks):
        """Whether the job, which saves when it is asked to leave, can go on with another number of ranks."""
        before, self.looked = self.looked, self._slots()
        available = len(self.looked)
        if self.looked != before or available == ranks or available < self.settings["min_workers"]:
            return False
        told = Told(self.folder)
        return bool(told.run and told.run["saves"] and told.done) and self.sizes(available)[0] not in (None, ranks)

    def _wait(self, seconds):
        end = time.monotonic() + seconds
        while not self.signal and time.monotonic() < end:
            time.sleep(min(POLL_SECONDS, seconds))


class Told:
    """What the processes of a launch have told.

    Attributes:
        run: a dict about the job, or None where no run has begun.
        done, step: the most steps that a process has done, and the last one that one was in.
        ends: `(step, error, exit code)` of processes that ended by an error.
        has_steps: whether any process tells its steps.
    """

    def __init__(self, folder):
        steps = {path.suffix: [*np.fromfile(path, np.int64).tolist(), 0, 0][:2] for path in folder.glob("steps.*")}
        self.run = next((json.loads(path.read_text()) for path in folder.glob("run.json")), None)
        self.step, self.done = (max((each[place] for each in steps.values()), default=0) for place in (0, 1))
        self.has_steps, self.ends = bool(steps), []
        for path in folder.glob("end.*.json"):
            facts = json.loads(path.read_text())
            self.ends.append((steps.get(Path(path.stem).suffix, (0, 0))[0], facts["error"], facts["code"]))


def say(text):
    """A line about the supervision."""
    print(f"supervisor: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
