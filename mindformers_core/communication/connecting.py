"""Connecting every rank to every other one, by Unix-domain sockets on one host and by TCP between hosts (Linux).

Every rank listens until all have come, and no longer. Whoever connects has to know a random token that the ranks share
beforehand; others are turned away. A Unix-domain socket has a name without a file, and TCP listens only on the
interface by which the rank reaches the scheduler.
"""

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mindformers_core.communication.shared_segments import shared_file

__all__ = ["Line", "connect_ranks"]

PATIENCE = 60.0  # seconds until all ranks have to be there
_STRANGER = 2.0  # seconds that one who connects has to say who it is
_TOKEN = 32  # bytes


@dataclass(frozen=True)
class Line:
    """What joins this rank to another one.

    Attributes:
        socket: a connected socket.
        files: on one host, file descriptors of shared memory: of what this rank writes, and of what the other one does.
    """

    socket: object
    files: tuple | None

    def close(self):
        """Let go of it."""
        self.socket.close()
        for file in self.files or ():
            os.close(file)


def connect_ranks(rank, size, share, patience=PATIENCE):
    """A `Line` to every other rank: `{rank: Line}`. All ranks call it together.

    Args:
        rank: this rank.
        size: number of ranks.
        share: takes this rank's text and returns all ranks' texts in their order; must reach nobody else.
        patience: seconds until all have to be there.

    Raises:
        RuntimeError: ranks that didn't come, or couldn't be reached.
    """
    listeners = [_listen_here(size), _listen_to_hosts(size)]
    lines = {}
    try:
        cards = [json.loads(text) for text in share(json.dumps(_card(*listeners)))]
        token = bytes.fromhex(cards[0]["token"])
        for other in range(rank):
            _connect(rank, other, cards, token, patience, lines)
        _accept(rank, size, listeners, token, patience, lines)
    except BaseException:
        for line in lines.values():
            line.close()
        raise
    finally:
        for listener in listeners:
            listener.close()
    for line in lines.values():
        _tune(line.socket)
    return lines


def _listen_here(size):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"\0mindformers_core." + secrets.token_hex(16).encode())
    listener.listen(size)
    return listener


def _listen_to_hosts(size):
    """Listen by TCP on the interface by which the scheduler is reached; without one, only to this host."""
    scheduler = os.environ.get("MS_SCHED_HOST", "127.0.0.1"), int(os.environ.get("MS_SCHED_PORT", "1"))
    family, kind, _, _, address = socket.getaddrinfo(*scheduler, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it only chooses the way
        own = probe.getsockname()[0]
    return socket.create_server((own, 0), family=family, backlog=size)


def _card(here, to_hosts):
    """How to reach this rank."""
    host = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    return {
        "host": hashlib.sha256(host.encode()).hexdigest()[:32],  # alike where Unix-domain sockets reach
        "unix": here.getsockname()[1:].decode(),
        "tcp": to_hosts.getsockname()[:2],
        "token": secrets.token_hex(_TOKEN),
    }


def _connect(rank, other, cards, token, patience, lines):
    """Connect to a lower rank, say who this is, and add the line to `lines`."""
    card, said = cards[other], token + rank.to_bytes(4, "little")
    try:
        if card["host"] == cards[rank]["host"]:
            lines[other] = line = Line(socket.socket(socket.AF_UNIX), (shared_file(), shared_file()))
            line.socket.connect(b"\0" + card["unix"].encode())
            socket.send_fds(line.socket, [said], line.files)
        else:
            lines[other] = line = Line(socket.create_connection(card["tcp"], timeout=patience), None)
            line.socket.sendall(said)
    except OSError as error:
        raise RuntimeError(f"rank {rank} can't reach rank {other} (TCP {card['tcp']}): {error}") from error


def _accept(rank, size, listeners, token, patience, lines):
    """Add the lines to all higher ranks to `lines`."""
    deadline = time.monotonic() + patience
    while len(lines) < size - 1:
        missing = [other for other in range(rank + 1, size) if other not in lines]
        ready, _, _ = select.select(listeners, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"rank {rank}: after {patience:g} s, ranks {missing} have not connected")
        other, line = _introduced(ready[0].accept()[0], token)
        if other in missing:
            lines[other] = line
        else:
            line.close()


def _introduced(connected, token):
    """Which rank has connected (None for a stranger), and its line."""
    connected.settimeout(_STRANGER)
    length = _TOKEN + 4
    said, files = b"", []
    with suppress(OSError):  # a stranger may say nothing
        said, files, _, _ = socket.recv_fds(connected, length, 2)
    line = Line(connected, tuple(reversed(files)) or None)
    known = len(said) == length and hmac.compare_digest(said[:_TOKEN], token)
    return int.from_bytes(said[_TOKEN:], "little") if known else None, line


def _tune(connected):
    connected.settimeout(None)
    if connected.family == socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 23)  # the kernel takes what it allows
    else:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
