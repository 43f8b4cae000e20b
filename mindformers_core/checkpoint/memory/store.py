"""The state of a job in memory that outlives its processes: on each machine a folder, on which no disk is.

A state is a checkpoint's folder with all its files in their sizes, of which a machine has the boxes that `plan_memory`
says; the rest are holes, which take no memory. Two states are there, so that a half-written one is never needed.
"""

import os
from itertools import groupby
from pathlib import Path

from mindformers_core.checkpoint.between_meshes import exchange
from mindformers_core.checkpoint.checksums import checksum
from mindformers_core.checkpoint.folders import INCOMPLETE, discard
from mindformers_core.checkpoint.index import CHECKSUMS, crc_of, encode_sealed, open_sealed
from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.checkpoint.memory.plan import plan_memory
from mindformers_core.checkpoint.moves import plan_moves
from mindformers_core.checkpoint.parts import decode_parts, encode_parts, on_all_ranks, parts_of_all, tensors_of
from mindformers_core.checkpoint.regions import shape_of
from mindformers_core.checkpoint.save import (
    SaveError,
    SavePlan,
    commit,
    files_of,
    make_files,
    piece_arrays,
    write_pieces,
)
from mindformers_core.checkpoint.slices import WORDS, FileLayer, opened, read_box, write_box, write_file
from mindformers_core.communication import channel
from mindformers_core.grouping import grouped
from mindformers_core.hints import bytes_shown

_KEPT = "kept.json"  # in the folder of a state: the number of its boxes, and those that the machine keeps


