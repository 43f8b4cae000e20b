"""The last rank goes wrong in one collective of a step, as the argument says; all ranks should end with one report.

`desync.py FAULT CALL TIMEOUT CHECK STEP`: FAULT is a function below; CALL the collective of the step, counted from 1,
forward and backward, at which it goes wrong; CHECK 1 or 0; STEP what is run: `model`, `compiled`, `message`, `plain`
(collectives without a program) or `large` (those go through shared memory).
"""

import ctypes
import os
import signal
import sys
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from mindformers_core import communication
from mindformers_core.communication.raw import RawCollective
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig
from mindformers_core.models.llama import LlamaForCausalLM
from mindformers_core.tensor_parallel import jit, shard

fault, at, timeout, check, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1", sys.argv[5]
world = communication.init_distributed(timeout=timeout, check_collectives=check)
mesh = init_device_mesh((world.size // 2, 2), ("dp", "tp"))
original, waiting = RawCollective.__call__, []


def skipped(collective, x):
    return x if collective.kind == "all_reduce" else original(collective, x)


def reordered(collective, x):
    waiting.append((collective, x))  # issued after the next one
    return x


def other_shape(collective, x):
    return original(collective, ops.cat((x, x), 0))[: x.shape[0]]


def other_dtype(collective, x):
    return ops.cast(original(collective, ops.cast(x, ms.float16)), x.dtype)


def other_kind(collective, x):
    return communication.AllGather(mesh, "tp", 0).forward(x)[: x.shape[0]]


def other_group(collective, x):
    axis = "dp" if collective.group.axes == ("tp",) else "tp"
    return communication.AllReduce(mesh, axis).forward(x)


def extra(collective, x):
    return original(collective, original(collective, x))


def killed(collective, x):
    os.kill(os.getpid(), signal.SIGKILL)


def gone(collective, x):
    os._exit(0)  # which msrun doesn't take for an error


def raises(collective, x):
    raise KeyError("the cause")


def stopped(collective, x):
    os.kill(os.getpid(), signal.SIGSTOP)


def stuck_asleep(collective, x):
    time.sleep(1000)


def stuck_busy(collective, x):
    while True:
        pass


def stuck_with_lock(collective, x):
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time in vain
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # holds the interpreter's lock


def slow(collective, x):
    time.sleep(timeout + 3)
    return original(collective, x)


def healthy(collective, x):
    time.sleep(timeout / 2)
    return original(collective, x)


def plant():
    print(f"planted at {time.time()}", flush=True)


def call(collective, x):
    """The call of a collective on the rank that goes wrong."""
    call.count += 1
    if call.count == at:
        plant()
        return globals()[fault](collective, x)
    result = original(collective, x)
    while waiting:
        original(*waiting.pop())
    return result


def model_step():
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=32,
        max_position_embeddings=8,
    )  # fmt: skip
    with ms.DeviceCtx("meta"):
        net = LlamaForCausalLM(config)
    shard(net, mesh, seed=1)
    ids = Tensor(np.arange(16).reshape(2, 8) % 32, ms.int32)
    step, total = ms.value_and_grad(net, None, net.trainable_params()), communication.AllReduce(mesh, "dp")
    return lambda: total(step(ids, ids)[0].to_local())


def compiled_step():
    reduce, x = communication.AllReduce(mesh, "tp"), Tensor(np.ones((4, 4), np.float32))

    @jit
    def compiled_part(x):
        return reduce(x) + 1

    def step():
        if world.rank == world.size - 1 and call.count:
            plant()
            globals()[fault](None, x)
        call.count = 1
        return compiled_part(x).asnumpy()

    return step


def message_step():
    channel, other = communication.channel(), 1 - world.rank
    tensors = (Tensor(np.ones((4, 4), np.float32)),)

    def step():
        if world.rank and call.count:
            plant()
            globals()[fault](None, tensors[0])
        call.count = 1
        channel.send(tensors, other, (1,))
        return channel.receive(other, (1,))

    return step


def plain_step(size=4):
    collectives = [communication.AllReduce(mesh, "tp") for _ in range(3)]
    x = Tensor(np.ones((size, size), np.float32))

    def step():
        for collective in collectives:
            collective(x)

    return step


STEPS = {"model": model_step, "compiled": compiled_step, "message": message_step, "plain": plain_step}
call.count = 0
run = plain_step(300) if what == "large" else STEPS[what]()
run()
run()
if world.rank == world.size - 1 and what not in ("compiled", "message"):
    call.count, RawCollective.__call__ = 0, call
run()
run()
print("all steps are done", flush=True)
