"""Saving: every rank writes its byte ranges of the final files straight away, and one rename makes them a checkpoint.

Pure Python. The new folder is `FOLDER.incomplete` until it is whole and on the disk; where `FOLDER` exists already, it
is `FOLDER.replaced` in between, and `folders.find_checkpoint` finds it there.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from mindformers_core.checkpoint import index
from mindformers_core.checkpoint.checksums import checksum
from mindformers_core.checkpoint.folders import INCOMPLETE, REPLACED, tidy
from mindformers_core.checkpoint.parts import PIECE_BYTES, Ranks, divide, on_all_ranks, parts_of_all, tensors_of
from mindformers_core.checkpoint.regions import inside, overlap, volume
from mindformers_core.checkpoint.slices import FileLayer, opened, write_all, write_box, write_file
from mindformers_core.grouping import grouped
from mindformers_core.hints import bytes_shown


class SaveError(OSError):
    """A checkpoint couldn't be saved; earlier ones are as before."""

    @classmethod
    def of(cls, folder, error):
        """The error of a checkpoint in `folder` for its cause, an error or a text."""
        return cls(f"the checkpoint {folder} can't be saved: {error}")


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, its place, and the rank that writes it."""

    key: tuple
    placed: object
    box: tuple
    rank: int

    @property
    def nbytes(self):
        """Bytes of the box."""
        return volume(self.box) * self.placed.item_bytes


@dataclass(frozen=True)
class SavePlan:
    """All files of a checkpoint's tensors, and all pieces in the order of their tensors in the files.

    A run makes it once: later saves exchange no descriptions.
    """

    files: dict  # group -> list of `TensorFile`s
    pieces: tuple

    @property
    def nbytes(self):
        """Bytes that all ranks write into these files."""
        return sum(len(file.header) for file in _files(self)) + sum(piece.nbytes for piece in self.pieces)

    def of_rank(self, rank):
        """The pieces that a rank writes."""
        return [piece for piece in self.pieces if piece.rank == rank]


def plan_save(everywhere, most=index.DATA_BYTES, piece_bytes=PIECE_BYTES):
    """The `SavePlan` for the `Part`s of all ranks.

    Args:
        everywhere: a dict, rank -> list of `Part`s.
        most: bytes of data of a file.
        piece_bytes: bytes of a piece at most.

    Raises:
        ValueError: ranks disagree about a tensor, or no rank holds a part of it; its dtype can't be saved.
    """
    tensors, divided, files, placed = tensors_of(everywhere), divide(everywhere, piece_bytes), {}, {}
    for group, start in index.GROUPS.items():
        own = {name: described for (kind, name), described in tensors.items() if kind == group}
        files[group] = index.place_tensors(own, start, most) if own else []
        placed |= {(group, name): place for file in files[group] for name, place in file.tensors.items()}
    order = sorted(divided, key=lambda key: (placed[key].file, placed[key].offset))
    return SavePlan(files, tuple(Piece(key, placed[key], *piece) for key in order for piece in divided[key]))


def save(folder, parts, values, documents, ranks=None, plan=None, files=None):
    """Save a checkpoint; all ranks call this, with a common file system.

    Args:
        folder: of the new checkpoint, as `run/checkpoint/step_12`; one that exists is replaced.
        parts: this rank's `Part`s.
        values: function of a `Part` that returns the NumPy array of its box.
        documents: a dict, path in the folder -> bytes, of further files; only the first rank's are written.
        ranks: the `Ranks`. Default: this process alone.
        plan: what an earlier call with equal `parts` returned.
        files: the `FileLayer`.

    Returns:
        The `SavePlan`.

    Raises:
        SaveError: on all ranks: no space, no permission, …. What was written is removed, and earlier checkpoints stay.
        ValueError: see `plan_save`.
    """
    ranks, files = ranks or Ranks(), files or FileLayer()
    plan = plan or plan_save(parts_of_all(ranks, parts))
    is_first = ranks.rank == ranks.first
    try:
        on_all_ranks(ranks, lambda: make_files(folder, plan, files) if is_first else None)
        pieces = piece_arrays(plan.of_rank(ranks.rank), parts, values)
        sums = on_all_ranks(ranks, lambda: write_pieces(folder, pieces, files))
        on_all_ranks(ranks, lambda: commit(folder, plan, sums, documents, files) if is_first else None)
    except (OSError, ValueError) as error:
        if is_first:
            clean(folder, files)
        raise SaveError.of(folder, error) from error
    return plan


def make_files(folder, plan, files):
    """Make the unfinished folder with all tensors' files, of their sizes, with headers. One rank calls this.

    Args:
        folder, plan, files: as of `save`.

    Raises:
        OSError: less space than the files need, among others.
    """
    unfinished, above = folder + INCOMPLETE, os.path.dirname(folder) or "."
    files.make_folder(above)
    tidy(folder, files)
    if (free := files.free(above)) < plan.nbytes:
        raise OSError(f"it needs {bytes_shown(plan.nbytes)}, but its file system has {bytes_shown(free)} left")
    for path in (unfinished, *_folders(unfinished, plan)):
        files.make_folder(path)
    for file in _files(plan):
        with opened(files, os.path.join(unfinished, file.path), "make", sync=True) as descriptor:
            files.resize(descriptor, file.nbytes)
            write_all(files, descriptor, file.header, 0)


def piece_arrays(pieces, parts, values):
    """Pairs (piece, its array) of `Piece`s or `Move`s, in their order; other arguments as of `save`."""
    own, held = grouped((part.key, part) for part in parts), (None, None)
    for piece in pieces:
        part = next(part for part in own[piece.key] if overlap(part.box, piece.box) == piece.box)
        if held[0] is not part:
            held = part, values(part)
        yield piece, held[1][inside(piece.box, part.box)]


def write_pieces(folder, pieces, files):
    """Write pieces into the unfinished folder, synced: their checksums, in the same order.

    Nothing is exchanged with other ranks.

    Args:
        folder, files: as of `save`.
        pieces: pairs as of `piece_arrays`.
    """
    sums = []
    with ThreadPoolExecutor(1) as pool:  # checksums, while the same pieces are written
        for path, group in groupby(pieces, key=lambda pair: pair[0].placed.file):
            with opened(files, os.path.join(folder + INCOMPLETE, path), "write", sync=True) as descriptor:
                for piece, array in group:
                    found = pool.submit(checksum, array, piece.box, piece.placed.shape)
                    write_box(files, descriptor, piece.placed, piece.box, array)
                    sums.append(found.result())
    return sums


def commit(folder, plan, sums, documents, files):
    """Complete the unfinished folder, and give it its name. One rank calls this, after all have written.

    Args:
        folder, plan, documents, files: as of `save`.
        sums: a dict, rank -> what `write_pieces` returned.
    """
    unfinished, left = folder + INCOMPLETE, {rank: iter(found) for rank, found in sums.items()}
    documents = dict(documents)
    if plan.files["model"]:
        documents[index.MODEL_INDEX] = index.weight_map(plan.files["model"])
    described = {
        file.path: {"bytes": file.nbytes, "crc32": index.crc_of(file.header), "pieces": {}} for file in _files(plan)
    }
    for piece in plan.pieces:
        of_tensor = described[piece.placed.file]["pieces"].setdefault(piece.key[1], [])
        of_tensor.append([piece.box, f"{next(left[piece.rank]):016x}"])
    whole = {path: {"bytes": len(data), "crc32": index.crc_of(data)} for path, data in documents.items()}
    documents[index.CHECKSUMS] = index.encode_sealed({"format": index.FORMAT, "files": described | whole})
    for path, data in documents.items():
        write_file(files, os.path.join(unfinished, path), data)
    for path in (*_folders(unfinished, plan), unfinished):
        _sync_folder(path, files)
    if os.path.isdir(folder):
        files.rename(folder, folder + REPLACED)
    files.rename(unfinished, folder)
    _sync_folder(os.path.dirname(folder) or ".", files)
    clean(folder, files)


def _files(plan):
    return [file for files in plan.files.values() for file in files]


def _folders(unfinished, plan):
    """The folders below the unfinished one that files are in."""
    return sorted({os.path.dirname(os.path.join(unfinished, file.path)) for file in _files(plan)} - {unfinished})


def _sync_folder(path, files):
    with opened(files, path, sync=True):
        pass


def clean(folder, files):
    """`tidy` as far as that is possible: names of what is left say that they aren't checkpoints."""
    with suppress(OSError):
        tidy(folder, files)
