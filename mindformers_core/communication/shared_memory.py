"""Memory that the processes of one host share; in it, segments that hold large messages.

The memory of a rank is a file without a name, mapped by all ranks: the file ends with them. The system gives memory
only to pages that were written, so a large mapping costs nothing. A writer copies a message into a free segment and
sends its offset over a connection; the reader copies the message out and marks the segment as free.
"""

import mmap
import os
import socket
from bisect import insort

import numpy as np

MOST_READERS = 64  # of a segment
_HEADER = MOST_READERS  # bytes of a segment before the message: 1 for each reader that hasn't read it
PAGE = 4096  # bytes at whose multiples segments begin
_GREETING = b"memory"  # bytes that carry a file descriptor


def share_memory(index, connections, size):
    """New memory of every rank, mapped by all of them: `{rank: array of uint8}`. A collective call: all ranks make it.

    Args:
        index: this rank's key in the result.
        connections: `{rank: Connection}` to all other ranks, which are on this host.
        size: bytes of memory of each rank.

    Raises:
        RuntimeError: a rank has ended, or doesn't make the call within the timeout of its connection.
    """
    files = {index: os.memfd_create("mindformers_core")}
    try:
        os.ftruncate(files[index], size)
        for connection in connections.values():
            socket.send_fds(connection.socket, [_GREETING], [files[index]])
        for rank, connection in connections.items():
            _, received, _, _ = socket.recv_fds(connection.socket, len(_GREETING), 1)
            if not received:
                raise ConnectionError(f"the rank at place {rank} has ended")
            files[rank] = received[0]
        return {rank: np.frombuffer(mmap.mmap(file, size), np.uint8) for rank, file in files.items()}
    except OSError as error:
        for connection in connections.values():
            connection.close()
        raise RuntimeError(f"ranks can't share memory: {error}") from error
    finally:
        for file in files.values():
            os.close(file)


class SegmentWriter:
    """Writes messages into `memory`, an array of uint8. Pages in use grow to the largest need at any one time."""

    def __init__(self, memory):
        self.memory = memory
        self.in_use = []  # (begin, end) of every segment that may be in use, ascending

    def write(self, pieces, readers=(0,)):
        """Copy arrays of uint8 into a segment, one after the other; returns the segment's offset, which PAGE divides.

        Args:
            pieces: the arrays.
            readers: numbers below MOST_READERS, for `free_segment`.

        Raises:
            ValueError: the memory has no room for it beside the messages that wait for their receivers.
        """
        size = _HEADER + sum(piece.size for piece in pieces)
        offset = self._first_gap(size)
        if offset + size > self.memory.size:
            raise ValueError(
                f"a message of {size:,} bytes doesn't fit into {self.memory.size:,} bytes of shared memory, of which "
                f"{offset:,} hold messages that nobody has received: receive them before more is sent"
            )
        start = offset + _HEADER
        for piece in pieces:
            self.memory[start : start + piece.size] = piece
            start += piece.size
        self.memory[offset : offset + _HEADER] = 0
        self.memory[[offset + reader for reader in readers]] = 1
        insort(self.in_use, (offset, start))
        return offset

    def _first_gap(self, size):
        """The offset of the first free range of `size` bytes (first fit: low pages stay in the cache)."""
        self.in_use = [(begin, end) for begin, end in self.in_use if self.memory[begin : begin + _HEADER].any()]
        offset = 0
        for begin, end in self.in_use:
            if offset + size <= begin:
                break
            offset = -(-end // PAGE) * PAGE
        return offset


def read_segment(memory, offset, targets):
    """Fill arrays of uint8, one after the other, from the segment at `offset`, and mark the segment as free."""
    start = offset + _HEADER
    for target in targets:
        target[:] = memory[start : start + target.size]
        start += target.size
    free_segment(memory, offset)


def segment_like(memory, offset, array):
    """What lies in the segment at `offset`, an array like another one."""
    start = offset + _HEADER
    return memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)


def free_segment(memory, offset, reader=0):
    """Mark a segment as read by one of its readers; after the last one it is free."""
    memory[offset + reader] = 0
