"""Messages between ranks: what arrives, in which order, and what happens when nothing does.

Several ranks in this process; `tests/ranks/case_point_to_point.py` has those that are processes.
"""

import os
import socket
import threading
import time
from contextlib import suppress

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint
from support.channel_pairs import joined_channels, joined_connections
from support.message_tensors import bits_of, random_tensor, tensor

from mindformers_core.communication.connecting import connect_ranks
from mindformers_core.communication.shared_memory import SegmentWriter, read_segment

BIG = 3 << 20  # bytes: more than a socket takes at once


@pytest.fixture(params=["one host", "two hosts"])
def pair(request):
    """The channels of ranks 0 and 1."""
    channels = joined_channels(2, apart=request.param == "two hosts")
    yield channels
    for one in channels:
        one.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_every_dtype_and_shape_arrives_bit_for_bit(pair):
    here, there = pair
    shapes = [(), (1,), (0,), (3, 0, 2), (5, 7), (2, 3, 4, 5), (300_001,)]
    sent = [random_tensor(dtype, shape, 1) for dtype in ms.common.dtype.all_types for shape in shapes]
    assert len(sent) == 19 * 7
    here.send(sent[:70], 1, (1,))
    for x in sent[70:]:
        here.send((x,), 1, (2,))
    here.send((), 1, (3,))
    received = [*there.receive(0, (1,)), *(there.receive(0, (2,))[0] for _ in sent[70:])]
    for x, y in zip(sent, received, strict=True):
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(bits_of(x), bits_of(y))
    assert there.receive(0, (3,)) == ()


def test_views_that_are_not_contiguous(pair):
    here, there = pair
    x = ms.Tensor(np.arange(24, dtype=np.float32).reshape(4, 6))
    views = (mint.transpose(x, 0, 1), x[:, 1:3], x[1:3])
    here.send(views, 1, (0,))
    for view, received in zip(views, there.receive(0, (0,)), strict=True):
        np.testing.assert_array_equal(received.asnumpy(), view.asnumpy())


