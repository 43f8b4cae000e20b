"""The machines of a job, each of which has a supervisor: which of them start together, and which have gone.

They tell it in a folder that all see: each machine, every other second, the number of the last start that is over for
it; the first one, whose address is the scheduler's, what it starts. Nothing else decides.
"""

import json
import time
from contextlib import suppress

from mindformers_core.files import write_whole

SIGN, SILENT = 2.0, 10.0  # seconds between signs; those without one after which a machine is gone


class Machines:
    """What the supervisor of machine `own`, one of `count`, tells the others, and knows of them, in a folder."""

    def __init__(self, folder, own, count):
        self.folder, self.own, self.count, self.members = folder, own, count, []  # machines of the start that runs
        self.number = self.begun = self.start()["number"]  # of the last start that is over for this machine
        self._told, self._next = None, 0.0  # the last sign; when it is given again

    def start(self):
        """The newest start that the first machine has told, a dict with its `number`, from 1, and `machines`."""
        with suppress(FileNotFoundError):
            return json.loads((self.folder / "start.json").read_text())
        return {"number": 0, "machines": []}

    def begin(self, start):
        """This machine takes part in a start, a dict, which the first one tells all."""
        self.members = start["machines"]
        if self.own == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "start.json", json.dumps(start))

    def leave(self, number):
        """A start is over for this machine."""
        self.number, self.members = number, []

    def sign(self, end=None):
        """Tell the others, if there are any, that this machine is there; or the exit code with which it has ended."""
        told = {"number": self.number, "end": end}
        if self.count == 1 or told == self._told and time.monotonic() < self._next:
            return
        with suppress(OSError):  # a machine that can't write there isn't there
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / f"{self.own}.json", json.dumps(told))
            self._told, self._next = told, time.monotonic() + SIGN

    def forget(self):
        """This machine goes, and may come back."""
        (self.folder / f"{self.own}.json").unlink(missing_ok=True)

    def signs(self):
        """A sign, and those of all: machine -> a dict of `number`, `end` and `is_there`."""
        self.sign()
        found = {}
        for path in self.folder.glob("[0-9]*.json"):
            with suppress(FileNotFoundError):  # it goes
                found[int(path.stem)] = (path.stat().st_mtime, json.loads(path.read_text()))
        now = max([when for when, _ in found.values()], default=0)  # by the clock of the folder
        return {machine: told | {"is_there": now - when < SILENT} for machine, (when, told) in sorted(found.items())}


def free_machines(signs, number):
    """Those that can take part in another start, since that of this number, the newest, is over for them."""
    free = {"number": number, "end": None, "is_there": True}
    return [machine for machine, told in signs.items() if told == free]


def is_awaited(signs, own, number):
    """Whether machines that are there will let `own` go on: the first one; for this those in which a start before that
    of this number still runs, whose processes wait for others until their deadline.
    """
    there = {machine: told["number"] for machine, told in signs.items() if told["is_there"]}
    return 0 in there if own else min(there.values(), default=number) < number


def end_of_job(signs, begun):
    """`(machine, exit code)` of one that has ended the job after the start `begun`; None where none has."""
    ends = ((machine, told["end"]) for machine, told in signs.items() if told["number"] > begun)
    return next((end for end in ends if end[1] is not None), None)
