"""A stream of bytes to and from one other process, over a connected socket: a write never waits, a read does."""

import socket
import struct
import threading
from contextlib import suppress
from queue import Queue

_MOST_PIECES = 512  # in one call of the kernel
_CLOSE_TIMEOUT = 10.0  # seconds in which the reader has to take the backlog when a connection is closed


class Connection:
    """One end of a connection to another process.

    Args:
        connected: a connected socket, which the connection owns from this call on.
        timeout: seconds without a byte after which a read fails.

    Attributes:
        on_one_host: whether the other process runs on the same host, so that both can map the same memory.
    """

    def __init__(self, connected, timeout):
        self.socket = connected
        self.timeout = timeout
        self.closed = False
        self.on_one_host = connected.family == socket.AF_UNIX
        connected.settimeout(None)
        duration = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))  # seconds and microseconds
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, duration)
        if self.on_one_host:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 23)  # the kernel takes what it allows
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._backlog = Queue()  # copies of bytes for which the kernel had no room; None ends the thread
        self._thread = None

    def check_open(self):
        """Raise `ConnectionError` if this end was closed."""
        if self.closed:
            raise ConnectionError("the channel is closed")

    def write(self, pieces):
        """Write arrays or bytes one after the other; the caller can overwrite them after the call.

        Raises:
            ConnectionError: the other end is closed, or this one.
        """
        self.check_open()
        rest = pieces if self.has_backlog() else self._write_now(pieces)
        if rest:
            self._backlog.put(b"".join(rest))
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_backlog, daemon=True, name="channel backlog")
                self._thread.start()

    def _write_now(self, pieces):
        """Pass to the kernel as many bytes as its buffer holds; returns the rest."""
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

    def _write_backlog(self):
        """The thread: write the backlog, waiting for the reader."""
        while (piece := self._backlog.get()) is not None:
            with suppress(OSError):  # the reader has ended, which the next write reports
                self.socket.sendall(piece)
            self._backlog.task_done()

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
                raise TimeoutError(f"nothing has come for {self.timeout:g} s") from error
            except OSError as error:
                raise ConnectionError(f"it has ended ({error.strerror})") from error
            if count == 0:
                raise ConnectionError("it has ended (its connection is closed)")
            memory = memory[count:]

    def has_backlog(self):
        """Whether bytes wait for room in the kernel."""
        return self._backlog.unfinished_tasks > 0

    def close(self):
        """Close this end when the backlog is written, or after a timeout."""
        if self.closed:
            return
        self.closed = True
        with self._backlog.all_tasks_done:
            self._backlog.all_tasks_done.wait_for(lambda: not self.has_backlog(), _CLOSE_TIMEOUT)
        with suppress(OSError):  # the other end may have closed it already
            self.socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._backlog.put(None)
            self._thread.join()
        self.socket.close()
