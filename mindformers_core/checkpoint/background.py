"""Saving while training goes on: a copy of this rank's tensors in shared memory, which another process writes.

Pure Python. The memory has no name, so that it goes with the processes that hold it, whatever ends them.
"""

import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import numpy as np

from mindformers_core.checkpoint.index import encode_json
from mindformers_core.checkpoint.parts import encode_parts, on_all_ranks, parts_of_all
from mindformers_core.checkpoint.save import SaveError, clean, piece_arrays, plan_save
from mindformers_core.checkpoint.slices import WORDS, FileLayer
from mindformers_core.checkpoint.writer import places, snapshot_arrays

_POLL = 0.05  # seconds
_ROOT = str(Path(__file__).resolve().parents[2])  # the folder that this package is in
_BUSY = "busy"
_NICE = 15  # of the writer, beyond this process: about 3 % of a core that both want
_COPIERS = 4  # threads that copy a snapshot: one doesn't use all the memory's bandwidth


class BackgroundSave:
    """The snapshot of a rank, and the process that writes it, if there is one; all ranks call `settle` and `start`.

    Attributes:
        folder: of the last checkpoint that was asked for; None before. seconds: from the return of `start` until this
            rank's part of it was written, a dict with the key "write_seconds", after `settle`; {} before.
    """

    def __init__(self, ranks):
        self._ranks, self.folder, self.seconds = ranks, None, {}
        self._plan = self._memory = self._faulting = self._process = None
        self._worker, self._copying = ThreadPoolExecutor(1), None  # the `Future` of the copy and the process's start
        self._descriptors = ()  # of the snapshot, and of the parts of all ranks

    def settle(self, waits=True):
        """Whether no rank is writing any more; `waits` for that.

        Raises:
            SaveError: on all ranks: the last checkpoint couldn't be written; its folder is removed.
        """
        while True:
            found = self._ranks.gather(self._status())
            for rank, failure in sorted(found.items()):
                if failure not in (None, _BUSY):
                    self._end()
                    self._ranks.gather(None)  # no rank writes any more
                    if self._ranks.rank == 0:
                        clean(self.folder, FileLayer())
                    where = f"rank {rank}: " if len(found) > 1 else ""
                    raise SaveError(f"{where}{failure}")
            if _BUSY not in found.values():
                self._end()
                return True
            if not waits:
                return False
            time.sleep(_POLL)

    def reserve(self, parts):
        """Plan all saves, and allocate the snapshot; a thread faults its pages in, beside what the caller does next.

        Later calls do nothing. All ranks call this; `start` does, too.

        Args:
            parts: this rank's `Part`s, those of all saves.

        Raises:
            SaveError: on all ranks: no memory. ValueError: see `plan_save`.
        """
        if self._plan is not None:
            return
        everywhere = parts_of_all(self._ranks, parts)
        plan = plan_save(everywhere)
        try:
            on_all_ranks(self._ranks, lambda: self._allocate(everywhere, plan))
        except OSError as error:
            self.close()
            raise SaveError(f"checkpoint.async_save: a copy of the state can't be allocated: {error}") from error
        self._plan = plan

    def _allocate(self, everywhere, plan):
        described = encode_json({str(rank): encode_parts(own) for rank, own in everywhere.items()})
        snapshot = _shared_memory(max(1, places(plan.of_rank(self._ranks.rank))[1]))
        self._descriptors = snapshot, _shared_memory(len(described), described)
        self._memory = mmap.mmap(snapshot, 0)
        self._faulting = self._worker.submit(_fault_in, self._memory)

    def start(self, folder, parts, values, documents, keep):
        """Copy this rank's tensors, and write the checkpoint beside what the caller does next; after `settle`.

        On return the weights are copied; a thread copies the moments: call `await_copies` before they change.

        Args:
            folder, parts, values, documents: as of `save`; `documents` are texts in UTF-8. Parts are always the same.
            keep: `(keep_last, keep_every)` of `prune`.

        Raises:
            SaveError: on all ranks: no memory for the copy.
            ValueError: see `plan_save`.
        """
        self.reserve(parts)
        ranks, self.folder = self._ranks, folder
        request = {"rank": ranks.rank, "folder": os.path.abspath(folder), "keep": keep}
        request |= {"documents": {path: data.decode() for path, data in documents.items()}} if ranks.rank == 0 else {}
        tokens = ranks.gather(f"{os.getpid()}-{time.time_ns()}")
        request["token"] = tokens[min(tokens)]
        self._faulting.result()
        own, copied, later = self._plan.of_rank(ranks.rank), [], []
        copies = snapshot_arrays(own, self._memory)
        with ThreadPoolExecutor(_COPIERS) as pool:
            for (piece, array), copy in zip(piece_arrays(own, parts, values), copies):
                pair = copy, array.view(WORDS[array.dtype.itemsize])
                if piece.key[0] == "model":  # a forward pass may write them, and ZeRO frees them
                    copied.append(pool.submit(np.copyto, *pair))
                else:
                    later.append(pair)
        for each in copied:
            each.result()
        request["started"], self.seconds = time.monotonic(), {}
        self._copying = self._worker.submit(self._write, later, request)

    def await_copies(self):
        """Wait until the moments are copied too: before they change."""
        if self._copying is not None:
            wait([self._copying])

    def await_writer(self, seconds):
        """Wait for this rank's own process, so long at most: after an error, when other ranks may not call `settle`."""
        self.await_copies()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def _write(self, pairs, request):
        """Copy what only an optimizer writes, then start the process."""
        for pair in pairs:
            np.copyto(*pair)
        encoded = encode_json(request)
        descriptors = *self._descriptors, _shared_memory(len(encoded), encoded)
        path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mindformers_core.checkpoint.writer", *map(str, (os.getpid(), *descriptors))],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=descriptors, text=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
        finally:
            os.close(descriptors[-1])

    def _status(self):
        """None: nothing is being written; `_BUSY`; or the text of an error."""
        if self._copying is None:
            return None
        if error := self._copying.exception():
            return str(SaveError.of(self.folder, error))
        if self._process.poll() == 0:
            return None
        if self._process.returncode is None:
            return _BUSY
        ended = SaveError.of(self.folder, f"the writer ended with code {self._process.returncode}")
        return self._process.stdout.read().strip() or str(ended)

    def close(self):
        """End the process, whatever it does, and free the memory; what is half-written isn't a checkpoint."""
        self._end()
        if self._faulting is not None:
            self._faulting.result()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._plan = self._memory = self._faulting = None
        self._descriptors = ()

    def _end(self):
        """End the process; the memory stays for the next one."""
        self.await_copies()
        self._copying = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            if self._process.wait() == 0:
                self.seconds = {"write_seconds": float(self._process.stdout.read())}
            self._process.stdout.close()
            self._process = None


def _shared_memory(nbytes, contents=None):
    """The descriptor of new memory that child processes can be given."""
    descriptor = os.memfd_create("checkpoint")
    os.truncate(descriptor, nbytes)
    if contents is not None:
        os.pwrite(descriptor, contents, 0)
    return descriptor


def _fault_in(memory):
    """Let the kernel map all pages of new memory, whose bytes stay zero."""
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0
