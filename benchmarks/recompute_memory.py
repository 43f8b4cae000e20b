"""What one variant of recompute.py holds in memory: run as a process of its own, since a peak is a process's.

    python benchmarks/recompute_memory.py full pynative

prints a JSON object with MB (10^6 bytes): `resident`, by how much the peak resident memory of a step is over what was
resident before it; in PyNative also `kept`, all that is there between forward and backward pass and wasn't before, and
`predicted`, what the plan says of that. A step of a short text and, in PyNative, an evaluation come first, so that what
MindSpore takes once is there: on CPU an operator that broadcasts keeps four times the bytes of its float32 result. So
is the room for gradients, which activations can use while there are none yet: hence a batch in which they are larger.
"""

import gc
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mindspore as ms
import numpy as np
import psutil
from mindspore import Tensor

from mindformers_core.analysis.prediction import Prediction
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication import init_distributed
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.program.plan import operators_in_order
from mindformers_core.recompute import recompute
from mindformers_core.tensor_parallel import programs, shard
from mindformers_core.zero import hsdp, value_and_grad

LAYERS, HIDDEN, LENGTH, HEADS, VOCABULARY = 4, 1024, 512, 8, 512
TIMED_LAYERS = 2  # of the models that are timed: all variants are alive then
BATCH, MEMORY_BATCH = 1, 2  # sequences in a step that is timed, and in one whose memory is measured
CONFIG = LlamaConfig(
    hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
)  # fmt: skip
SHORT = 16  # length of the text of the first step
STEPS = 2
SEED = 5
SETTINGS = {  # (variant, mode) -> what recompute() is asked for
    ("none", "pynative"): {},
    ("selective", "pynative"): {"select": "*.self_attn"},
    ("budget_0.5", "pynative"): {"budget": 0.5},
    ("full", "pynative"): {"full": True},
    ("none", "jit"): {},
    ("selective", "jit"): {"select": "*.self_attn"},
    ("full", "jit"): {"full": True},
}


def model_of(variant, mode, layers=LAYERS):
    """The model of a variant: a Llama, sharded over a mesh of one, with the same parameters every time."""
    with ms.DeviceCtx("meta"):
        net = LlamaForCausalLM(replace(CONFIG, num_hidden_layers=layers)).set_train()
    return recompute(shard(net, init_device_mesh((1, 1), ("dp", "tp")), seed=SEED), **SETTINGS[variant, mode])


def text(batch, length):
    """Ids and labels."""
    ids = np.random.default_rng(SEED).integers(0, VOCABULARY, (2, batch, length)).astype(np.int32)
    return tuple(map(Tensor, ids))


def step_of(net, mode):
    """A function of ids and labels: loss and gradients, as tensors, when they are there."""
    gradient_of = value_and_grad(hsdp(net), compiled=mode == "jit")

    def step(*inputs):
        loss, gradients = gradient_of(*inputs)
        for one in (loss, *gradients):
            one.asnumpy()  # waits for it; a copy of all would be in the peak
        return loss, *gradients

    return step


def peak_over_before(net, mode):
    """Bytes by which the peak resident memory of steps is over what was resident right before them."""
    step, inputs = step_of(net, mode), text(MEMORY_BATCH, LENGTH)
    step(*text(MEMORY_BATCH, SHORT))
    if mode == "pynative":
        net(*inputs)
    gc.collect()
    before = psutil.Process().memory_info().rss
    for _ in range(STEPS):
        step(*inputs)
    status = Path("/proc/self/status").read_text()  # the other counter, ru_maxrss, begins at what the parent has
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) - before


def kept_bytes(net):
    """Bytes of all tensors that are there between forward and backward pass of a call, and weren't before it."""
    inputs, found = text(MEMORY_BATCH, LENGTH), {}
    net(*inputs)
    before = set(map(place_of, live_tensors()))

    def forward(*given):
        with ms.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # or Python wouldn't know them
            loss = net(*given)
        gc.collect()
        found.update({place_of(tensor): tensor.untyped_storage().nbytes() for tensor in live_tensors()})
        return loss

    ms.value_and_grad(forward, None, net.trainable_params())(*inputs)
    return sum(nbytes for place, nbytes in found.items() if place not in before)


def live_tensors():
    """All tensors with memory that Python holds."""
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]  # isinstance would ask weak proxies


def place_of(tensor):
    """Where its memory is."""
    return tensor.untyped_storage().data_ptr()


def predicted_bytes(net):
    """The same by the plan of the program that ran last."""
    plan = programs(net)[-1].plan
    again = frozenset(place.key for place in operators_in_order(plan) if place.entry in place.plan.keepers)
    return Prediction(plan, algorithm_of).saved_bytes(again)


def main(variant, mode):
    """Print what this variant holds."""
    init_distributed()
    figures = {"resident": peak_over_before(model_of(variant, mode), mode)}
    if mode == "pynative":
        net = model_of(variant, mode)
        figures |= {"kept": kept_bytes(net), "predicted": predicted_bytes(net)}
    print(json.dumps({name: nbytes / 1e6 for name, nbytes in figures.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
