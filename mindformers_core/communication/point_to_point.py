"""Messages between two ranks, outside of compiled graphs: what pipeline stages send each other.

`channel()` gives this process's `Channel`. How messages travel is the backend's affair: `point_to_point_cpu`
(connections of our own), `point_to_point_native` (MindSpore's operators) or `point_to_point_fake` (dry runs).
"""

import weakref
from collections import defaultdict, deque

from mindspore import Tensor

from mindformers_core.communication.counter import record_send
from mindformers_core.communication.world import process_state, world

__all__ = ["Channel", "channel"]

LIMIT = 600.0  # seconds


def channel(limit=LIMIT):
    """This process's `Channel` to all other ranks of the world, until `shutdown()` or the end of the process.

    At the first call the ranks find each other: **all ranks of the world make it together**, also those that will send
    nothing. Later calls return the same channel and can be made by any rank.

    Args:
        limit: seconds without any sign from a living rank after which `receive` gives up; counts at the first call.

    Raises:
        RuntimeError: `init_distributed()` was not called, the world has one rank, or ranks didn't come.
    """
    memo = process_state().memo(__name__)
    if "keeper" not in memo:
        memo["keeper"] = _Keeper(_make_channel(limit))
    return memo["keeper"].channel


class Channel:
    """Messages to and from the other ranks, matched by tag; get it from `channel()`.

    Attributes:
        buffered: whether `send` returns at once, whatever the receiver does. If not (HCCL, NCCL), two ranks must
            receive in the order in which the other one sends, and send and receive in an order that can't block.
    """

    def __init__(self, carrier, rank, size):
        self.rank, self.size = rank, size
        self.buffered = carrier.buffered
        self._carrier = carrier
        self._mail = defaultdict(deque)  # (rank, tag) -> what came but was not asked for yet

    def send(self, tensors, to_rank, tag, axes=()):
        """Send tensors as one message. They may be overwritten as soon as this returns.

        Counted by `count_collectives()` as one call of kind `"send"`, with all tensors' bytes.

        Args:
            tensors: tuple of plain local tensors, of any dtypes and shapes; may be empty.
            to_rank: global rank of the receiver.
            tag: tuple of whole numbers by which the receiver asks for the message.
            axes: the mesh axes to count it under, e.g. `("pp",)`.

        Raises:
            TypeError: something else than tensors, or another kind of tag.
            ValueError: no such rank, or this one.
            RuntimeError: the receiver has ended, or the channel is closed.
        """
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                what = type(tensor).__name__
                raise TypeError(f"item {place} of the message {tag} to rank {to_rank} is of type {what}, not a Tensor")
        self._send({}, tensors, to_rank, tag)
        record_send(axes, sum(tensor.nbytes for tensor in tensors))

    def receive(self, from_rank, tag):
        """The tensors of the message `tag` from a rank, as a tuple; waits for it.

        Messages can be asked for in another order than they were sent in; those of one rank with the same tag come in
        the order in which they were sent. The tensors are new ones, with memory of their own.

        Raises:
            TypeError, ValueError: as `send`; also if it was sent by `send_object`.
            RuntimeError: the sender has ended, or nothing came within the limit.
        """
        head, tensors = self._receive(from_rank, tag)
        if "object" in head:
            raise TypeError(f"message {tag} from rank {from_rank} is an object: take it with receive_object()")
        return tensors

    def send_object(self, value, to_rank, tag):
        """Send what JSON can hold: see `send`. It isn't counted.

        Raises:
            TypeError: JSON can't hold the value.
        """
        self._send({"object": value}, (), to_rank, tag)

    def receive_object(self, from_rank, tag):
        """The value of the message `tag` that a rank sent with `send_object` (tuples come as lists): see `receive`."""
        head, _ = self._receive(from_rank, tag)
        if "object" not in head:
            raise TypeError(f"message {tag} from rank {from_rank} consists of tensors: take it with receive()")
        return head["object"]

    def close(self):
        """Let go of all connections, when what was sent is on its way. Done by `shutdown()` and at exit."""
        self._carrier.close()

    def _send(self, head, tensors, to_rank, tag):
        self._check(to_rank, tag)
        try:
            self._carrier.send(to_rank, {"tag": tag, **head}, tensors)
        except (ConnectionError, TimeoutError) as error:
            raise RuntimeError(f"rank {self.rank} can't send message {tag} to rank {to_rank}: {error}") from error

    def _receive(self, from_rank, tag):
        self._check(from_rank, tag)
        wanted = self._mail[from_rank, tag]
        while not wanted:
            try:
                head, tensors = self._carrier.receive(from_rank)
            except (ConnectionError, TimeoutError) as error:
                waiting = f"rank {self.rank} was waiting for message {tag} from rank {from_rank}"
                raise RuntimeError(f"{waiting}: {error}{self._unread(from_rank)}") from error
            self._mail[from_rank, tuple(head["tag"])].append((head, tensors))
        message = wanted.popleft()
        if not wanted:
            del self._mail[from_rank, tag]
        return message

    def _check(self, rank, tag):
        if not isinstance(tag, tuple) or not all(type(part) is int for part in tag):
            raise TypeError(f"tag {tag!r} of a message: should be a tuple of whole numbers")
        if rank == self.rank or rank not in range(self.size):
            raise ValueError(
                f"message {tag} between rank {self.rank} and rank {rank!r}: should be another of {self.size}"
            )

    def _unread(self, rank):
        tags = [tag for sender, tag in self._mail if sender == rank and self._mail[sender, tag]]
        return f"; other messages of it came: {', '.join(map(str, tags[:8]))}" if tags else ""


class _Keeper:
    """What the memo holds: when `shutdown()` drops it, or the process ends, the channel is closed, whoever has it."""

    def __init__(self, kept):
        self.channel = kept
        weakref.finalize(self, kept.close)


def _make_channel(limit):
    here = world()
    if here.size == 1:
        raise RuntimeError("a channel joins ranks, but this world has one rank: start several with msrun")
    if here.backend == "cpu":
        from mindformers_core.communication import point_to_point_cpu as backend
    elif here.backend == "native":
        from mindformers_core.communication import point_to_point_native as backend
    else:
        from mindformers_core.communication import point_to_point_fake as backend
    return Channel(backend.make_carrier(limit), here.rank, here.size)
