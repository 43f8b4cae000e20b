"""A sequence that two ranks share, against one process; and attention on one card by blocks, against plain operators.

The model is one decoder layer of our Llama with a text so long that attention is most of its time; `attention` is that
alone, and `attention/both` the same on both ranks at once, by which two processes slow each other down on this machine.
All variants are checked to agree. Afterwards `one_card_attention.py` measures in processes of its own.
"""

import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
from harness import Variant, ratio_remarks, run_benchmark, verdict
from mindspore import Tensor

from mindformers_core.batches import places_of
from mindformers_core.communication import world
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.models.positions import static_ranges
from mindformers_core.sharding.initialize import materialize
from mindformers_core.tensor_parallel import shard
from mindformers_core.tensor_parallel.attention import attention

CP, LENGTH, HIDDEN, HEADS, WORDS, SEED = 2, 6144, 256, 8, 256, 5
ORDER = (0, 3, 1, 2)  # zigzag
TITLE = f"Llama, 1 layer, hidden {HIDDEN}, {HEADS} heads, length {LENGTH}, batch 1, float32, forward and backward, cp 2"
CONFIG = LlamaConfig(
    hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS,
    vocab_size=WORDS, max_position_embeddings=LENGTH,
)  # fmt: skip
TOLERANCE = 1e-5  # of a loss or gradient, relative to the largest value in it
LIMIT, SHARE = 0.62, 0.7  # of two ranks' time over one's, and the least part of it that attention is


def make_variants():
    """All variants, once they are checked to agree."""
    ids = np.random.default_rng(SEED).integers(0, WORDS, (2, 1, LENGTH)).astype(np.int32)
    with ms.DeviceCtx("meta"):
        single, *nets = (LlamaForCausalLM(CONFIG) for _ in range(3))
    materialize(single, SEED)
    whole = [Tensor(each) for each in ids]
    passes = {"single": partial(gradients_of(single), *whole)}
    truth = [each.asnumpy() for each in passes["single"]()]
    own = np.split(places_of(ORDER, LENGTH), CP)[world().rank]
    part, config = [Tensor(each[:, own]) for each in ids], SimpleNamespace(sequence_axes="cp", batch_axes=None)
    for net, algorithm in zip(nets, ("ring", "gather")):
        net.share_sequences(ORDER, algorithm)
        shard(net, init_device_mesh((CP, 1), ("cp", "tp")), config, seed=SEED)
        passes[algorithm] = partial(gradients_of(net), *part)
        for found, wanted in zip(passes[algorithm](), truth, strict=True):
            np.testing.assert_allclose(found.asnumpy(), wanted, atol=TOLERANCE * np.abs(wanted).max())
    passes["attention"] = passes["attention/both"] = attention_alone()
    ranks = {"single": (0,), "attention": (0,)}
    return [Variant(name, "single", run, ranks=ranks.get(name)) for name, run in passes.items()]


def gradients_of(net):
    """A function of ids and labels: loss and gradients, as tensors, when they are there."""
    gradient_of = ms.value_and_grad(net, None, net.trainable_params())

    def step(*inputs):
        loss, gradients = gradient_of(*inputs)
        for each in (loss, *gradients):
            each.asnumpy()
        return loss, *gradients

    return step


def attention_alone():
    """A function that runs forward and backward pass of the attention of a layer."""
    draw = np.random.default_rng(SEED)
    given = [Tensor(draw.normal(size=(1, LENGTH, HEADS, HIDDEN // HEADS)).astype(np.float32)) for _ in range(3)]
    ranges = static_ranges(LENGTH)
    step = ms.value_and_grad(lambda *given: attention(*given, *ranges, 0.2, (0,), (None, 0), True)[0].sum(), (0, 1, 2))
    return lambda: step(*given)[0].asnumpy()


def remarks(results):
    """Ratios to one process, of wall and of CPU time, and what one card says."""
    lines, all_kept = ratio_remarks(results, [("ring", "single", LIMIT), ("gather", "single", LIMIT)])
    single = statistics.median(results["single"].cpu)
    for name in ("ring", "gather"):
        part = statistics.median(results[name].cpu) / CP / single
        lines.append(f"- {name}: CPU time of a rank {part:.3f} of single, which a loaded machine changes less")
    both = results["attention/both"].median / results["attention"].median
    lines.append(f"- the same attention on both ranks at once: {both:.2f} of one; half of that is the least")
    share = results["attention"].median / results["single"].median
    lines.append(f"- attention: {share:.2f} of single; at least {SHARE:g}, {'kept' if share >= SHARE else 'MISSED'}")
    script = Path(__file__).with_name("one_card_attention.py")
    for name, found, limit, more in json.loads(subprocess.run([sys.executable, script], stdout=-1, check=True).stdout):
        lines.append(f"- {name}: {found:.2f}, {more}; {verdict(found, limit)}")
        all_kept = all_kept and found <= limit
    return lines, all_kept and share >= SHARE


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, CP, make_variants, TITLE, remarks))
