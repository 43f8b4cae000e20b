"""Channels of several ranks inside this one process, joined as real ones are: for tests without a launch."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from mindformers_core.communication.connecting import connect_ranks
from mindformers_core.communication.point_to_point import Channel
from mindformers_core.communication.point_to_point_cpu import Transport


def joined_connections(size, apart=False, before=None, timeout=20.0):
    """For every rank what `connect_ranks` gives.

    Args:
        size: number of ranks.
        apart: whether every rank believes to be on a host of its own.
        before: called with all addresses before any rank connects.
        timeout: of the connections, in seconds.
    """
    cards, together = [None] * size, threading.Barrier(size)

    def share(rank, text):
        card = json.loads(text)
        cards[rank] = json.dumps({**card, "host": f"host {rank}"} if apart else card)
        together.wait(20)
        if rank == 0 and before is not None:
            before([json.loads(card) for card in cards])
        together.wait(20)
        return cards

    with ThreadPoolExecutor(size) as threads:
        made = [
            threads.submit(connect_ranks, rank, size, lambda text, rank=rank: share(rank, text), timeout, 20.0)
            for rank in range(size)
        ]
        return [future.result() for future in made]


def joined_channels(size, apart=False, limit=20.0):
    """A `Channel` for every rank."""
    with ThreadPoolExecutor(size) as threads:
        transports = threads.map(Transport, range(size), joined_connections(size, apart, timeout=limit))
        return [Channel(transport, rank, size) for rank, transport in enumerate(transports)]
