"""Memory that two processes of one host share, for large messages in one direction: pieces that are used again.

The writer copies a message into a free segment and says by other means (a stream) which one; the reader copies it out
and frees it. The memory is a file without a name, open in both processes: it ends with them.
"""

import mmap
import os

import numpy as np

__all__ = ["SegmentReader", "SegmentWriter", "shared_file"]

_BEFORE = 64  # bytes of a segment before the message; the first says whether it is in use


def shared_file():
    """A file descriptor of empty memory, to be given to both ends, which close it."""
    return os.memfd_create("mindformers_core")


class _Segments:
    """What both ends have: the file, and the segments that were mapped so far."""

    def __init__(self, file):
        self.file = file
        self.mapped = {}  # offset -> array of uint8

    def map(self, offset, size):
        """The segment at an offset of the file, of as many bytes."""
        if offset not in self.mapped:
            self.mapped[offset] = np.frombuffer(mmap.mmap(self.file, size, offset=offset), np.uint8)
        return self.mapped[offset]

    def close(self):
        """Let go of the memory."""
        self.mapped.clear()
        os.close(self.file)


class SegmentWriter(_Segments):
    """The end that writes. The file grows to the most that is on its way at once."""

    def __init__(self, file):
        super().__init__(file)
        self.size = 0  # of the file

    def write(self, pieces):
        """Copy arrays of uint8 into a segment, one after the other; returns its `(offset, size)` for the reader."""
        needed = _BEFORE + sum(piece.size for piece in pieces)
        free = [(segment.size, offset) for offset, segment in self.mapped.items() if not segment[0]]
        fitting = [(size, offset) for size, offset in free if size >= needed]
        offset = min(fitting)[1] if fitting else self._grow(needed)
        segment = self.mapped[offset]
        start = _BEFORE
        for piece in pieces:
            segment[start : start + piece.size] = piece
            start += piece.size
        segment[0] = 1
        return offset, segment.size

    def _grow(self, needed):
        offset, size = self.size, -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.file, offset + size)
        self.size += size
        self.map(offset, size)
        return offset


class SegmentReader(_Segments):
    """The end that reads."""

    def read_into(self, place, memories):
        """Fill arrays of uint8, one after the other, with what is in the segment at `place`, and free it."""
        segment = self.map(*place)
        start = _BEFORE
        for memory in memories:
            memory[:] = segment[start : start + memory.size]
            start += memory.size
        segment[0] = 0
