"""How much memory a benchmark takes: this process and all that it starts, together."""

import re
import threading
from contextlib import suppress
from pathlib import Path

import psutil

GB = 10**9
MEMORY_LIMIT = 6 * GB
INTERVAL = 1.0  # seconds between two looks


class MemoryWatch:
    """Looks at the memory while `with` it is open.

    Attributes:
        peak: bytes: the most that the processes alive at one look had taken. Each counts with its own peak until then;
            pages of files (libraries) count once, as in the process with most of them.
        exceeded: a `threading.Event`, set when the peak is over the limit.
    """

    def __init__(self, limit=MEMORY_LIMIT, interval=INTERVAL):
        self.limit, self.interval = limit, interval
        self.peak = 0
        self.exceeded, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True, name="memory watch")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._closed.set()
        self._thread.join()
        self.look()

    def _look_on(self):
        while not self._closed.wait(self.interval):
            self.look()

    def look(self):
        """Take the memory of now into account."""
        statuses = []
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with suppress(OSError):  # it has ended since
                statuses.append(Path(f"/proc/{process.pid}/status").read_text())
        self.peak = max(self.peak, total(statuses))
        if self.peak > self.limit:
            self.exceeded.set()


def total(statuses):
    """Bytes of processes, by what their `/proc/PID/status` says; one that has ended says nothing of memory."""
    found = [[_kilobytes(status, key) for key in ("VmHWM", "RssFile")] for status in statuses if "VmHWM" in status]
    return 1024 * (sum(peak - files for peak, files in found) + max((files for _, files in found), default=0))


def _kilobytes(status, key):
    return int(re.search(rf"^{key}:\s+(\d+) kB$", status, re.MULTILINE)[1])
