"""msrun, whose processes are forks of it: they find MindSpore and the package imported, which takes each of them more
than two CPU seconds.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import mindspore.parallel.cluster.run as msrun

import mindformers_core.trainer.trainer  # noqa: F401 (almost all of the package)


class Forked(BaseException):
    """Leads a new process out of msrun's functions."""


class Process:
    """What msrun asks of a `subprocess.Popen`, for a fork that runs `python SCRIPT …`."""

    def __init__(self, command, stdout, preexec_fn=None, **_):
        self.pid, self.returncode = os.fork(), None
        if self.pid == 0:
            if preexec_fn:
                preexec_fn()
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            raise Forked(command[1:])

    def poll(self):
        """The exit code; None while it runs."""
        return self.returncode if self.returncode is not None else self.wait(os.WNOHANG)

    def wait(self, options=0):
        """Its exit code, once it has ended."""
        pid, status = os.waitpid(self.pid, options)
        self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


if __name__ == "__main__":
    popen = subprocess.Popen
    subprocess.Popen = lambda command, **given: (Process if command[0] == "python" else popen)(command, **given)
    try:
        sys.exit(msrun.main())
    except Forked as forked:
        subprocess.Popen, (sys.argv,) = popen, forked.args
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
