"""Ranks simulated by threads of this process: the program of a rank runs as it is, collectives are array operations.

One thread runs at a time, until its rank has to wait for another one; the order of the threads is fixed, so that a run
repeats bit by bit. MindSpore's flags of PyNative's autograd belong to a thread, so do the communication states of ours.
"""

import threading
from collections import Counter, defaultdict, deque

import numpy as np
from mindspore import Tensor, get_rng_state, set_rng_state

from mindformers_core.communication.raw import RawCollective
from mindformers_core.communication.world import rank_of, world
from mindformers_core.redistribution.arrays import exchange
from mindformers_core.scopes import errors_at

_STACK = 64 << 20  # bytes of a thread's stack: MindSpore's backward pass is recursive


class _Stopped(BaseException):
    """Ends the thread of a rank after another one has failed."""


class Desync(RuntimeError):
    """Ranks wait for each other, or issue different collectives."""


class SimulatedRanks:
    """A world of ranks, each a thread.

    Args:
        size: number of ranks.
        device_target: see `rank_of`.
        plans: a dict, of plans that ranks share, by all that they follow from. Default: every rank plans for itself.

    Attributes:
        size, device_target, plans: as given.
    """

    def __init__(self, size, device_target=None, plans=None):
        self.size, self.device_target, self.plans = size, device_target, plans
        self._turns = [threading.Lock() for _ in range(size)]  # released when a rank may run
        for turn in self._turns:
            turn.acquire()
        self._ready, self._waiting = deque(range(size)), {}  # waiting rank -> what it waits for, as text
        self._numbers = Counter()  # ranks of a group -> number of its collectives so far
        self._meetings = defaultdict(dict)  # ranks of a group -> rank -> (issued, array), of the next one
        self._results, self._boxes = {}, defaultdict(deque)  # rank -> array; (sender, receiver) -> messages
        self._error = None

    def run(self, function):
        """Call `function(rank)` for every rank; returns the list of results.

        Raises:
            The first error of a rank, which it names. Desync: a RuntimeError.
        """
        results, state = [None] * self.size, get_rng_state()

        def work(rank):
            self._turns[rank].acquire()
            set_rng_state(state)
            try:
                self._check()
                with rank_of(self.size, rank, self, self.device_target):
                    results[rank] = function(rank)
            except _Stopped:
                pass
            except BaseException as error:  # SystemExit, too: the other ranks wait for this one
                error.args = f"rank {rank}: {error}", *error.args[1:]
                self._fail(error)
            self._pass_on()

        before = threading.stack_size(_STACK)
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        threading.stack_size(before)
        self._pass_on()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def meet(self, rank, group, kind, arguments, array):
        """The result on `rank` of a collective of a `Group`, after all its ranks have come."""
        ranks = tuple(sorted(group.ranks))
        number, meeting = self._numbers[ranks] + 1, self._meetings[ranks]
        issued = kind, group.axes, array.shape, str(array.dtype), arguments
        meeting[rank] = issued, array
        if len(meeting) < len(ranks):
            self._wait(rank, f"{_shown(issued)}, number {number} over {group}")
            return self._results.pop(rank)
        self._numbers[ranks] = number
        kinds = {each: [other for other in ranks if meeting[other][0] == each] for each, _ in meeting.values()}
        if len(kinds) > 1:
            said = "; ".join(f"ranks {', '.join(map(str, some))}: {_shown(each)}" for each, some in kinds.items())
            self._fail(Desync(f"collective {number} over {group} differs among its ranks: {said}"))
            raise _Stopped  # callers explain the errors of a collective's backend in words of their own
        del self._meetings[ranks]
        arrays = [meeting[other][1] for other in group.ranks]
        where = f"{_shown(issued)}, number {number} over {group}: "
        with errors_at(where, kinds=(IndexError, ValueError)):  # shapes that don't fit
            found = exchange(kind, arrays, *arguments)
        self._results.update(zip(group.ranks, found, strict=True))
        self._wake(other for other in group.ranks if other != rank)
        return self._results.pop(rank)

    def send(self, rank, to_rank, message):
        """Leave a message for another rank."""
        self._boxes[rank, to_rank].append(message)
        if self._waiting.get(to_rank) == _message_text(rank):
            self._wake([to_rank])

    def receive(self, rank, from_rank):
        """The next message from a rank, which this rank waits for."""
        box = self._boxes[from_rank, rank]
        while not box:
            self._wait(rank, _message_text(from_rank))
        return box.popleft()

    def _wait(self, rank, what):
        self._waiting[rank], state = what, get_rng_state()  # of the process: each rank draws as if alone
        self._pass_on()
        self._turns[rank].acquire()
        set_rng_state(state)
        self._check()

    def _wake(self, ranks):
        for rank in ranks:
            del self._waiting[rank]
            self._ready.append(rank)

    def _pass_on(self):
        """Give the turn to the next rank that can run."""
        if not self._ready and self._waiting:
            said = "; ".join(f"rank {rank} in {what}" for rank, what in sorted(self._waiting.items())[:8])
            self._fail(Desync(f"the ranks wait for each other: {said}"))
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _fail(self, error):
        """Keep the first error, and end all ranks."""
        self._error = self._error or error
        self._wake(list(self._waiting))

    def _check(self):
        if self._error is not None:
            raise _Stopped


def _shown(issued):
    kind, axes, shape, dtype, arguments = issued
    return f"{kind} over {', '.join(axes)} of {dtype} {list(shape)} {arguments or ''}".rstrip()


def _message_text(rank):
    return f"a message from rank {rank}"


class SimulatedCollective(RawCollective):
    """A collective of ranks that are threads."""

    def eager(self, x, *sizes):
        here, array = world(), x.asnumpy()
        if sizes:
            return Tensor.from_numpy(self._routed(array, *sizes[0]))
        found = here.ranks.meet(here.rank, self.group, self.kind, self.arguments, array)
        return Tensor.from_numpy(found.copy()) if found.ndim else Tensor(np.array(found))  # or a number

    def _routed(self, array, sent, received):
        """A `dispatch` or `combine`: parts of one size, of which as many rows are filled."""
        parts = np.zeros((self.size, self.most, *array.shape[1:]), array.dtype)
        for part, rows in zip(parts, np.split(array, np.cumsum(sent))):
            part[: len(rows)] = rows
        here, result = world(), np.zeros((self.rows_of_result(received), *array.shape[1:]), array.dtype)
        found = here.ranks.meet(here.rank, self.group, self.kind, self.arguments, parts)
        result[: sum(received)] = np.concatenate([part[:count] for part, count in zip(found, received)])
        return result


class SimulatedTransport:
    """Messages between ranks that are threads."""

    buffered = True

    def __init__(self, here):
        self.rank, self.ranks = here.rank, here.ranks

    def send(self, rank, head, tensors):
        """Send a message; returns at once."""
        self.ranks.send(self.rank, rank, (head, [tensor.asnumpy().copy() for tensor in tensors]))

    def receive(self, rank):
        """The next message from a rank: its head, and its tensors."""
        head, arrays = self.ranks.receive(self.rank, rank)
        return head, tuple(map(Tensor, arrays))

    def close(self):
        """Nothing to do."""
