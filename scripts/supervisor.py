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
from socket import gethostname
from types import SimpleNamespace

import numpy as np
from machines import Machines, end_of_job, free_machines, is_awaited
from processes import become_subreaper, end_with_parent, kill_children

from mindformers_core.files import lock_folder
from mindformers_core.recipe.fitting import fitting_ranks
from mindformers_core.supervised import DEFECT, FOLDER, FOR_OTHERS, MEMORY, USER

POLL_SECONDS = 0.2
LONGEST_PAUSE = 60  # seconds
SHARED, PREFIX = Path("/dev/shm"), "mindformers."
FROM_OUTSIDE = {128 + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
DEVICES = "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
TRAIN = ["-m", "mindformers_core", "train"]
SETTINGS = {"RESTARTS": 0, "MIN_WORKERS": 0, "REJOIN_TIMEOUT": 600, "BACKOFF": 1, "TIME_LIMIT": 0}


def main():
    """Supervise a launch, whose words follow `--launch` and `--command`; the exit code is that of the last one."""
    parser = argparse.ArgumentParser(prog="supervisor.py", description=__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--local_workers", type=int)
    parser.add_argument("--machine", type=int, default=0)
    parser.add_argument("--log_dir", type=Path, required=True)
    launch, command = (sys.argv.index(word) for word in ("--launch", "--command"))
    args = parser.parse_args(sys.argv[1:launch])
    try:
        settings = read_settings(os.environ, args.workers)
    except ValueError as error:
        parser.exit(2, f"supervisor: {error}\n")
    become_subreaper()
    local = args.local_workers or args.workers
    count = args.workers // local if local > 0 == args.workers % local else 1  # wrong ones are the launch's to tell
    machines = Machines(args.log_dir / "machines", args.machine, count)
    given = args.workers, args.log_dir, sys.argv[launch + 1 : command], sys.argv[command + 1 :], settings, machines
    supervisor = Supervisor(*given)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, supervisor.hear)
    with held_memory() as os.environ[MEMORY]:
        sys.exit(supervisor.run())


def read_settings(environ, workers):
    """`SETTINGS` from the environment, as attributes in lower case.

    Raises:
        ValueError: one is no whole number from 0 up, more workers are asked for than there are, or as of `slots`.
    """
    texts = {name: text for name in SETTINGS if (text := environ.get(name))}
    for name, text in texts.items():
        if not text.isdecimal():
            raise ValueError(f"{name}={text!r}: give a whole number from 0 up")
    found = SimpleNamespace(**{name.lower(): int(texts.get(name, default)) for name, default in SETTINGS.items()})
    found.min_workers = found.min_workers or workers
    if found.min_workers > workers:
        raise ValueError(f"MIN_WORKERS={found.min_workers}, but there are {workers} workers: give at most {workers}")
    slots(environ, workers)
    return found


def slots(environ, workers):
    """The processes, numbers from 0, that `EXCLUDE` doesn't say not to use: it names a file with them, or has them.

    Raises:
        ValueError: a word is no number of a process.
    """
    given = environ.get("EXCLUDE", "")
    text = Path(given).read_text() if os.path.isfile(given) else given
    words = text.replace(",", " ").split()
    if odd := [word for word in words if not word.isdecimal() or int(word) >= workers]:
        hint = f"give numbers from 0 to {workers - 1}, or a file"
        raise ValueError(f"EXCLUDE={given!r}: {odd[0]!r} is no process: {hint}")
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
    """Starts of one job, which is meant for so many `workers`: of its `command`, by the command `launch`, in which
    `{workers}` and `{machine}` stand for their number, and for the place of this one of the `machines` in a start. What
    processes tell lies in a folder of `log_dir`, which machines share.
    """

    def __init__(self, workers, log_dir, launch, command, settings, machines):
        self.workers, self.launch, self.machines = workers, launch, machines
        self.local = workers // machines.count if machines.count > 1 else 1  # workers come and go by so many
        self.folder = (log_dir / f"supervisor.{gethostname()}.{machines.own}").resolve()
        self.command, self.settings, self.trains = command, settings, command[: len(TRAIN)] == TRAIN
        self.child, self.signal = None, None  # the launch that runs; the signal that ends this process
        self.seen, self.goes_on = set(), False  # errors of starts before; whether the job has its run folder
        self.there, self.sizes, self.say_once = [*range(workers)], cache(self._sizes), cache(say)

    def hear(self, number, frame):
        """A signal that ends this process: the launch gets it; the second one, as Ctrl-C, ends the launch at once."""
        if self.signal and self.child:
            self.child.send_signal(signal.SIGINT)
        self.signal = self.signal or number

    def run(self):
        """Start the job until it is done, or can't go on. Returns the exit code for the shell."""
        begun, pause, restarts, code = time.monotonic(), self.settings.backoff, 0, 1
        while not self.signal and (start := self._next(restarts)):
            code, leaves = self._start(start)
            told, restarts = told_in(self.folder), start["restarts"]
            self.goes_on = self.goes_on or told.run > 0
            if self.signal or code == 0:
                break
            if leaves and code == FOR_OTHERS:
                say("goes on with other workers")
                continue
            if end := self._reason_to_end(code, told, restarts, time.monotonic() - begun):
                say(end)
                break
            restarts += 1
            pause = self.settings.backoff if told.done else min(2 * pause, LONGEST_PAUSE)
            say(f"exit code {code}: restart {restarts} of {self.settings.restarts} in {pause} s")
            self._wait(pause)
        if self.signal or (start is None and self.machines.own):
            self.machines.forget()  # the job may go on
        else:
            self.machines.sign(end=code)
        return code

    def _reason_to_end(self, code, told, restarts, seconds):
        """Why there is no other start after so many restarts and seconds, a text; None where there is one."""
        self.seen = {each for each in self.seen if each[0] >= told.step}  # not those of steps that were passed since
        if code not in FROM_OUTSIDE and (told.ends or code != FOR_OTHERS):  # with 75 alone it leaves, as a signal asked
            own = {(step, error) for step, error, theirs in told.ends if theirs != FOR_OTHERS}
            errors = own or {end[:2] for end in told.ends} or {(told.step, f"exit code {code}")}
            again, self.seen = sorted(errors & self.seen), self.seen | errors
            if again:
                return f"the same error twice, at step {again[0][0]}: {again[0][1]}"
            if restarts == 0 and code in (USER, DEFECT) and not told.done:
                return "it has ended before its first step was done"
        if restarts == self.settings.restarts and self.machines.own == 0:  # which knows why the others have ended
            return f"the {restarts} restarts of RESTARTS are used up"
        limit = self.settings.time_limit
        return f"the {limit} s of TIME_LIMIT are over" if limit and seconds > limit else None

    def _next(self, restarts):
        """The next start, waiting for workers: a dict of its `number`, `machines`, number of `workers`, more `words` of
        the command, and `restarts`, which the first machine says; None where there can be none.
        """
        machines, end = self.machines, time.monotonic() + self.settings.rejoin_timeout
        while not self.signal:
            signs = machines.signs()
            if is_awaited(signs, machines.own, machines.number):
                end = time.monotonic() + self.settings.rejoin_timeout
            is_over = time.monotonic() > end
            if other := end_of_job(signs, machines.begun):
                return say("machine {} has ended the job with exit code {}".format(*other))
            if machines.own == 0:
                start, lack = self._planned(restarts, is_over)
            else:
                start, lack = machines.start(), f"machine 0 gives no sign in {machines.folder}, which all have to see"
                if machines.own not in start["machines"]:  # it is of others
                    machines.leave(start["number"])
            if start and start["number"] > machines.number:
                return start
            if is_over or not lack:
                return lack and say(lack)
            self._wait(POLL_SECONDS)
        return None

    def _planned(self, restarts, is_over):
        """`(start, lack)`: as of `_next`, or None and what it lacks yet; None where it is told that there can be none.

        Machines that aren't there are waited for, until the time is over.
        """
        there, least = self._slots(), self.settings.min_workers
        if len(there) < (least if is_over or self.machines.count == 1 else self.workers):
            return None, f"{len(there)} of {self.workers} workers are there, fewer than MIN_WORKERS={least}"
        if (sizes := self.sizes(len(there))) is None:
            return None, None
        ranks, words = sizes
        members = [slot // self.local for slot in there[: ranks : self.local]] if self.machines.count > 1 else [0]
        if self.machines.count > len(members):
            say(f"goes on with {len(members)} of {self.machines.count} machines, which are {members}")
        words = [*words, *["training.resume=auto"] * (self.goes_on and self.trains)]
        number = self.machines.number + 1
        return {"number": number, "machines": members, "workers": ranks, "words": words, "restarts": restarts}, None

    def _slots(self):
        """The workers of the machines that are there; of one, as `slots`, or those of before while the file of
        `EXCLUDE` has another word in it, which is told once.
        """
        if self.machines.count > 1:
            free = free_machines(self.machines.signs(), self.machines.start()["number"])
            places = sorted({*free, *self.machines.members})
            return [place * self.local + each for place in places for each in range(self.local)]
        try:
            self.there = slots(os.environ, self.workers)
        except (ValueError, OSError) as error:
            self.say_once(str(error))
        return self.there

    def _sizes(self, available):
        """`(ranks, overrides)` of a start on so many slots; None where none can be, which is told."""
        if not self.trains or available == self.workers:
            return available, []
        parser = argparse.ArgumentParser()
        parser.add_argument("--config")
        known, rest = parser.parse_known_args(self.command[len(TRAIN) :])
        given = known.config, [text for text in rest if not text.startswith("-")], self.workers
        try:
            found = fitting_ranks(*given, available, self.settings.min_workers)
        except (ValueError, OSError) as error:
            return say(str(error))
        whole = found[0] // self.local * self.local
        return found if whole == found[0] else self._sizes(whole)

    def _start(self, start):
        """Run a start to its end: its exit code, and whether it was asked to leave, since other workers are there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.machines.begin(start)
        ranks, place = start["workers"], start["machines"].index(self.machines.own)
        told = {FOLDER: self.folder, "MINDFORMERS_RESTART": start["restarts"], "MINDFORMERS_WORKERS": self.workers}
        if ranks < self.workers and self.machines.count == 1:
            told |= {name: visible(os.environ.get(name, ""), self.there[:ranks]) for name in DEVICES}
        launch = [word.replace("{workers}", str(ranks)).replace("{machine}", str(place)) for word in self.launch]
        code, leaves = self._launch([*launch, *self.command, *start["words"]], told, ranks)
        self.machines.leave(start["number"])
        return code, leaves

    def _launch(self, command, told, ranks):
        environment = os.environ | {name: str(value) for name, value in told.items()}
        options = {"env": environment, "start_new_session": True, "preexec_fn": end_with_parent}
        self.child, is_told, leaves = subprocess.Popen(command, **options), False, False
        while self.child.poll() is None:
            time.sleep(POLL_SECONDS)
            self.machines.sign()
            leaves = leaves or self._prefers_others(ranks)
            if not is_told and (self.signal or leaves):
                is_told = True
                self.child.send_signal(signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM)
        kill_children()
        code, self.child = self.child.returncode, None
        return 128 - code if code < 0 else code, leaves

    def _prefers_others(self, ranks):
        """Whether the job, which saves when it is asked to leave, can go on with another number of ranks."""
        before, self.there = self.there, self._slots()
        if self.machines.own or self.there != before or len(self.there) in {ranks, *range(self.settings.min_workers)}:
            return False  # or a file that is half written
        told = told_in(self.folder)
        sizes = self.sizes(len(self.there)) if told.run == 2 and told.done else None
        return sizes is not None and sizes[0] != ranks

    def _wait(self, seconds):
        end = time.monotonic() + seconds
        while not self.signal and time.monotonic() < end:
            self.machines.sign()
            time.sleep(min(POLL_SECONDS, seconds))


def visible(given, slots):
    """The devices of some slots, numbers, among those that the job was `given`, as text; "": all that there are.

    `given` itself where it has no device for each slot, as for workers that use none.
    """
    devices = given.split(",") if given else [*map(str, range(max(slots) + 1))]
    return ",".join(devices[slot] for slot in slots) if max(slots) < len(devices) else given


def told_in(folder):
    """What the processes of a launch have told: attributes.

    `step` and `done`, the last step that one was in, and the most that one has done; `run`, 1 once the job has its run
    folder, 2 where it also saves, else 0; `ends`, `(step, error, exit code)` of those that ended by an error.
    """
    found = {name_of(path): [*np.fromfile(path, np.int64).tolist(), 0, 0, 0][:3] for path in folder.glob("steps.*")}
    ends = {name_of(path): json.loads(path.read_text()) for path in folder.glob("end.*[0-9]")}
    ends = [(found.get(process, [0])[0], facts["error"], facts["code"]) for process, facts in ends.items()]
    step, done, run = map(max, zip((0, 0, 0), *found.values()))
    return SimpleNamespace(step=step, done=done, run=run, ends=ends)


def name_of(path):
    """Host and number of the process that has written a file."""
    return path.name.partition(".")[2]


def say(text):
    """A line about the supervision."""
    print(f"supervisor: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
