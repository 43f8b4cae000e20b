"""The mutation exam: do the tests find small faults? Plants those of `mutations.yaml` in a copy, one at a time.

    .venv/bin/python tests/mutate.py               every fault; exit code 1 if one isn't found
    .venv/bin/python tests/mutate.py --only NAME   this one; may be given several times
    .venv/bin/python tests/mutate.py --record      also writes into mutations.yaml which test has found each

The test that found a fault last runs first, then the quick half of all tests, then those that start ranks, up to the
first failure. Before, all tests that found faults have to pass without any. The working tree isn't touched.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from support.launch import ROOT, _kill_tree

FAULTS = ROOT / "tests" / "mutations.yaml"
PYTEST = ("-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider")
QUICK = ("-m", "not ranks and not nightly", "--ignore=tests/test_ranks.py")
QUICK += ("--ignore=tests/test_mutations.py",)  # which would find them all
RANKS = ("-m", "not nightly", "tests/test_ranks.py")
LIMIT = 2400  # seconds that one call of pytest may take: a fault may make ranks wait for each other


@dataclass(frozen=True)
class Fault:
    """An entry of `mutations.yaml`.

    Attributes:
        name: says in a few words what is wrong.
        file: below `mindformers_core`.
        old, new: the text that stands there, once, and what takes its place.
        found_by: the test that found it last, as pytest takes it; empty where none is known.
    """

    name: str
    file: str
    old: str
    new: str
    found_by: str = ""

    @property
    def floor(self):
        """The floor of the package that it is on."""
        return self.file.partition("/")[0].removesuffix(".py")

    def planted(self, text):
        """The text of its file with the fault in it. `ValueError` where that isn't the file that it was made for."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} should have this once, but has it {count} times: {self.old!r}")
        ast.parse(text.replace(self.old, self.new))
        return text.replace(self.old, self.new)


def read_faults(path=FAULTS):
    """All `Fault`s of the file, in order."""
    return [Fault(**entry) for entry in yaml.safe_load(path.read_text())]


def recorded(text, name, found_by):
    """The text of `mutations.yaml` with another `found_by` of one fault."""
    entry = re.compile(rf"^(- name: {re.escape(name)}\n(?:  .*\n)*?  found_by:).*$", re.MULTILINE)
    text, count = entry.subn(lambda match: f"{match[1]} {json.dumps(found_by)}", text)
    assert count == 1, name
    return text


def first_failure(exit_code, output):
    """The test that failed first in a call of pytest, or how else it ended; empty where all passed."""
    if exit_code in (0, 5):  # 5: there was none to run
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    if failed or exit_code is None:
        return failed[1] if failed else "it took too long"
    return f"pytest ended with {exit_code}: {output.strip().splitlines()[-1:]}"


def run_tests(copy, *selected):
    """The first failure among some tests of a copy of the repository: see `first_failure`."""
    environment = {"GLOG_v": "3", **os.environ, "PYTHONPATH": str(copy)}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *PYTEST, *selected], cwd=copy, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            exit_code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _kill_tree(process)
        log.seek(0)
        return first_failure(exit_code, log.read())


def found(fault, copy):
    """The test that finds a fault in a copy; empty where none does."""
    path = copy / "mindformers_core" / fault.file
    whole = path.read_text()
    path.write_text(fault.planted(whole))
    try:
        selections = [(fault.found_by,)] if fault.found_by else []
        return next(filter(None, (run_tests(copy, *each) for each in (*selections, QUICK, RANKS))), "")
    finally:
        path.write_text(whole)


def main(only, record):
    """Run the exam; returns the exit code."""
    faults = [fault for fault in read_faults() if not only or fault.name in only]
    missed, start = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "output"))
        (copy / ".venv").symlink_to((ROOT / ".venv").resolve())
        known = dict.fromkeys(fault.found_by for fault in faults if fault.found_by)
        if known and (broken := run_tests(copy, *known)):
            print(f"{broken} fails without a fault: nothing can be told")
            return 1
        print(f"without a fault all pass ({time.monotonic() - start:.0f} s)", flush=True)
        for fault in faults:
            begin = time.monotonic()
            by = found(fault, copy)
            seconds = time.monotonic() - begin
            print(f"{fault.name:42} {fault.file:45} {seconds:5.0f} s  {by or 'NOT FOUND'}", flush=True)
            missed += [] if by else [fault.name]
            if record:
                FAULTS.write_text(recorded(FAULTS.read_text(), fault.name, by))
    seconds = time.monotonic() - start
    print(f"{len(faults) - len(missed)} of {len(faults)} faults found in {seconds:.0f} s; not: {missed or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", choices=[fault.name for fault in read_faults()])
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    sys.exit(main(given.only, given.record))
