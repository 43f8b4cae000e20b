"""What bare messages between two ranks cost: `Channel` against MindSpore's own CPU point-to-point (MCCL).

By hand: `python benchmarks/transfers.py`. Other benchmarks take `transfer_variants` for figures of the same run.

- `transfer/<way>/<size>`: one message from a rank to the other one, which does nothing but wait for it. The base is
  MCCL's.
- `busy/<way>/<size>`: what ranks pay for messages while both compute: a multiplication of matrices, a send, a second
  multiplication, a receive. The base is the two multiplications alone.
"""

import sys

import harness
import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.ops.auto_generate.gen_ops_prim import dist_comm_irecv_op, dist_comm_isend_op

from mindformers_core.communication import channel, world

COUNTS = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 21)  # of float32 in a message: 4 KB to 8 MB
ROUNDS = 20  # in a run
SIDE = 512  # of the matrices
TITLE = "One message between two ranks, float32"


def main():
    """Time and show; the exit code is 1 where a rank failed."""
    return harness.run_benchmark(__file__, 2, make_variants, TITLE)


def make_variants():
    """Both ways, for all sizes, idle and busy."""
    variants = [*transfer_variants(*COUNTS), _variant("busy/alone", "busy/alone", _busy(), ROUNDS)]
    for count in COUNTS:
        for way, (send, receive) in _ways().items():
            busy = _busy(send, receive, count)
            variants.append(_variant(f"busy/{way}/{_size(count)}", "busy/alone", busy, ROUNDS))
    return variants


def transfer_variants(*counts):
    """The variants `transfer/<way>/<size>` for messages of `counts` float32 values, between ranks 0 and 1.

    All ranks of the world call it together; others than 0 and 1 sit the variants out.
    """
    variants = []
    for count in counts:
        for way, (send, receive) in _ways().items():
            run = _there_and_back(send, receive, count)
            variants.append(
                _variant(f"transfer/{way}/{_size(count)}", f"transfer/mccl/{_size(count)}", run, 2 * ROUNDS)
            )
    return variants


def _variant(name, base, run, calls):
    return harness.Variant(name, base, run, ranks=(0, 1), calls=calls)


def _size(count):
    kilobytes = count * 4 / 1024
    return f"{kilobytes / 1024:g} MB" if kilobytes >= 1024 else f"{kilobytes:g} KB"


def _tensor(count):
    return ms.Tensor(np.ones(count, np.float32))


def _there_and_back(send, receive, count):
    """A function that sends a tensor from rank 0 to rank 1 and back, `ROUNDS` times."""
    rank, x = world().rank, _tensor(count)

    def run():
        for _ in range(ROUNDS):
            if rank == 0:
                send(x)
            y = receive(count)
            if rank == 1:
                send(y)

    return run


def _busy(send=None, receive=None, count=1):
    """A function that computes, and sends and receives meanwhile if told how, `ROUNDS` times."""
    x, matrix = _tensor(count), ms.Tensor(np.ones((SIDE, SIDE), np.float32))

    def run():
        for _ in range(ROUNDS):
            ops.matmul(matrix, matrix)
            if send is not None:
                send(x)
            ops.matmul(matrix, matrix)
            if receive is not None:
                receive(count)

    return run


def _ways():
    """Name -> how to send a tensor to the other rank, and how to receive one of so many values."""
    here = channel()
    other = 1 - here.rank
    return {
        "mccl": (_mccl_send, _mccl_receive),
        "channel": (lambda x: here.send((x,), other, (0,)), lambda _: here.receive(other, (0,))[0]),
    }


def _mccl_send(x):
    dist_comm_isend_op(x, 1 - world().rank, world().group, 0)


def _mccl_receive(count):
    buffer = ops.zeros((count,), ms.float32)
    return dist_comm_irecv_op(buffer, 0, 1 - world().rank, world().group)[0]


if __name__ == "__main__":
    sys.exit(main())
