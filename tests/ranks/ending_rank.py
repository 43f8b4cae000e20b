"""Rank 2 of 3 dies without a word while the others wait for a message of it; these then shut down and leave nothing."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import mindspore as ms
import numpy as np

from mindformers_core.communication import channel, init_distributed, shutdown

DEAD = 2


def at_hand():
    """This process's threads, its Unix-domain sockets (MindSpore's are others), and its shared memory."""
    unix = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    files = []
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        files += [os.readlink(path)] if os.path.lexists(path) else []
    return {*threading.enumerate(), *(file for file in files if file in unix or "mindformers_core" in file)}


world = init_distributed()
before = at_hand()
here = channel()
others = sorted({0, 1, 2} - {world.rank})
for other in others:
    here.send((ms.Tensor(np.full(2_000_000, world.rank, np.float32)),), other, (0,))
for other in others:
    assert here.receive(other, (0,))[0].asnumpy()[-1] == other
if world.rank == DEAD:
    time.sleep(1)  # so that the others wait
    for other in others:
        here.send_object(time.time(), other, (6,))
    os._exit(0)
try:
    here.receive(DEAD, (5, world.rank))
except RuntimeError as error:
    print(f"ended after {time.time() - here.receive_object(DEAD, (6,)):.3f} s with: {error}", flush=True)
other = 1 - world.rank  # these two still reach each other
for _ in range(500):
    here.send((ms.Tensor(np.ones(20_000, np.float32)),), other, (1,))
assert len(at_hand() - before) > 2
for _ in range(500):
    here.receive(other, (1,))
if world.rank == 1:
    with suppress(RuntimeError):
        here.receive(0, (7,))  # until rank 0 has shut down
    time.sleep(0.5)  # for what it prints
shutdown()  # although the channel is kept
assert not at_hand() - before, at_hand() - before
print("nothing is left", flush=True)
os._exit(world.rank)  # at rank 1, the last one, msrun ends everything
