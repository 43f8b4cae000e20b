"""`channel()` of a whole process: dry runs, MindSpore's own operators (with stand-ins), dying ranks, `shutdown()`."""

from collections import defaultdict, deque

import mindspore as ms
import numpy as np
import pytest
from support.message_tensors import bits_of, random_tensor, tensor

from mindformers_core.communication import (
    channel,
    count_collectives,
    init_distributed,
    point_to_point_native as native,
    shutdown,
)
from mindformers_core.communication.point_to_point import Channel


@pytest.fixture
def no_world():
    shutdown()
    yield
    shutdown()


def test_channel_of_a_dry_run(no_world):
    init_distributed("fake", world_size=4, rank=1)
    one = channel()
    assert channel() is one and one.buffered
    with count_collectives() as counts:
        one.send((tensor(8), ms.Tensor(np.ones(3), ms.bfloat16)), 2, (1,), axes=("pp",))
        one.send((tensor(1),), 0, (1,), axes=("pp",))
        one.send((tensor(1),), 0, (1,))
    assert counts == {("send", ("pp",)): (2, 42), ("send", ()): (1, 4)}
    with pytest.raises(RuntimeError, match=r"message \(1,\) from rank 2: this is a dry run"):
        one.receive(2, (1,))
    shutdown()
    init_distributed("fake", world_size=4, rank=1)
    assert channel() is not one


def test_channel_needs_other_ranks(no_world):
    with pytest.raises(RuntimeError, match="init_distributed"):
        channel()
    init_distributed("fake", world_size=1)
    with pytest.raises(RuntimeError, match="one rank"):
        channel()


class Devices:
    """Stands in for MindSpore's operators on devices: what is sent waits for its receiver, in order."""

    def __init__(self, monkeypatch):
        self.rank, self.wires = 0, defaultdict(deque)
        monkeypatch.setattr(native, "dist_comm_isend_op", self.isend)
        monkeypatch.setattr(native, "dist_comm_irecv_op", self.irecv)

    def isend(self, x, rank, group, tag):
        assert (group, tag) == ("a_group", 0) and x.dtype not in (ms.bool_, ms.int16, ms.uint16)
        self.wires[self.rank, rank].append(x.copy())
        return x, self

    def irecv(self, buffer, tag, rank, group):
        x = self.wires[rank, self.rank].popleft()
        assert (group, tag, x.dtype, x.shape) == ("a_group", 0, buffer.dtype, buffer.shape)
        return x, self

    def wait(self):
        """A handle's."""


def test_native_messages(monkeypatch):
    """With stand-ins for the operators: heads say what comes; long heads; dtypes that devices don't carry."""
    devices = Devices(monkeypatch)
    here, there = (Channel(native.Transport("a_group"), rank, 2) for rank in range(2))
    assert not here.buffered
    carried = [dtype for dtype in ms.common.dtype.all_types if dtype not in native.UNKNOWN]
    tensors = [random_tensor(dtype, (2, 3), 1) for dtype in carried if dtype not in (ms.float16, ms.bfloat16)]
    tensors += [ms.Tensor(np.arange(6).reshape(2, 3), dtype) for dtype in (ms.float16, ms.bfloat16)]
    here.send(tensors, 1, (1, 2))
    here.send([tensor(3)] * 100, 1, (3,))  # a head that is longer than a block
    here.send_object("x" * 1019, 1, (4,))
    devices.rank = 1
    assert there.receive_object(0, (4,)) == "x" * 1019
    assert len(there.receive(0, (3,))) == 100
    for x, y in zip(tensors, there.receive(0, (1, 2)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(bits_of(x), bits_of(y))
    with pytest.raises(TypeError, match=r"message \(5,\) to rank 0: devices can't send Complex64"):
        there.send((ms.Tensor(np.ones(2, np.complex64)),), 0, (5,))
    assert not any(devices.wires.values())


@pytest.mark.ranks("ending_rank.py", 3)
def test_a_rank_that_dies_and_shutdown(launches):
    """Under msrun: who waits for a dead rank hears of it at once; `shutdown()` leaves nothing behind."""
    launched = launches["ending_rank.py"].result()
    for rank in (0, 1):
        said = launched.logs[rank]
        assert f"rank {rank} was waiting for message (5, {rank}) from rank 2: it has ended" in said, launched.tail(rank)
        assert float(said.partition("ended after ")[2].partition(" s")[0]) < 10, said  # the limit is a minute
        assert "nothing is left" in said, launched.tail(rank)
