"""Messages between two ranks, outside of compiled graphs, as pipeline stages send them.

`channel()` gives this process's `Channel`. The backend's `Transport` carries the messages: `point_to_point_cpu`
(sockets and shared memory), `point_to_point_native` (MindSpore's operators) or the one below (dry runs).
"""

import weakref
from collections import defaultdict, deque
from contextlib import nullcontext

from mindspore import Tensor

from mindformers_core.communication.counter import record
from mindformers_core.communication.point_to_point_cpu import make_transport as make_cpu_transport
from mindformers_core.communication.point_to_point_native import Transport as NativeTransport
from mindformers_core.communication.simulated import SimulatedTransport
from mindformers_core.communication.world import process_state, world

LIMIT = 600.0  # seconds


def channel(limit=LIMIT):
    """This process's `Channel` to all other ranks of the world, until `shutdown()` or the end of the process.

    The first call is collective: **all ranks of the world make it**, also ranks that will send nothing; it connects
    them. Later calls return the same channel and can be made by any rank.

    Args:
        limit: seconds without a byte from a living rank after which `receive` fails; counts at the first call.

    Raises:
        RuntimeError: `init_distributed()` was not called, the world has one rank, or ranks didn't connect.
    """
    memo = process_state().memo(__name__)
    if "owner" not in memo:
        here = world()
        if here.size == 1:
            raise RuntimeError("a channel joins ranks, but this world has one rank: start several with msrun")
        memo["owner"] = _ChannelOwner(Channel(_TRANSPORTS[here.backend](limit), here.rank, here.size))
    return memo["owner"].channel


class Channel:
    """Messages to and from the other ranks, matched by tag; get it from `channel()`.

    Attributes:
        buffered: whether `send` returns before the receiver reads the message. If not (HCCL, NCCL), two ranks must
            receive in the order in which the other one sends, and send and receive in an order that can't block.
    """

    def __init__(self, transport, rank, size):
        self.rank, self.size = rank, size
        self.buffered = transport.buffered
        self._transport = transport
        self._unread = defaultdict(deque)  # (rank, tag) -> messages that arrived before `receive` asked for them

    def send(self, tensors, to_rank, tag, axes=(), number=0):
        """Send tensors as one message. The caller may overwrite them after the call.

        Counted by `count_collectives()` as one call of kind `"send"`, with all tensors' bytes.

        Args:
            tensors: tuple of plain local tensors, of any dtypes and shapes; may be empty.
            to_rank: global rank of the receiver.
            tag: tuple of whole numbers; the receiver passes the same one to `receive`.
            axes: the mesh axes under which the message is counted, e.g. `("pp",)`.
            number: a whole number that travels with them, see `receive_numbered`.

        Raises:
            TypeError: an entry that is not a tensor, or a tag that is not a tuple of whole numbers.
            ValueError: no such rank, or this one.
            RuntimeError: the receiver has ended, or the channel is closed.
        """
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                what = type(tensor).__name__
                raise TypeError(f"item {place} of the message {tag} to rank {to_rank} is of type {what}, not a Tensor")
        self._send({"number": number}, tensors, to_rank, tag)
        record("send", tuple(axes), sum(tensor.nbytes for tensor in tensors))

    def receive(self, from_rank, tag, purpose=""):
        """Wait for the message `tag` from a rank; returns its tensors, a tuple.

        Messages can be received in another order than they were sent; messages of one rank with the same tag arrive in
        the order in which they were sent. The tensors are new ones, with memory of their own. The report of a hang
        shows the purpose.

        Raises:
            TypeError, ValueError: as `send`; also for a message that `send_object` sent.
            RuntimeError: the sender has ended, or no byte arrived within the limit.
        """
        return self.receive_numbered(from_rank, tag, purpose)[0]

    def receive_numbered(self, from_rank, tag, purpose=""):
        """As `receive`: the tensors, and the number that came with them."""
        head, tensors = self._receive(from_rank, tag, purpose)
        if "object" in head:
            raise TypeError(f"message {tag} from rank {from_rank} is an object: take it with receive_object()")
        return tensors, head["number"]

    def send_object(self, value, to_rank, tag):
        """Send a value that JSON can represent: see `send`. The message isn't counted.

        Raises:
            TypeError: JSON can't represent the value.
        """
        self._send({"object": value}, (), to_rank, tag)

    def receive_object(self, from_rank, tag):
        """The value of the message `tag` that a rank sent with `send_object` (a tuple as a list): see `receive`."""
        head, _ = self._receive(from_rank, tag)
        if "object" not in head:
            raise TypeError(f"message {tag} from rank {from_rank} consists of tensors: take it with receive()")
        return head["object"]

    def close(self):
        """Close all connections after the last byte is sent. `shutdown()` and the process's end call this."""
        self._transport.close()

    def _send(self, head, tensors, to_rank, tag):
        self._check(to_rank, tag)
        try:
            self._transport.send(to_rank, {"tag": tag, **head}, tensors)
        except (ConnectionError, TimeoutError) as error:
            failed = f"rank {self.rank} can't send message {tag} to rank {to_rank}: {error}"
            raise RuntimeError(f"{failed}{_report()}") from error

    def _receive(self, from_rank, tag, purpose=""):
        self._check(from_rank, tag)
        wanted, watch = self._unread[from_rank, tag], process_state().watch
        while not wanted:
            with nullcontext() if watch is None else watch.recorder.waiting("receive", (from_rank, self.rank), purpose):
                try:
                    head, tensors = self._transport.receive(from_rank)
                except (ConnectionError, TimeoutError) as error:
                    unread = (known for known, messages in self._unread.items() if messages)
                    came = [str(seen) for sender, seen in unread if sender == from_rank]
                    others = f"; other messages of it came: {', '.join(came[:8])}" if came else ""
                    waiting = f"rank {self.rank} was waiting for message {tag} from rank {from_rank}"
                    raise RuntimeError(f"{waiting}: {error}{others}{_report()}") from error
            self._unread[from_rank, tuple(head["tag"])].append((head, tensors))
        message = wanted.popleft()
        if not wanted:
            del self._unread[from_rank, tag]
        return message

    def _check(self, rank, tag):
        if not isinstance(tag, tuple) or not all(type(part) is int for part in tag):
            raise TypeError(f"tag {tag!r} of a message: should be a tuple of whole numbers")
        if rank == self.rank or rank not in range(self.size):
            raise ValueError(
                f"message {tag} between rank {self.rank} and rank {rank!r}: should be another of {self.size}"
            )


def _report():
    """The report of a hang as further lines of an error; "" where nobody watches."""
    watch = process_state().watch
    return "" if watch is None else f"\n{watch.report()}"


class _ChannelOwner:
    """Held by the memo alone: the channel is closed when `shutdown()` empties the memo, or the process ends."""

    def __init__(self, owned):
        self.channel = owned
        weakref.finalize(self, owned.close)


class _DryRunTransport:
    """Discards every message; has none to receive, since no other rank runs that could send their shapes."""

    buffered = True

    def send(self, rank, head, tensors):
        """Nothing to do."""

    def receive(self, rank):
        """Always an error."""
        raise ConnectionError("this is a dry run (backend 'fake'), in which no other rank sends anything")

    def close(self):
        """Nothing to do."""


_TRANSPORTS = {
    "cpu": make_cpu_transport,
    "native": lambda limit: NativeTransport(world().group),  # the libraries have a limit of their own
    "fake": lambda limit: _DryRunTransport(),
    "simulated": lambda limit: SimulatedTransport(world()),
}
