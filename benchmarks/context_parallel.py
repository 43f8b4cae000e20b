"""Attention on one card, by blocks against plain operators of MindSpore: CPU seconds of forward and backward passes.

Both take turns in one process on one core; a ratio is one of medians.
"""

import os
import statistics
import sys
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from mindformers_core.models.positions import static_ranges
from mindformers_core.tensor_parallel.attention import attention

HEADS, SIZE, ROUNDS = 8, 64, 7
CASES = {(8, 128): 0.9, (1, 1024): 0.8}  # (batch, length) -> the greatest ratio


def plain(query, key, value, mask):
    """Causal attention with a tensor of all scores."""
    query, key, value = (ops.transpose(each, (0, 2, 1, 3)) for each in (query, key, value))
    scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) * SIZE**-0.5
    return ops.transpose(ops.matmul(ops.softmax(scores + mask, -1), value), (0, 2, 1, 3))


def by_blocks(query, key, value, mask):
    """The operator; its mask is what it knows of places."""
    return attention(query, key, value, *static_ranges(query.shape[1]), SIZE**-0.5, (0,), (None, 0), True)[0]


def ratio(batch, length):
    """Milliseconds of both, and their ratio; both give the same gradients."""
    draw = np.random.default_rng(0)
    *given, slope = (Tensor(draw.normal(size=(batch, length, HEADS, SIZE)).astype(np.float32)) for _ in range(4))
    mask = Tensor(np.triu(np.full((length, length), -1e30, np.float32), 1))
    passes = [
        ms.value_and_grad(lambda *given, way=way: (way(*given, mask) * slope).sum(), (0, 1, 2))
        for way in (plain, by_blocks)
    ]
    for wanted, found in zip(*(each(*given)[1] for each in passes)):
        np.testing.assert_allclose(found.asnumpy(), wanted.asnumpy(), atol=1e-5 * np.abs(wanted.asnumpy()).max())
    seconds = [[], []]
    for _ in range(ROUNDS):
        for each, spent in zip(passes, seconds):
            start = time.process_time()
            each(*given)
            spent.append(time.process_time() - start)
    whole, blocks = (1000 * statistics.median(each) for each in seconds)
    return whole, blocks, blocks / whole


def main():
    os.sched_setaffinity(0, {0})
    ms.runtime.launch_blocking()
    is_slow = False
    print("| batch | length | plain, ms | by blocks, ms | ratio |\n| --: | --: | --: | --: | --: |")
    for (batch, length), limit in CASES.items():
        whole, blocks, found = ratio(batch, length)
        print(f"| {batch} | {length} | {whole:.0f} | {blocks:.0f} | {found:.2f} |")
        is_slow |= found > limit
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
