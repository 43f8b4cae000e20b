"""The state of a job in memory that outlives its processes: on each machine a folder, on which no disk is.

A state is a checkpoint of each machine, with all files in their sizes, which has the boxes that `plan_memory` says; the
rest are holes, which take no memory. Two states are there, so that a half-written one is never needed.
"""

import os
from dataclasses import replace
from pathlib import Path

from mindformers_core.checkpoint.between_meshes import exchange
from mindformers_core.checkpoint.folders import discard, step_of
from mindformers_core.checkpoint.index import CHECKSUMS, crc_of, encode_json
from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.checkpoint.memory.plan import plan_memory
from mindformers_core.checkpoint.moves import plan_moves
from mindformers_core.checkpoint.parts import Part, decode_parts, encode_parts, on_all_ranks, parts_of_all, tensors_of
from mindformers_core.checkpoint.regions import shape_of
from mindformers_core.checkpoint.save import SaveError, piece_arrays, plan_save, save
from mindformers_core.checkpoint.slices import WORDS, FileLayer, opened, read_box, write_box
from mindformers_core.grouping import grouped
from mindformers_core.hints import bytes_shown


class MemoryStore:
    """The states of a job in memory; all ranks call the methods alike.

    `machines`: rank -> (host, folder) of its machine; the folders of a host are in one folder.
    """

    def __init__(self, ranks, machines, files=None):
        own = [rank for rank in machines if machines[rank] == machines[ranks.rank]]
        self._ranks, self._machines, self._files = replace(ranks, first=min(own)), machines, files or FileLayer()
        self.folder, self._is_first = machines[ranks.rank][1], ranks.rank == min(own)
        self._parts, self._planned = None, None  # this rank's, and what is planned for them
        self._newest, self._sources = None, {}  # folder of the last whole state; rank -> what it had of it at the start

    def plan(self, parts):
        """What is kept where and sent, as of `plan_memory`, for this rank's `Part`s; the same as before for equal ones.

        `OSError` on all ranks where the memory isn't enough; `ValueError` as of `plan_save`.
        """
        if any(self._ranks.gather(parts != self._parts).values()):
            planned = plan_memory(parts_of_all(self._ranks, parts), self._machines)
            self._on_first(lambda: self._check_room(planned[0].pieces))
            self._parts, self._planned = parts, planned
        return self._planned

    def keep(self, step, parts, values, documents):
        """Keep the state after a step, beside the last whole one; others are forgotten before. Arguments as of `save`.

        Raises:
            OSError: on all ranks: no memory. ValueError: see `plan_save`. The last whole state is as it was.
        """
        ranks, machines, folder = self._ranks, self._machines, os.path.join(self.folder, f"step_{step}")
        whole, moves = self.plan(parts)
        texts = ranks.gather({path: data.decode() for path, data in documents.items()})[min(machines)]
        self.forget(but=self._newest)
        sent = piece_arrays([move for move in moves if move.sender == ranks.rank], parts, values)
        received = self._exchange(moves, {each.key: each.placed for each in whole.pieces}, lambda move: next(sent)[1])
        here = replace(whole, pieces=tuple(p for p in whole.pieces if machines[p.rank] == machines[ranks.rank]))
        given = {path: text.encode() for path, text in texts.items()}, ranks, here, self._files
        taken = [*parts, *received]
        save(folder, taken, lambda part: received.pop(part) if part in received else values(part), *given)
        self._newest = folder

    def find(self):
        """Look for the newest state that all machines together have, and forget all others: `(checkpoint, text)`.

        That is the `Checkpoint`, of which `bring` brings the tensors; or None, and what there is instead. `OSError`,
        `ValueError` on all ranks where a list of what is kept is damaged.
        """
        self._newest, self._sources, texts = None, {}, []
        found = self._on_first(self._described)
        states = grouped(
            (tuple(state), (rank, [*zip(decode_parts(parts), sums)]))
            for rank, own in found.items()
            for *state, parts, sums in own or ()
        )
        for (step, nbytes, _), having in sorted(states.items(), reverse=True):
            kept = dict.fromkeys(pair for _, own in having for pair in own)
            there = sum(part.nbytes for part in {part for part, _ in kept})
            if there == nbytes:
                self._newest = os.path.join(self.folder, f"step_{step}")
                self._sources = {rank: [part for part, _ in own] for rank, own in having}
                break
            texts.append(f"of step {step} there are {there:,} of {nbytes:,} bytes")
        self.forget(but=self._newest if self._ranks.first in self._sources else None)
        if self._newest is None:
            return None, [*texts, "nothing is there"][0]
        checkpoint = self._open()
        return replace(checkpoint, pieces=checkpoint.pieces | grouped((p.key, (p.box, total)) for p, total in kept)), ""

    def _open(self):
        """Open the state that was found, also on machines that have nothing of it: there it gets an empty folder."""
        folder, giver, found = self._newest, min(self._sources), []

        def documents():
            paths = [path for path in Path(folder).glob("*.json") if self._ranks.rank == giver]
            return {path.name: path.read_text() for path in paths if path.name != CHECKSUMS}

        def make_empty():
            given, plan = {path: text.encode() for path, text in texts.items()}, plan_save(self._sources)
            save(folder, [], None, given, plan=replace(plan, pieces=()), files=self._files)

        texts = on_all_ranks(self._ranks, documents)[giver]
        self._on_first(lambda: os.path.isdir(folder) or make_empty())
        on_all_ranks(self._ranks, lambda: found.append(open_checkpoint(folder)))
        return found[0]

    def bring(self, checkpoint, parts):
        """Bring into this machine's memory what its ranks need of the tensors: the fewest bytes, from other machines.

        `checkpoint` is that of `find`, and `parts` are this rank's. `OSError`, `ValueError` on all ranks: no memory;
        tensors of another shape.
        """
        targets, known, files, placed = {}, tensors_of(self._sources), self._files, checkpoint.tensors
        for rank, own in sorted(parts_of_all(self._ranks, parts).items()):
            first = next(each for each in sorted(self._machines) if self._machines[each] == self._machines[rank])
            targets.setdefault(first, {}).update((part, None) for part in own if part.key in known)

        def read(move):
            with opened(files, placed[move.key].file) as descriptor:
                return read_box(files, descriptor, placed[move.key], move.box)

        def write():
            for part, array in received.items():
                with opened(files, placed[part.key].file, "write") as descriptor:
                    write_box(files, descriptor, placed[part.key], part.box, array)

        received = self._exchange(plan_moves(self._sources, targets), placed, read)
        on_all_ranks(self._ranks, write)

    def forget(self, but=None):
        """Remove all states but one, of this folder."""
        left = [path for path in map(str, Path(self.folder).glob("*")) if path != but]
        self._on_first(lambda: [discard(path, self._files) for path in left])

    def _on_first(self, work):
        """Do `work` on the first rank of each machine: rank -> what it returns."""
        return on_all_ranks(self._ranks, lambda: work() if self._is_first else None)

    def _check_room(self, pieces):
        """Raise `SaveError` where a host's memory doesn't hold two states; those that are there will go."""
        self._files.make_folder(self.folder)
        above, host = os.path.dirname(self.folder), self._machines[self._ranks.rank][0]
        needed = 2 * sum(piece.nbytes for piece in pieces if self._machines[piece.rank][0] == host)
        there = sum(512 * path.stat().st_blocks for path in Path(above).rglob("*") if path.is_file())
        free = self._files.free(above) + there
        if free < needed:
            raise SaveError(
                f"checkpoint.replicas: two states in memory need {bytes_shown(needed)}, but {above} has "
                f"{bytes_shown(free)}: give it more, as `docker run --shm-size`, or leave checkpoint.replicas out"
            )

    def _described(self):
        """The whole states here: (step, bytes on all machines, checksum of `state`, boxes here, their checksums)."""
        found = []
        for path in Path(self.folder).glob(f"step_*[0-9]/{CHECKSUMS}"):
            folder = str(path.parent)
            checkpoint = open_checkpoint(folder)
            own = {key: at for key, at in checkpoint.tensors.items() if at.file.startswith(folder + os.sep)}
            kept = [(key, *pair) for key in own for pair in checkpoint.pieces.get(key, ())]
            parts = [Part(*key, own[key].dtype, own[key].shape, box) for key, box, _ in kept]
            facts = step_of(folder), sum(at.nbytes for at in own.values()), crc_of(encode_json(checkpoint.state))
            found.append((*facts, encode_parts(parts), [total for *_, total in kept]))
        return found

    def _exchange(self, moves, placed, read):
        """Send boxes by the `Move`s of all ranks: a dict, `Part` -> array, of those that come.

        `placed`: key -> `Placed`; `read`: function of a move that this rank sends, called in their order: its array.
        """
        found = {}

        def write(move, data):
            at = placed[move.key]
            part = Part(*move.key, at.dtype, at.shape, move.box)
            found[part] = data.view(WORDS[at.item_bytes]).reshape(shape_of(move.box))

        exchange(self._ranks.rank, moves, read, write)
        return found
