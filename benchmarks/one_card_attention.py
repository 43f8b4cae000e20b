"""Attention on one card, by blocks against plain operators of MindSpore: run by context_parallel.py.

Prints a JSON list of (what, ratio, its limit, the figures). Both take turns in one process on one core; ratios are of
medians of CPU seconds. Memory is that of a process of its own, `one_card_attention.py 8192`: by how much the peak of
what is resident is over that before both passes, over what the formula says of tensors. oneDNN keeps a kernel for each
shape of a product, up to 1,024 of them, together 140 MB where they are of AVX-512: that process keeps none.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mindspore as ms
import numpy as np
import psutil
from mindspore import Tensor, ops

from mindformers_core.models.positions import static_ranges
from mindformers_core.tensor_parallel.attention import attention

HEADS, SIZE, ROUNDS = 8, 64, 7
CASES = {(8, 128): 0.8, (1, 1024): 0.8}  # (batch, length) -> the greatest ratio
LONG, ROWS = 8192, 128  # a length, and the queries of its blocks
# At the peak, in the backward pass: query, key, value, output, its gradient and that before the slope, rows of four of
# them, longer ones of two, three gradients; of a block the keys twice and the values, also of the block before, and
# what it adds to the keys, that with a row of 0, in its place, and the sum; its scores, weights or their gradients.
OF_SEQUENCE, OF_BLOCK = 25, 3


def plain(query, key, value, mask):
    """Causal attention with a tensor of all scores."""
    query, key, value = (ops.transpose(each, (0, 2, 1, 3)) for each in (query, key, value))
    scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) * SIZE**-0.5
    return ops.transpose(ops.matmul(ops.softmax(scores + mask, -1), value), (0, 2, 1, 3))


def by_blocks(query, key, value, _):
    """The operator; its mask is what it knows of places."""
    return attention(query, key, value, *static_ranges(query.shape[1]), SIZE**-0.5, (0,), (None, 0), True)[0]


def passes_of(batch, length, ways):
    """For each of `ways` a function that runs both passes, and what they are given."""
    draw = np.random.default_rng(0)
    *given, slope = (Tensor(draw.normal(size=(batch, length, HEADS, SIZE)).astype(np.float32)) for _ in range(4))
    mask = Tensor(np.triu(np.full((length, length), -1e30, np.float32), 1)) if plain in ways else None
    passes = [ms.value_and_grad(lambda *given, way=way: (way(*given, mask) * slope).sum(), (0, 1, 2)) for way in ways]
    return passes, given


def ratio(batch, length):
    """Milliseconds of both; both give the same gradients."""
    passes, given = passes_of(batch, length, (plain, by_blocks))
    for wanted, found in zip(*(each(*given)[1] for each in passes)):
        np.testing.assert_allclose(found.asnumpy(), wanted.asnumpy(), atol=1e-5 * np.abs(wanted.asnumpy()).max())
    seconds = [[], []]
    for _ in range(ROUNDS):
        for each, spent in zip(passes, seconds):
            start = time.process_time()
            each(*given)
            spent.append(time.process_time() - start)
    return [1000 * statistics.median(each) for each in seconds]


def peak(length):
    """Bytes by which the peak of a process is over what it had before both passes."""
    (short,), given = passes_of(1, 256, (by_blocks,))
    short(*given)
    (step,), given = passes_of(1, length, (by_blocks,))
    before = psutil.Process().memory_info().rss
    step(*given)
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) - before


def main():
    os.sched_setaffinity(0, {0})
    ms.runtime.launch_blocking()
    if len(sys.argv) > 1:
        return print(peak(int(sys.argv[1])))
    found = []
    for (batch, length), limit in CASES.items():
        whole, blocks = ratio(batch, length)
        more = f"{blocks:.0f} ms for {whole:.0f}"
        found.append((f"by blocks over plain operators, batch {batch}, length {length}", blocks / whole, limit, more))
    predicted = (OF_SEQUENCE * SIZE + OF_BLOCK * ROWS) * LONG * HEADS * 4
    tensors_only = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
    command = [sys.executable, __file__, str(LONG)]
    measured = int(subprocess.run(command, stdout=subprocess.PIPE, env=tensors_only, check=True).stdout)
    whole = 4 * HEADS * LONG**2
    more = f"{measured / 1e6:.0f} MB for {predicted / 1e6:.0f}, where a tensor of all scores has {whole / 1e6:.0f}"
    found.append((f"peak memory over the predicted one, length {LONG}", measured / predicted, 1.1, more))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
