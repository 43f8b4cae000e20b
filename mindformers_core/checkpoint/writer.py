"""The process that writes a snapshot while training goes on: `python -m mindformers_core.checkpoint.writer`.

Pure Python: MindSpore is never imported here. `background.BackgroundSave` starts one such process a rank and save. They
meet in a folder inside the unfinished checkpoint: rank 0 makes it when all files are there, and completes the
checkpoint when the checksums of all other ranks are in it.
"""

import json
import mmap
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from itertools import accumulate

import numpy as np

from mindformers_core.checkpoint.folders import INCOMPLETE, prune
from mindformers_core.checkpoint.index import encode_json
from mindformers_core.checkpoint.parts import decode_parts
from mindformers_core.checkpoint.regions import shape_of
from mindformers_core.checkpoint.save import SaveError, clean, commit, make_files, plan_save, write_pieces
from mindformers_core.checkpoint.slices import WORDS, FileLayer, read_file, write_file

_ALIGNED = 64  # bytes
_POLL, _REMOVAL = 0.02, 2.0  # seconds: between two looks at a folder, and for its removal at most


def places(pieces):
    """Positions of pieces in a snapshot, and its size in bytes."""
    *found, end = accumulate((-(-piece.nbytes // _ALIGNED) * _ALIGNED for piece in pieces), initial=0)
    return found, end


def snapshot_arrays(pieces, memory):
    """The arrays of pieces, of unsigned numbers, in the memory of a snapshot."""
    arrays = []
    for piece, position in zip(pieces, places(pieces)[0]):
        flat = np.frombuffer(memory, np.uint8, piece.nbytes, position)
        arrays.append(flat.view(WORDS[piece.placed.item_bytes]).reshape(shape_of(piece.box)))
    return arrays


def write_snapshot(everywhere, request, memory, files=None):
    """Write a rank's snapshot; on rank 0 the whole checkpoint, and wait for the other ranks.

    Args:
        everywhere: a dict, rank -> list of `Part`s.
        request: a dict of `rank`, `folder`, `token` (of this save), `documents` and `keep`, see `BackgroundSave.start`.
        memory: the snapshot.
        files: the `FileLayer`.

    Raises:
        SaveError: as of `save`. OSError: as of `prune`.
    """
    files, rank, folder = files or FileLayer(), request["rank"], request["folder"]
    plan, meeting = plan_save(everywhere), os.path.join(folder + INCOMPLETE, f"ranks-{request['token']}")
    pieces = plan.of_rank(rank)
    pairs = zip(pieces, snapshot_arrays(pieces, memory))
    try:
        if rank:
            _await(meeting)
            path = os.path.join(meeting, f"{rank}.json")
            write_file(files, path + INCOMPLETE, encode_json(write_pieces(folder, pairs, files)))
            files.rename(path + INCOMPLETE, path)
            return
        make_files(folder, plan, files)
        files.make_folder(meeting)
        sums = {rank: write_pieces(folder, pairs, files)}
        for other in (other for other in everywhere if other != rank):
            path = os.path.join(meeting, f"{other}.json")
            _await(path)
            sums[other] = json.loads(read_file(files, path))
        files.remove(meeting)
        commit(folder, plan, sums, {path: text.encode() for path, text in request["documents"].items()}, files)
    except (OSError, ValueError) as error:
        if not rank:
            with suppress(OSError):
                files.remove(meeting)
            clean(folder, files)
        elif _is_removed(meeting, _REMOVAL if isinstance(error, FileNotFoundError) else 0):
            return  # the error of rank 0 comes first
        raise SaveError.of(folder, error) from error
    prune(folder, *request["keep"], files)


def _await(path):
    while not os.path.exists(path):
        time.sleep(_POLL)


def _is_removed(folder, seconds):
    """Whether a folder is gone, now or within so long: its files go first."""
    end = time.monotonic() + seconds
    while os.path.isdir(folder) and time.monotonic() < end:
        time.sleep(_POLL)
    return not os.path.isdir(folder)


def _end_with(parent):
    """End this process as soon as its parent is gone."""
    while os.getppid() == parent:
        time.sleep(_POLL * 5)
    os._exit(1)


def main(parent, *descriptors):
    """Be the writer: arguments are the parent's process, and descriptors of the snapshot, of all parts, of the request.

    Prints the seconds since the request, or the text of an error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    memory, parts, request = (mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) for descriptor in descriptors)
    everywhere = {int(rank): decode_parts(own) for rank, own in json.loads(parts[:]).items()}
    request = json.loads(request[:])
    try:
        write_snapshot(everywhere, request, memory)
        print(time.monotonic() - request["started"])
    except OSError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