@pytest.mark.parametrize("size", [4, BIG])
def test_messages_are_taken_in_any_order(pair, size):
    here, there = pair
    tags = [(kind, stage, micro) for kind in (1, 2) for stage in (0, 3) for micro in range(2)]
    for place, tag in enumerate(tags):
        here.send((tensor(size // 4, place),), 1, tag)
    here.send((tensor(1, 100),), 1, tags[0])
    for place in (5, 0, 7, 1, 6, 4, 2, 3):
        assert there.receive(0, tags[place])[0].asnumpy().tolist() == [place] * (size // 4)
    assert there.receive(0, tags[0])[0].asnumpy() == [100]
    for value in range(3):
        here.send((tensor(1, value),), 1, (8,))
    here.send((), 1, (9,))
    there.receive(0, (9,))  # so that the others have come before they are asked for
    assert [there.receive(0, (8,))[0].asnumpy().item() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("size", [4, BIG])
def test_neither_end_shares_memory(pair, size):
    """What was sent may be overwritten at once, and what was received stays when more comes."""
    here, there = pair
    x, received = tensor(size), []
    for value in range(10):
        x.asnumpy()[:] = value  # in place
        here.send((x,), 1, (0,))
        x.asnumpy()[:] = -1
        if value % 3 == 0:  # so that memory is used again
            received += there.receive(0, (0,))
    while len(received) < 10:
        received += there.receive(0, (0,))
    assert [(y.asnumpy().min(), y.asnumpy().max()) for y in received] == [(value, value) for value in range(10)]
    y = received[0]
    y += 1
    assert received[1].asnumpy()[0] == 1


def test_sends_never_wait(pair):
    """Both send far more than a socket holds before anyone receives; nothing is left behind."""
    threads = threading.active_count()
    for value in range(8):
        for me, one in enumerate(pair):
            one.send((tensor(BIG // 4, value), tensor(20_000, -value)), 1 - me, (value,))
            for small in range(50):
                one.send((tensor(10_000, small),), 1 - me, (value, small))
    for value in range(8):
        for me, one in enumerate(pair):
            for small in reversed(range(50)):
                assert one.receive(1 - me, (value, small))[0].asnumpy()[-1] == small
            big, medium = one.receive(1 - me, (value,))
            assert (big.asnumpy() == value).all() and (medium.asnumpy() == -value).all()
    for one in pair:
        one.close()
    assert threading.active_count() == threads


def test_closing_lets_what_was_sent_arrive(pair):
    here, there = pair
    for value in range(200):
        here.send((tensor(50_000, value),), 1, (value,))
    closing = threading.Thread(target=here.close)
    closing.start()
    for value in range(200):
        assert there.receive(0, (value,))[0].asnumpy()[-1] == value
    closing.join()
    with pytest.raises(RuntimeError, match=r"rank 1 was waiting for message \(200,\) from rank 0: it has ended"):
        there.receive(0, (200,))


def test_memory_is_used_again():
    here, there = joined_channels(2)
    for size in range(BIG // 8, BIG, BIG // 16):  # ever larger
        here.send((tensor(size // 4),), 1, (size,))
        there.receive(0, (size,))
    for value in range(50):
        for _ in range(3):
            here.send((tensor(BIG // 4, value),), 1, (value,))
            assert here._transport.segments.in_use[-1][1] < 3.1 * BIG
        for _ in range(3):
            there.receive(0, (value,))
    here.close(), there.close()


def test_many_messages_on_their_way_take_few_files():
    before = open_files()
    here, there = joined_channels(2)
    for value in range(400):
        here.send((tensor(65_536 + 512 * value, value),), 1, (value,))
    assert open_files() - before < 30
    for value in range(400):
        assert (there.receive(0, (value,))[0].asnumpy() == value).all()
    assert open_files() - before < 30
    here.close(), there.close()


def test_segments_of_all_sizes_keep_what_they_hold():
    memory, random, sent = np.zeros(1 << 25, np.uint8), np.random.default_rng(1), []
    writer = SegmentWriter(memory)
    for most in [*range(1, 40), *range(40, -1, -1)] * 5:  # on their way at once
        while len(sent) <= most:
            sizes = 2 ** random.integers(0, 18, 2) + random.integers(-1, 2, 2)
            pieces = [random.integers(0, 256, size, np.uint8) for size in sizes]
            sent.append((writer.write(pieces), pieces))
        while len(sent) > most:
            place, pieces = sent.pop(random.integers(len(sent)))
            memories = [np.empty_like(piece) for piece in pieces]
            read_segment(memory, place, memories)
            assert all((x == y).all() for x, y in zip(memories, pieces, strict=True))


def test_messages_beyond_the_shared_memory():
    writer = SegmentWriter(np.zeros(1 << 16, np.uint8))
    writer.write([np.zeros(40000, np.uint8)])
    with pytest.raises(
        ValueError, match="40,0.. bytes doesn't fit into 65,536 bytes of shared memory, of which 40,960 "
    ):
        writer.write([np.zeros(40000, np.uint8)])


def test_objects(pair):
    here, there = pair
    value = {"step": 3, "names": ["a", "ü"], "none": None, "loss": 0.1}
    here.send_object(value, 1, (1,))
    here.send_object("x" * BIG, 1, (1,))
    here.send((tensor(),), 1, (2,))
    assert there.receive_object(0, (1,)) == value
    with pytest.raises(TypeError, match=r"message \(1,\) from rank 0 is an object"):
        there.receive(0, (1,))
    with pytest.raises(TypeError, match=r"message \(2,\) from rank 0 consists of tensors"):
        there.receive_object(0, (2,))
    with pytest.raises(TypeError):
        here.send_object({1, 2}, 1, (1,))


def test_wrong_arguments(pair):
    here, _ = pair
    with pytest.raises(TypeError, match=r"item 1 of the message \(7,\) to rank 1 is of type ndarray"):
        here.send((tensor(), np.ones(3)), 1, (7,))
    for tag in (3, [1], (1, 2.0), (True,), ("a",)):
        with pytest.raises(TypeError, match="should be a tuple of whole numbers"):
            here.send((), 1, tag)
        with pytest.raises(TypeError, match="should be a tuple of whole numbers"):
            here.receive(1, tag)
    for rank in (0, 2, -1, "1"):
        with pytest.raises(ValueError, match="message .* between rank 0 and rank .*: should be another of 2"):
            here.send((), rank, (1,))


def test_a_peer_that_ends(pair):
    here, there = pair
    here.send((tensor(BIG),), 1, (1,))
    threading.Timer(0.3, here.close).start()
    start = time.monotonic()
    with pytest.raises(
        RuntimeError,
        match=r"rank 1 was waiting for message \(4, 5\) from rank 0: it has ended .*; other .* came: \(1,\)$",
    ):
        there.receive(0, (4, 5))
    assert time.monotonic() - start < 10  # the limit is 20
    assert there.receive(0, (1,))[0].shape == (BIG,)
    for _ in range(2):  # TCP sees it only at the second message
        with pytest.raises(RuntimeError, match=r"rank 1 can't send message \(6,\) to rank 0: it has ended"):
            for _ in range(100):
                there.send((tensor(),), 0, (6,))
                time.sleep(0.01)
    with pytest.raises(RuntimeError, match="the channel is closed"):
        here.send((tensor(),), 1, (1,))
    with pytest.raises(RuntimeError, match="the channel is closed"):
        here.receive(1, (1,))


def test_a_peer_that_ends_in_the_middle_of_a_message():
    here, there = joined_channels(2, apart=True)
    connected = here._transport.connections[1].socket
    connected.sendall((1000).to_bytes(4, "little") + b'{"tag": [1]')
    here.close()
    with pytest.raises(RuntimeError, match=r"message \(1,\) from rank 0: it has ended"):
        there.receive(0, (1,))
    with pytest.raises(RuntimeError, match="the channel is closed"):  # not: the rest, taken for a message
        there.receive(0, (1,))


def test_waiting_has_a_limit():
    here, there = joined_channels(2, limit=0.3)
    here.send((tensor(),), 1, (1,))
    with pytest.raises(RuntimeError, match=r"message \(2,\) from rank 0: nothing has come for 0.3 s; other .* \(1,\)$"):
        there.receive(0, (2,))
    here.send((tensor(),), 1, (2,))  # it was only late
    assert there.receive(0, (2,))[0].shape == (4,)
    here.close(), there.close()


def test_four_ranks_in_one_process_and_nothing_is_left():
    before, threads = open_files(), threading.active_count()
    for apart in (False, True):
        channels = joined_channels(4, apart)
        assert open_files() > before
        for me, one in enumerate(channels):
            for other in set(range(4)) - {me}:
                one.send((tensor(BIG // 4, 10 * me + other),), other, (0,))
        for me, one in enumerate(channels):
            for other in set(range(4)) - {me}:
                assert one.receive(other, (0,))[0].asnumpy()[5] == 10 * other + me
        for one in channels:
            one.close()
            one.close()
    assert (open_files(), threading.active_count()) == (before, threads)


def test_strangers_are_turned_away():
    """Whoever doesn't know the token gets no connection; the ranks find each other all the same."""
    strangers = []

    def intrude(addresses):
        for said in (bytes(36), bytes(32) + (1).to_bytes(4, "little"), b"short"):
            for family, address in (
                (socket.AF_UNIX, b"\0" + addresses[0]["unix"].encode()),
                (socket.AF_INET, tuple(addresses[0]["tcp"])),
            ):
                stranger = socket.socket(family)
                stranger.connect(address)
                stranger.sendall(said)
                strangers.append(stranger)

    before = open_files()
    connections = joined_connections(2, before=intrude)
    for stranger in strangers:
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    connections[0][1].write([b"hello"])
    assert connections[1][0].read(5) == b"hello"
    for one in (connections[0][1], connections[1][0], *strangers):
        one.close()
    assert open_files() == before


def test_only_this_host_is_listened_to_without_a_scheduler_elsewhere(monkeypatch):
    monkeypatch.delenv("MS_SCHED_HOST", raising=False)
    addresses = []
    for connections in joined_connections(2, before=addresses.extend):
        next(iter(connections.values())).close()
    assert [address["tcp"][0] for address in addresses] == ["127.0.0.1"] * 2


def test_a_rank_that_does_not_come():
    before = open_files()
    with pytest.raises(RuntimeError, match=r"rank 0: after 0.2 s, ranks \[1, 2\] have not connected"):
        connect_ranks(0, 3, lambda text: [text] * 3, 20.0, 0.2)
    gone = '{"host": "", "unix": "", "tcp": ["127.0.0.1", 1], "token": "00"}'
    with pytest.raises(RuntimeError, match=r"rank 1 can't reach rank 0 \(TCP \['127.0.0.1', 1\]\)"):
        connect_ranks(1, 2, lambda text: [gone, text], 20.0, 0.2)
    assert open_files() == before
