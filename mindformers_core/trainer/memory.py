"""`checkpoint.replicas`: the newest state of a job in the memory of its machines, and taking it up from there."""

import os
import socket
import time

from mindformers_core.checkpoint.folders import newest_checkpoint, step_of
from mindformers_core.checkpoint.memory.store import MemoryStore
from mindformers_core.checkpoint.tensors import ranks_of
from mindformers_core.supervised import MEMORY
from mindformers_core.trainer.checkpoints import contents_of, go_on_or_end, open_source, resume, taking_up


class JobMemory:
    """The states of a job in the memory that the supervisors of its machines hold; all ranks call the methods alike.

    Where all ranks are on one machine, each process counts as one.
    """

    def __init__(self, recipe, mesh, rank):
        self._facts, self._store, self._ranks, self._from_memory = {}, None, ranks_of(mesh, rank), False
        if not recipe.checkpoint.replicas:
            return
        places = self._ranks.gather((socket.gethostname(), os.environ.get(MEMORY)))
        if None in dict(places.values()).values():
            self._say("warning: checkpoint.replicas has no effect, since no supervisor holds memory: set RESTARTS=N")
            return
        name = "{}" if len({host for host, _ in places.values()}) == 1 else "all"
        machines = {each: (host, os.path.join(root, name.format(each))) for each, (host, root) in places.items()}
        self._store = MemoryStore(self._ranks, machines)

    def newest(self, recipe):
        """`(recipe, checkpoint)` of a run that goes on from the state in memory, or else from its `open_source`: where
        that isn't whole, which is told after a restart, or where the checkpoint on the disk is newer.
        """
        on_disk, text = newest_checkpoint(recipe.training.output_dir), ""
        if self._store is not None and recipe.training.resume:
            try:
                checkpoint, text = self._store.find()
                if checkpoint is not None and (on_disk is None or checkpoint.state["step"] >= step_of(on_disk)):
                    self._from_memory = True
                    return taking_up(recipe, recipe.training.output_dir), checkpoint
            except (OSError, ValueError) as error:
                text = str(error)
        if text and os.environ.get("MINDFORMERS_RESTART", "0") != "0":
            then = "the run begins anew" if on_disk is None else "it is loaded from disk"
            self._say(f"the state in memory isn't whole ({text}): {then}")
        return recipe, open_source(recipe)

    def resume(self, job, checkpoint):
        """As `resume`, with a `Checkpoint` of `newest`; from disk where the memory is damaged, which is told."""
        dataset = job.dataset
        try:
            if self._from_memory:
                self._store.bring(checkpoint, list(job.checkpointer.parts(True, checkpoint)))
            report = resume(job, checkpoint)
        except (OSError, ValueError) as error:
            if not self._from_memory:
                raise
            self._say(f"the state in memory can't be loaded ({error}): it is loaded from disk")
            self._store.forget()
            job.dataset = dataset
            report = resume(job, open_source(job.recipe))
        if self._store is not None:
            own = sum(nbytes for path, nbytes in report.files.items() if path.startswith(self._store.folder + os.sep))
            memory, disk = map(sum, zip(*self._ranks.gather((own, report.read - own)).values()))
            self._facts = {"loaded_from_memory": memory, "loaded_from_disk": disk}
            self._say(f"read {memory:,} bytes from memory, {disk:,} bytes from disk")

    def reserve(self, job):
        """Plan what is kept where, before the first step; `OSError` on all ranks where the memory isn't enough."""
        if self._store is not None:
            self._store.plan(list(job.checkpointer.parts()))

    def take_facts(self):
        """Numbers for the row of a step, once: seconds of `keep` after the step before; bytes read by `resume`."""
        found, self._facts = self._facts, {}
        return found

    def is_due(self, job):
        """Whether the state is kept after the last step of a job."""
        every, last = job.recipe.checkpoint.replicas_interleaved_steps, job.recipe.training.steps
        return self._store is not None and job.step % every == 0 and job.step < last

    def keep(self, job):
        """Keep the state of a job in memory. Errors as of `save_job`, and `ValueError` as of `MemoryStore.keep`."""
        started = time.perf_counter()
        parts, documents = job.checkpointer.contents(job.step, *contents_of(job))
        try:
            self._store.keep(job.step, list(parts), lambda part: part.of(parts[part].asnumpy()), documents)
        except OSError as error:
            go_on_or_end(job, error)
        self._facts = {"replica_seconds": time.perf_counter() - started}

    def _say(self, text):
        if self._ranks.rank == 0:
            print(text, flush=True)
