"""Memory that two processes of one host share, for large messages in one direction: pieces that are used again.

The writer copies a message into a free segment and says by other means (a stream) which one; the reader copies it out
and frees it. The memory is a file without a name, open in both processes: it ends with them.

The file is mapped in arenas, as each mapping costs a file descriptor: an arena begins at a power of two and is as long,
so that few reach far. They are cut into segments by the buddy system (Knowlton, "A fast storage allocator", 1965):
a segment's size is a power of two, and two free halves become one again. The system gives memory only to the pages
that were written, so that neither the rest of an arena nor that of a segment costs any.
"""

import mmap
import os
from collections import defaultdict, deque

import numpy as np

__all__ = ["SegmentReader", "SegmentWriter", "shared_file"]

_BEFORE = 64  # bytes of a segment before the message; the first says whether it is in use
_FIRST = 1 << 26  # bytes of the first arena, and where it begins


def shared_file():
    """A file descriptor of empty memory, to be given to both ends, which close it."""
    return os.memfd_create("mindformers_core")


class _Segments:
    """What both ends have: the file, and the arenas that were mapped so far."""

    def __init__(self, file):
        self.file = file
        self.arenas = {}  # offset, which is the size as well -> array of uint8

    def memory_from(self, offset):
        """The memory from an offset of the file to the end of its arena."""
        start = 1 << (offset.bit_length() - 1)
        if start not in self.arenas:
            self.arenas[start] = np.frombuffer(mmap.mmap(self.file, start, offset=start), np.uint8)
        return self.arenas[start][offset - start :]

    def close(self):
        """Let go of the memory."""
        self.arenas.clear()
        os.close(self.file)


class SegmentWriter(_Segments):
    """The end that writes. The memory grows to the most that is on its way at once."""

    def __init__(self, file):
        super().__init__(file)
        self.size = _FIRST  # of the file; before the first arena nothing is used
        self.free = defaultdict(set)  # size -> offsets
        self.sent = deque()  # (offset, size) of segments in use, in the order in which they will be read

    def write(self, pieces):
        """Copy arrays of uint8 into a segment, one after the other; returns its offset for the reader."""
        needed = _BEFORE + sum(piece.size for piece in pieces)
        size = 1 << (needed - 1).bit_length()
        self._take_back()
        offset = self._cut(size)
        segment = self.memory_from(offset)
        start = _BEFORE
        for piece in pieces:
            segment[start : start + piece.size] = piece
            start += piece.size
        segment[0] = 1
        self.sent.append((offset, size))
        return offset

    def _take_back(self):
        """Make free what was read, joined with its other half where that is free, and so on."""
        while self.sent and not self.memory_from(self.sent[0][0])[0]:
            offset, size = self.sent.popleft()
            while (other := offset ^ size) in self.free[size]:
                self.free[size].remove(other)
                offset, size = min(offset, other), 2 * size
            self.free[size].add(offset)

    def _cut(self, size):
        """The offset of a segment of this size, from the smallest free one that has room; memory of before is first."""
        while not (fitting := [have for have, offsets in self.free.items() if offsets and have >= size]):
            self._grow()
        have = min(fitting)
        offset = min(self.free[have])
        self.free[have].remove(offset)
        while have > size:
            have //= 2
            self.free[have].add(offset + have)
        return offset

    def _grow(self):
        self.free[self.size].add(self.size)
        self.size *= 2
        os.ftruncate(self.file, self.size)


class SegmentReader(_Segments):
    """The end that reads."""

    def read_into(self, offset, memories):
        """Fill arrays of uint8, one after the other, with what is in the segment at `offset`, and free it.

        Segments are read in the order in which they were written.
        """
        segment = self.memory_from(offset)
        start = _BEFORE
        for memory in memories:
            memory[:] = segment[start : start + memory.size]
            start += memory.size
        segment[0] = 0