class MemoryStore:
    """The states of a job in memory; all ranks call the methods alike.

    Args:
        machines: rank -> (host, folder) of its machine; the folders of a host are in one folder.
        files: the `FileLayer`.
    """

    def __init__(self, ranks, machines, files=None):
        self._ranks, self._machines, self._files = ranks, machines, files or FileLayer()
        self._own = [rank for rank in sorted(machines) if machines[rank] == machines[ranks.rank]]
        self._is_first, self.folder = ranks.rank == self._own[0], machines[ranks.rank][1]
        self._everywhere, self._plan, self._states = {}, None, []  # the folders of states of this plan
        self._sources, self._step = {}, None  # of the state that `find` has found

    def plan(self, parts):
        """The `MemoryPlan` for this rank's `Part`s, of which states are made from now on.

        Raises:
            OSError: on all ranks: the memory isn't enough. ValueError: see `plan_save`.
        """
        self._agree(parts, {})
        return self._plan

    def keep(self, step, parts, values, documents):
        """Keep the state after a step; when it is whole on all machines, the one before the last is forgotten.

        Args:
            step: its number.
            parts, values, documents: as of `save`.

        Raises:
            OSError: on all ranks: no memory. ValueError: on all ranks: two ranks have other values of a part that both
                hold; see `plan_save`, too. The states before are as they were.
        """
        ranks, documents = self._ranks, self._agree(parts, documents)
        plan, folder, sums = self._plan, os.path.join(self.folder, f"step_{step}"), []
        self._on_first(lambda: self._make(folder))
        pieces = piece_arrays(plan.local, ranks.rank, parts, values)
        on_all_ranks(ranks, lambda: sums.extend(write_pieces(folder, pieces, self._files)))
        placed = {piece.key: piece.placed for piece in plan.saved.pieces}
        received = self._exchange(folder + INCOMPLETE, plan.moves, placed)
        sums = plan.agreed(on_all_ranks(ranks, lambda: sums + received()))
        self._on_first(lambda: self._complete(folder, sums, documents))
        self._states.append(folder)

    def find(self):
        """Look for the newest state that all machines together have, and forget all others.

        Returns:
            `(step, text)`: its number, or None, and then what is there instead.

        Raises:
            OSError, ValueError: on all ranks: a list of boxes is damaged.
        """
        self._step, self._sources, texts = None, {}, []
        found = self._on_first(self._described)
        states = grouped(
            ((step, token), (rank, count, decode_parts(kept)))
            for rank, own in found.items()
            for step, token, count, kept in own or ()
        )
        for (step, _), having in sorted(states.items(), reverse=True):
            boxes = {(part.key, part.box) for _, _, kept in having for part in kept}
            count = max(count for _, count, _ in having)
            if len(boxes) == count:
                self._step, self._sources = step, {rank: kept for rank, _, kept in having}
                break
            texts.append(f"of step {step} there are {len(boxes)} of {count} boxes")
        stays = [os.path.join(self.folder, f"step_{self._step}")] if self._own[0] in self._sources else []
        self._on_first(lambda: self._forget(stays))
        return self._step, [*texts, "nothing is there"][0]

    def forget(self):
        """Remove all states."""
        self._on_first(lambda: self._forget(()))

    def open(self):
        """The `Checkpoint` of the state that `find` has found, of which `bring` brings the tensors.

        Raises:
            OSError, ValueError: on all ranks: it is damaged.
        """
        folder, giver, opened = os.path.join(self.folder, f"step_{self._step}"), min(self._sources), []

        def documents():
            paths = [path for path in Path(folder).glob("*.json") if self._ranks.rank == giver]
            return {path.name: path.read_text() for path in paths}

        given = on_all_ranks(self._ranks, documents)[giver]
        self._on_first(lambda: os.path.isdir(folder) or self._make_empty(folder, given))
        on_all_ranks(self._ranks, lambda: opened.append(open_checkpoint(folder)))
        return opened[0]

    def bring(self, checkpoint, parts):
        """Bring into this machine's memory what its ranks need of the tensors: the fewest bytes, from other machines.

        Args:
            checkpoint: what `open` has returned.
            parts: this rank's `Part`s.

        Raises:
            OSError, ValueError: on all ranks: no memory; tensors of another shape.
        """
        targets, known = {}, tensors_of(self._sources)
        for rank, own in sorted(parts_of_all(self._ranks, parts).items()):
            first = next(each for each in sorted(self._machines) if self._machines[each] == self._machines[rank])
            targets.setdefault(first, {}).update((part, None) for part in own if part.key in known)
        received = self._exchange("", plan_moves(self._sources, targets), checkpoint.tensors)
        on_all_ranks(self._ranks, received)

    def _on_first(self, work):
        """Do `work` on the first rank of each machine: rank -> what it returns."""
        return on_all_ranks(self._ranks, lambda: work() if self._is_first else None)

    def _agree(self, parts, documents):
        """Plan where a rank has other parts than before; the documents of the first rank."""
        rank, everywhere = self._ranks.rank, self._everywhere
        encoded = encode_parts(parts) if everywhere.get(rank) != list(parts) else None
        texts = {path: data.decode() for path, data in documents.items()} if rank == min(self._machines) else None
        gathered = self._ranks.gather((encoded, texts))
        for other, (encoded, _) in gathered.items():
            if encoded is not None:
                everywhere[other], self._plan = decode_parts(encoded), None
        if self._plan is None:
            plan = plan_memory(everywhere, self._machines)
            self._on_first(lambda: self._check_room(plan))
            self._plan, self._states = plan, []
        return {path: text.encode() for path, text in gathered[min(self._machines)][1].items()}

    def _nbytes(self, plan, ranks):
        return sum(part.nbytes for rank in ranks for part in plan.kept[rank])

    def _check_room(self, plan):
        """Raise `SaveError` where a host's memory doesn't hold two states; those that are there will go."""
        self._files.make_folder(self.folder)
        above, host = os.path.dirname(self.folder), self._machines[self._ranks.rank][0]
        needed = 2 * self._nbytes(plan, [rank for rank, machine in self._machines.items() if machine[0] == host])
        there = (os.path.join(path, name) for path, _, names in os.walk(above) for name in names)
        free = self._files.free(above) + sum(512 * os.stat(path).st_blocks for path in there)
        if free < needed:
            raise SaveError(
                f"checkpoint.replicas: two states in memory need {bytes_shown(needed)}, but {above} has "
                f"{bytes_shown(free)}: give it more, as `docker run --shm-size`, or leave checkpoint.replicas out"
            )

    def _make(self, folder):
        """Make the unfinished folder of a state, of the memory of the oldest one."""
        if self._states:
            self._forget(self._states)
        if len(self._states) == 2:
            self._files.rename(self._states.pop(0), folder + INCOMPLETE)
        else:
            make_files(folder, self._plan.saved, self._files, self._nbytes(self._plan, self._own))

    def _complete(self, folder, sums, documents):
        kept = [part for rank in self._own for part in self._plan.kept[rank]]
        self._write_kept(folder + INCOMPLETE, len(self._plan.saved.pieces), kept)
        commit(folder, self._plan.saved, sums, documents, self._files)

    def _described(self):
        """The whole states of this machine: a list of (step, checksum of all, number of all boxes, the kept ones)."""
        found = []
        for path in Path(self.folder).glob(f"step_*/{CHECKSUMS}"):
            kept, step = path.parent / _KEPT, path.parent.name.removeprefix("step_")
            if step.isdecimal():
                sealed = open_sealed(str(kept), kept.read_bytes())
                found.append((int(step), crc_of(path.read_bytes()), sealed["boxes"], sealed["kept"]))
        return found

    def _forget(self, stays):
        """Remove what is in this machine's folder but for these paths."""
        for path in map(str, Path(self.folder).glob("*")):
            if path not in stays:
                discard(path, self._files)

    def _exchange(self, folder, moves, placed):
        """Send boxes of this machine's files, and write those that come.

        Returns when all ranks have what is theirs, whatever failed: a function that returns the checksums of what has
        come, in the order of the moves, or raises the `OSError` of a write.

        Args:
            folder: in which the paths of `placed` are.
            moves: the `Move`s of all ranks.
            placed: key -> `Placed`.
        """
        sums, failures, messages, files = [], [], channel() if moves else None, self._files

        def file_of(move, mode):
            return opened(files, os.path.join(folder, placed[move.key].file), mode)

        def read(move):
            with file_of(move, "read") as descriptor:
                return read_box(files, descriptor, placed[move.key], move.box)

        def write(move, data):
            place = placed[move.key]
            array = data.view(WORDS[place.item_bytes]).reshape(shape_of(move.box))
            sums.append(checksum(array, move.box, place.shape))
            try:
                with file_of(move, "write") as descriptor:
                    write_box(files, descriptor, place, move.box, array)
            except OSError as error:  # its sender waits for this rank
                failures.append(error)

        def received():
            for error in failures:
                raise error
            return sums

        own = [move for move in moves if self._ranks.rank in (move.sender, move.receiver)]
        for _, of_key in groupby(own, key=lambda move: move.key):
            exchange(messages, self._ranks.rank, tuple(of_key), read, write)
        return received

    def _write_kept(self, folder, count, kept):
        encoded = encode_sealed({"boxes": count, "kept": encode_parts(kept)})
        write_file(self._files, os.path.join(folder, _KEPT), encoded)

    def _make_empty(self, folder, documents):
        """Make the folder of a state that this machine has nothing of."""
        make_files(folder, SavePlan(files_of(tensors_of(self._sources)), ()), self._files, needed=0)
        for path, text in documents.items():
            write_file(self._files, os.path.join(folder + INCOMPLETE, path), text.encode())
        self._write_kept(folder + INCOMPLETE, 0, [])
        self._files.rename(folder + INCOMPLETE, folder)
