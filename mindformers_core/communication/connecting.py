"""Connecting every rank to every other one, by Unix-domain sockets on one host and by TCP between hosts (Linux).

Every rank listens until all ranks are connected. A rank that connects has to send a random token, which the ranks
share beforehand; other processes are rejected. A Unix-domain socket has a name without a file, and TCP listens only on
the interface by which the rank reaches the scheduler.
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
from pathlib import Path

import numpy as np
from mindspore import Tensor, ops

from mindformers_core.communication.connection import Connection

CONNECT_TIMEOUT = 60.0  # seconds until all ranks have to be connected
_INTRODUCTION_TIMEOUT = 2.0  # seconds in which a process that connects has to send the token
_TOKEN = 32  # bytes
_ADDRESS = 512  # bytes of the text of a rank's addresses


def connect_ranks(rank, size, share, timeout, connect_timeout=CONNECT_TIMEOUT):
    """A `Connection` to every other rank: `{rank: Connection}`. A collective call: every rank makes it.

    Args:
        size: number of ranks.
        share: takes this rank's text and returns the texts of all ranks by rank; no other process may read them.
        timeout: seconds without a byte after which a read of a connection fails.
        connect_timeout: seconds until all ranks have to be connected.

    Raises:
        RuntimeError: ranks that didn't connect, or couldn't be reached.
    """
    listeners = [_listen_on_host(size), _listen_to_hosts(size)]
    sockets = {}
    try:
        addresses = [json.loads(text) for text in share(json.dumps(_own_addresses(*listeners)))]
        token = bytes.fromhex(addresses[0]["token"])
        for other in range(rank):
            _connect(rank, other, addresses, token, connect_timeout, sockets)
        _accept(rank, size, listeners, token, connect_timeout, sockets)
    except BaseException:
        for connected in sockets.values():
            connected.close()
        raise
    finally:
        for listener in listeners:
            listener.close()
    return {other: Connection(connected, timeout) for other, connected in sorted(sockets.items())}


def all_gather_texts(text, index, size, group_name):
    """The short texts of all ranks in the order of their indices, by MindSpore's all-reduce of a process group."""
    table = np.zeros((size, _ADDRESS), np.float32)
    table[index, : len(text)] = np.frombuffer(text.encode(), np.uint8)
    whole = ops.AllReduce(group=group_name)(Tensor(table)).asnumpy().astype(np.uint8)
    return [row.tobytes().rstrip(b"\0").decode() for row in whole]


def _listen_on_host(size):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"\0mindformers_core." + secrets.token_hex(16).encode())
    listener.listen(size)
    return listener


def _listen_to_hosts(size):
    """Listen by TCP on the interface by which the scheduler is reached; without one, only to this host."""
    scheduler = os.environ.get("MS_SCHED_HOST", "127.0.0.1"), int(os.environ.get("MS_SCHED_PORT", "1"))
    family, kind, _, _, address = socket.getaddrinfo(*scheduler, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: the kernel only chooses the interface
        own = probe.getsockname()[0]
    return socket.create_server((own, 0), family=family, backlog=size)


def _own_addresses(on_host, to_hosts):
    host = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    return {
        "host": hashlib.sha256(host.encode()).hexdigest()[:32],  # equal where Unix-domain sockets connect
        "unix": on_host.getsockname()[1:].decode(),
        "tcp": to_hosts.getsockname()[:2],
        "token": secrets.token_hex(_TOKEN),
    }


def _connect(rank, other, addresses, token, timeout, sockets):
    """Connect to a lower rank, send the token and this rank, and add the socket to `sockets`."""
    address = addresses[other]
    try:
        if address["host"] == addresses[rank]["host"]:
            sockets[other] = socket.socket(socket.AF_UNIX)
            sockets[other].connect(b"\0" + address["unix"].encode())
        else:
            sockets[other] = socket.create_connection(address["tcp"], timeout=timeout)
        sockets[other].sendall(token + rank.to_bytes(4, "little"))
    except OSError as error:
        raise RuntimeError(f"rank {rank} can't reach rank {other} (TCP {address['tcp']}): {error}") from error


def _accept(rank, size, listeners, token, timeout, sockets):
    """Add the sockets to all higher ranks to `sockets`."""
    deadline = time.monotonic() + timeout
    while len(sockets) < size - 1:
        missing = [other for other in range(rank + 1, size) if other not in sockets]
        ready, _, _ = select.select(listeners, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"rank {rank}: after {timeout:g} s, ranks {missing} have not connected")
        connected = ready[0].accept()[0]
        other = _introduced_rank(connected, token)
        if other in missing:
            sockets[other] = connected
        else:
            connected.close()


def _introduced_rank(connected, token):
    """The rank that has connected; None for a process without the token."""
    connected.settimeout(_INTRODUCTION_TIMEOUT)
    introduction = b""
    with suppress(OSError):  # other processes may send nothing
        introduction = connected.recv(_TOKEN + 4)
    known = len(introduction) == _TOKEN + 4 and hmac.compare_digest(introduction[:_TOKEN], token)
    return int.from_bytes(introduction[_TOKEN:], "little") if known else None
