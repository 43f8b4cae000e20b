"""Channels of several ranks inside this one process, joined as real ones are: for tests without a launch."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from mindformers_core.communication.connecting import connect_ranks
from mindformers_core.communication.point_to_point import Channel
from mindformers_core.communication.point_to_point_cpu import Carrier, Peer


def joined_lines(size, apart=False, before=None, patience=20.0):
    """For every rank what `connect_ranks` gives.

    Args:
        size: number of ranks.
        apart: whether every rank believes to be on a host of its own.
        before: called with all cards before anyone connects.
        patience: seconds to wait.
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
            threads.submit(connect_ranks, rank, size, lambda text, rank=rank: share(rank, text), patience)
            for rank in range(size)
        ]
        return [future.result() for future in made]


def joined_channels(size, apart=False, limit=20.0):
    """A `Channel` for every rank."""
    return [
        Channel(Carrier({other: Peer(line, limit) for other, line in lines.items()}), rank, size)
        for rank, lines in enumerate(joined_lines(size, apart))
    ]
