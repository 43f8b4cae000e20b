"""A stream of bytes to and from one other process, over a connected socket: writing never waits, reading does."""

import socket
import struct
import threading
from collections import deque
from contextlib import suppress

__all__ = ["Stream"]

_MOST_PIECES = 512  # that the kernel takes at once
_LAST_WORDS = 10.0  # seconds that a reader has left to take what is still unsent when a stream is closed


class Stream:
    """One end of a stream.

    Args:
        connected: a socket, blocking, which the stream owns from now on.
        limit: seconds without a byte after which reading gives up.
    """

    def __init__(self, connected, limit):
        self.socket = connected
        self.limit = limit
        self.closed = False
        patience = struct.pack("ll", int(limit), int(limit % 1 * 1e6))  # seconds and microseconds
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        self._backlog = deque()  # copies of what the kernel had no room for
        self._changed = threading.Condition()
        self._thread = None

    def check_open(self):
        """Raise `ConnectionError` if this end was closed."""
        if self.closed:
            raise ConnectionError("the channel is closed")

    def write(self, pieces):
        """Write arrays or bytes one after the other; they can be overwritten when this returns.

        Raises:
            ConnectionError: the other end is closed, or this one.
        """
        self.check_open()
        with self._changed:
            rest = pieces if self._backlog else self._write_now(pieces)
            if rest:
                self._backlog.append(b"".join(rest))
                self._changed.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work_off, daemon=True, name="channel backlog")
                    self._thread.start()

    def _write_now(self, pieces):
        """Give the kernel what it has room for; returns what is left."""
        pieces = [memoryview(piece) for piece in pieces]
        while pieces:
            try:
                sent = self.socket.sendmsg(pieces[:_MOST_PIECES], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return pieces
            except OSError as error:
                raise ConnectionError(f"it has ended ({error.strerror})") from error
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]
        return pieces

    def _work_off(self):
        """The thread: write the backlog, waiting for the reader."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog or self.closed)
                if not self._backlog:
                    return
                piece = self._backlog[0]
            try:
                self.socket.sendall(piece)
            except OSError:  # the reader is gone, which the next write says
                piece = None
            with self._changed:
                if piece is None:
                    self._backlog.clear()
                else:
                    self._backlog.popleft()
                self._changed.notify_all()

    def read(self, count):
        """The next `count` bytes."""
        got = bytearray(count)
        self.read_into(got)
        return got

    def read_into(self, memory):
        """Fill a writable array of bytes with the next ones.

        Raises:
            ConnectionError: the other end is closed, or this one.
            TimeoutError: no byte came within the limit.
        """
        self.check_open()
        memory = memoryview(memory)
        while memory:
            try:
                count = self.socket.recv_into(memory, 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise TimeoutError(f"nothing has come for {self.limit:g} s") from error
            except OSError as error:
                raise ConnectionError(f"it has ended ({error.strerror})") from error
            if count == 0:
                raise ConnectionError("it has ended (its connection is closed)")
            memory = memory[count:]

    def has_backlog(self):
        """Whether something waits that the kernel had no room for."""
        return bool(self._backlog)

    def close(self):
        """Close this end when the backlog is written, or the reader has stopped reading for some seconds."""
        if self.closed:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._backlog, _LAST_WORDS)
            self.closed = True
            self._changed.notify_all()
        with suppress(OSError):  # the other end may have closed it already
            self.socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self.socket.close()
