"""Messages between ranks that are processes of their own."""

import hashlib
import random

import mindspore as ms
import numpy as np
from mindspore import ops
from support.launch import on_ranks

from mindformers_core.communication import channel, count_collectives, world

DTYPES = (np.float32, np.float16, np.int64, np.bool_, np.uint8)


def message(draw):
    """`(tag, arrays)` of up to 3 arrays, most of them small."""
    arrays = []
    for _ in range(draw.randint(0, 3)):
        size = draw.choice((1, 10, 1000, 30_000)) if draw.random() < 0.97 else 600_000
        bits = np.frombuffer(draw.randbytes(size), np.uint8) % 2
        arrays.append(bits.astype(draw.choice(DTYPES)).reshape(draw.choice(((-1,), (1, -1), (size, 1)))))
    return (draw.randint(0, 3), draw.randint(0, 9)), arrays


def checksum(arrays):
    """Of values, dtypes and shapes."""
    said = [f"{array.dtype} {array.shape}".encode() + array.tobytes() for array in arrays]
    return hashlib.sha256(b"".join(said)).digest()


@on_ranks(4, nightly=(2,))
def case_channel_random_messages():
    """1000 messages in all, from everyone to everyone; every rank takes them in an order of its own."""
    here, size = channel(), world().size
    others = [rank for rank in range(size) if rank != here.rank]
    number = 1000 // (size * (size - 1) * 5) + 1
    own = random.Random(here.rank)
    for turn in range(5):
        sent = {other: random.Random(f"{turn} {here.rank} {other}") for other in others}
        for other in others * number:
            tag, arrays = message(sent[other])
            here.send(tuple(map(ms.Tensor.from_numpy, arrays)), other, tag)
        expected = []
        for other in others:
            coming = random.Random(f"{turn} {other} {here.rank}")
            messages = [message(coming) for _ in range(number)]
            for tag in {tag for tag, _ in messages}:
                expected.append((other, tag, [arrays for its_tag, arrays in messages if its_tag == tag]))
        own.shuffle(expected)
        for other, tag, of_tag in expected:
            for arrays in of_tag:
                received = [x.asnumpy() for x in here.receive(other, tag)]
                assert checksum(received) == checksum(arrays), (turn, other, tag)


@on_ranks(2, nightly=(4,))
def case_channel_big_messages_both_ways():
    """Everyone sends 40 MB to the next rank and to the one before, and only then receives; collectives in between."""
    here, size = channel(), world().size
    after, before = (here.rank + 1) % size, (here.rank - 1) % size
    reduce = ops.AllReduce(group=world().group)
    with count_collectives() as counts:
        for turn in range(5):
            x = ms.Tensor(np.full((1000, 1000), 10 * turn + here.rank, np.float32))
            here.send((x, x + 100), after, (turn, 0), axes=("pp",))
            here.send((x, x + 200), before, (turn, 1), axes=("pp",))
            assert reduce(ms.Tensor([1.0], ms.float32)).asnumpy() == size
    assert counts == {("send", ("pp",)): (10, 80_000_000)}
    for turn in reversed(range(5)):
        for origin, way in ((before, 0), (after, 1)):
            x, y = here.receive(origin, (turn, way))
            assert (x.asnumpy() == 10 * turn + origin).all()
            assert (ops.relu(y).asnumpy() == 10 * turn + origin + 100 * (way + 1)).all()


@on_ranks(2)
def case_channel_to_compiled_graphs():
    """What comes goes into a gradient, in PyNative and compiled; what goes out comes from one."""
    here = channel()
    other = 1 - here.rank

    def function(x, w):
        return ops.matmul(x, w) * 2

    w = ms.Tensor(np.ones((64, 64), np.float32))
    for run in (function, ms.jit(function)):
        gradient = ms.grad(run, 1)
        for size in (8, 4096):
            x = ms.Tensor(np.full((size, 64), here.rank + 1, np.float32))
            here.send((run(x, w),), other, (0,))
            y = here.receive(other, (0,))[0]
            np.testing.assert_array_equal(y.asnumpy(), np.full((size, 64), 128.0 * (other + 1), np.float32))
            np.testing.assert_allclose(gradient(y, w).asnumpy(), np.full((64, 64), 256.0 * size * (other + 1)))


@on_ranks(2)
def case_channel_objects():
    """The same channel whoever asks; objects and tensors with one tag keep their order."""
    here = channel()
    other = 1 - here.rank
    assert channel() is here and here.buffered
    for turn in range(3):
        here.send_object({"turn": turn, "rank": here.rank}, other, (1, 1))
        here.send((ms.Tensor([turn]),), other, (1, 1))
    for turn in range(3):
        assert here.receive_object(other, (1, 1)) == {"turn": turn, "rank": other}
        assert here.receive(other, (1, 1))[0].asnumpy() == [turn]
