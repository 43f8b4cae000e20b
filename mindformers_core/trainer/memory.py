"""`checkpoint.replicas`: the newest state of a job in the memory of its machines, and taking it up from there."""

import os
import socket
import time

from mindformers_core.checkpoint.folders import newest_checkpoint, step_of
from mindformers_core.checkpoint.memory.store import MemoryStore
from mindformers_core.checkpoint.tensors import ranks_of
from mindformers_core.hints import bytes_shown
from mindformers_core.supervised import MEMORY
from mindformers_core.trainer.checkpoints import contents_of, go_on_or_end, open_source, resume, taking_up


class JobMemory:
    """The states of a job in the memory that the supervisors of its machines hold; all ranks call the methods alike.

    Where all ranks are on one machine, each process counts as one.

    Args:
        recipe: of the job.
        mesh, rank: of all its ranks, and this one's number.
    """

    def __init__(self, recipe, mesh, rank):
        self._facts, self._store, self._ranks = {}, None, ranks_of(mesh, rank)
        self._every, self._from_memory = recipe.checkpoint.replicas_interleaved_steps, False
        if not recipe.checkpoint.replicas:
            return
        places = self._ranks.gather((socket.gethostname(), os.environ.get(MEMORY)))
        if any(root is None for _, root in places.values()):
            self._say("warning: checkpoint.replicas has no effect, since no supervisor holds memory: set RESTARTS=N")
            return
        is_alone = len({host for host, _ in places.values()}) == 1
        machines = {
            each: (host, os.path.join(root, str(each) if is_alone else "all")) for each, (host, root) in places.items()
        }
        self._store = MemoryStore(self._ranks, machines)

    def newest(self, recipe):
        """`(recipe, checkpoint)` of a run that goes on from the state in memory, or else from its `open_source`."""
        checkpoint = self._in_memory(recipe) if self._store is not None else None
        if checkpoint is None:
            return recipe, open_source(recipe)
        self._from_memory = True
        return taking_up(recipe, recipe.training.output_dir), checkpoint

    def _in_memory(self, recipe):
        """The `Checkpoint` in memory, None where it isn't whole, or where the one on the disk is newer."""
        found, on_disk = None, newest_checkpoint(recipe.training.output_dir)
        try:
            step, text = self._store.find()
            if step is not None and recipe.training.resume and (on_disk is None or step >= step_of(on_disk)):
                found = self._store.open()
        except (OSError, ValueError) as error:
            step, text = None, str(error)
        if step is None and os.environ.get("MINDFORMERS_RESTART", "0") != "0":
            then = "the run begins anew" if on_disk is None else "it is loaded from disk"
            self._say(f"the state in memory isn't whole ({text}): {then}")
        return found

    def resume(self, job, checkpoint):
        """As `resume`, with a `Checkpoint` of `newest`; from disk where the memory is damaged, which is told."""
        if self._from_memory:
            dataset = job.dataset
            try:
                self._store.bring(checkpoint, list(job.checkpointer.parts(True, checkpoint)))
                self._resume(job, checkpoint)
                return
            except (OSError, ValueError) as error:
                self._say(f"the state in memory can't be loaded ({error}): it is loaded from disk")
                self._store.forget()
            job.dataset, checkpoint = dataset, open_source(job.recipe)
        self._resume(job, checkpoint)

    def _resume(self, job, checkpoint):
        read = resume(job, checkpoint).files
        if self._store is None:
            return
        in_memory = sum(nbytes for path, nbytes in read.items() if path.startswith(self._store.folder + os.sep))
        counts = zip(*self._ranks.gather((in_memory, sum(read.values()) - in_memory)).values())
        memory, disk = map(sum, counts)
        self._facts = {"loaded_from_memory": memory, "loaded_from_disk": disk}
        self._say(f"read {memory:,} bytes from memory, {disk:,} bytes from disk")

    def reserve(self, job):
        """Plan what is kept where, before the first step.

        Raises:
            OSError: on all ranks: the memory isn't enough.
        """
        if self._store is not None:
            plan = self._store.plan(list(job.checkpointer.parts()))
            kept, sent = (bytes_shown(sum(each.nbytes for each in some)) for some in (plan.local.pieces, plan.moves))
            self._say(f"checkpoint.replicas: {kept} are kept in memory where they are, {sent} on another machine")

    def take_facts(self):
        """Numbers for the row of a step, once: `replica_seconds` that `keep` took after the step before; the bytes that
        all ranks have read at the start, `loaded_from_memory` and `loaded_from_disk`.
        """
        found, self._facts = self._facts, {}
        return found

    def is_due(self, job):
        """Whether the state is kept after the last step of a job."""
        return self._store is not None and job.step % self._every == 0 and job.step < job.recipe.training.steps

    def keep(self, job):
        """Keep the state of a job in memory.

        Raises:
            SaveError, FloatingPointError: as of `save_job`. ValueError: as of `MemoryStore.keep`.
        """
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
