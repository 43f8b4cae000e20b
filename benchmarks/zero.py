"""Data parallelism and ZeRO on 2 ranks against one process with the same batch, and a flat all-reduce by hand.

A stack of Llama decoder layers: forward, backward and optimizer. `single` is one process with the whole batch, rank 0,
while rank 1 waits; in all others a rank takes half of it. `flat_all_reduce` is what one writes without this package:
all gradients in one tensor, one all-reduce of MindSpore, slices of it for the optimizer. That all have the same
parameters after some steps is checked before any is timed. Under jit the forward pass is compiled and PyNative
differentiates it, everywhere: on CPU that is twice as fast as a graph with the gradient in it. `bare` are the
collectives alone, of as many bytes as the model has. `_of_4` has four micro-steps, between which sums of parts are
kept, or (`_whole`) whole sums.
"""

import sys

import mindspore as ms
import numpy as np
from harness import Variant, ratio_remarks, repeated, run_benchmark
from mindspore import Tensor, nn, ops
from tensor_parallel_models import Stack

from mindformers_core import communication
from mindformers_core.communication import world
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig
from mindformers_core.models.decoder import DecoderLayer
from mindformers_core.models.positions import places_seen
from mindformers_core.models.rotary import rotary_tables
from mindformers_core.sharding.initialize import materialize
from mindformers_core.tensor_parallel import shard
from mindformers_core.zero import hsdp, value_and_grad

DP = 2
# Every compiled variant keeps its memory: operators that broadcast keep index lists of four times their result. So one
# narrow layer, with a wide feed-forward part, which broadcasts nothing, few heads and short texts, which keep scores
# small. Tokens are many, since plain data parallelism doesn't share out the update.
LAYERS, HIDDEN, LENGTH, BATCH = 1, 128, 32, 128
TITLE = f"{LAYERS} decoder layer, hidden {HIDDEN}, length {LENGTH}, batch {BATCH}, float32, AdamWeightDecay, dp {DP}"
CONFIG = LlamaConfig(
    hidden_size=HIDDEN, intermediate_size=6 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
    vocab_size=HIDDEN, max_position_embeddings=LENGTH,
)  # fmt: skip
SEED = 5
RATE = 1e-3
STEPS = 3  # of the check
SETTLING_STEPS = (
    12  # after it: MindSpore's CPU optimizer is half as fast in its first 15 calls, which it tries sizes in
)
TOLERANCE = 1e-5  # of a parameter after them, relative to the largest value in it
MODES = ("pynative", "jit")
OURS = {  # name -> what hsdp() is called with
    "ddp": {"shard_size": 1},
    "level1": {"shard_size": DP, "optimizer_level": "level1"},
    "level2": {"shard_size": DP, "optimizer_level": "level2"},
    "level3": {"shard_size": DP, "optimizer_level": "level3"},
    "level3_keep": {"shard_size": DP, "optimizer_level": "level3", "reshard_after_forward": False},
    "level2_of_4": {"shard_size": DP, "optimizer_level": "level2", "accumulate_grad_step": 4},
    "level2_of_4_whole": {
        "shard_size": DP, "optimizer_level": "level2", "accumulate_grad_step": 4, "gradient_accumulation_shard": False,
    },
}  # fmt: skip
BY_HAND = "flat_all_reduce"
LIMITS = (  # of a variant's time over another one's of the same mode
    ("ddp", "single", 0.583),  # PyTorch's DDP on gloo, on such a machine
    ("level3_keep", "single", 0.781),  # its FSDP2, without and with resharding
    ("level3", "single", 0.837),
    ("ddp", BY_HAND, 1.05),
    ("level1", BY_HAND, 1.05),
)
BARE_CALLS = 5  # of a collective in one repeat


def make_variants():
    """All variants, once they are checked to leave the single process's parameters."""
    x = np.random.default_rng(SEED).normal(size=(BATCH, LENGTH, HIDDEN)).astype(np.float32)
    whole, share = Tensor(x), Tensor(np.split(x, DP)[world().rank])
    tables = (*rotary_tables(LENGTH, CONFIG.head_dim, CONFIG.rope_theta), *places_seen(LENGTH, (0,))[1])
    truth = parameters_after_steps(*single_of((whole, *tables), False))
    variants = []
    for mode in MODES:
        is_compiled = mode == "jit"
        made = {"single": single_of((whole, *tables), is_compiled), BY_HAND: by_hand_of((share, *tables), is_compiled)}
        made |= {name: ours_of((share, *tables), is_compiled, **asked) for name, asked in OURS.items()}
        for name, (net, step) in made.items():
            check_agreement(f"{name}/{mode}", net, step, truth)
            ranks = (0,) if name == "single" else None
            for _ in range(SETTLING_STEPS):
                step()
            variants.append(Variant(f"{name}/{mode}", f"single/{mode}", step, ranks=ranks))
    return variants + bare_variants(sum(values.size for values in truth))


def make_net():
    """The model, with the same parameters every time."""
    with ms.DeviceCtx("meta"):
        net = Stack([DecoderLayer(CONFIG, number) for number in range(1, LAYERS + 1)])
    materialize(net, SEED)
    return net


def optimizer_of(parameters):
    """The optimizer of all variants."""
    return nn.AdamWeightDecay(parameters, RATE)


def gradients_of(net, is_compiled):
    """A function that gives the loss and the gradients of a Cell without this package, PyNative or compiled."""

    def forward(*inputs):
        return net(*inputs)

    return ms.value_and_grad(ms.jit(forward) if is_compiled else forward, None, net.trainable_params())


def single_of(inputs, is_compiled):
    """The model, and a function that takes a step of one process."""
    net = make_net()
    gradient_of, optimizer = gradients_of(net, is_compiled), optimizer_of(net.trainable_params())

    def step():
        _, gradients = gradient_of(*inputs)
        optimizer(gradients)
        finish(net)

    return net, step


def by_hand_of(inputs, is_compiled):
    """The same for data parallelism by hand."""
    net = make_net()
    weights = net.trainable_params()
    gradient_of, optimizer = gradients_of(net, is_compiled), optimizer_of(weights)
    all_reduce = ops.AllReduce()
    sizes = [weight.size for weight in weights]

    def step():
        _, gradients = gradient_of(*inputs)
        flat = all_reduce(ops.cat([gradient.reshape(-1) for gradient in gradients])) * (
            1 / DP
        )  # faster than a division
        pieces = ops.split(flat, sizes)
        optimizer(tuple(piece.reshape(weight.shape) for piece, weight in zip(pieces, weights)))
        finish(net)

    return net, step


def ours_of(inputs, is_compiled, **asked):
    """The same for `hsdp()`; the batch is cut into the micro-steps that are asked for."""
    x, *tables = inputs
    micro_batches = [Tensor(part) for part in np.split(x.asnumpy(), asked.get("accumulate_grad_step", 1))]
    mesh = init_device_mesh((DP, 1), ("dp", "tp"))
    net = hsdp(shard(make_net(), mesh["tp"]), mesh=mesh, **asked)
    gradient_of, optimizer = value_and_grad(net, compiled=is_compiled), optimizer_of(net.trainable_params())

    def step():
        for part in micro_batches:
            _, gradients = gradient_of(part, *tables)
        optimizer(gradients)
        finish(net)

    return net, step


def finish(net):
    """Return when the parameters are computed: a graph runs on behind its call."""
    for weight in net.trainable_params():
        weight.asnumpy()


def parameters_after_steps(net, step):
    """The parameters' values, in their order."""
    for _ in range(STEPS):
        step()
    return [weight.asnumpy().copy() for weight in net.trainable_params()]


def check_agreement(name, net, step, truth):
    """Compare this rank's part of the parameters after some steps with the single process's.

    Raises:
        ValueError: one differs.
    """
    for _ in range(STEPS):
        step()
    for weight, expected in zip(net.trainable_params(), truth, strict=True):
        if weight.shape != expected.shape:
            expected = expected[weight.layout.local_slices(expected.shape, world().rank)]
        error = np.abs(weight.asnumpy() - expected).max() / np.abs(expected).max()
        if not error <= TOLERANCE:
            raise ValueError(f"{name}: {weight.name} differs from one process's by {error:.1e} of its largest value")


def bare_variants(count):
    """The collectives alone on `count` float32 values: MindSpore's all-reduce, and what the package calls."""
    mesh, whole = init_device_mesh((DP,), ("dp",)), Tensor(np.ones(count, np.float32))
    part = Tensor(np.ones(count // DP, np.float32))
    calls = {
        "mindspore_all_reduce": (ops.AllReduce(), whole),
        "all_reduce": (communication.AllReduce(mesh, "dp"), whole),
        "reduce_scatter": (communication.ReduceScatter(mesh, "dp", 0), whole),
        "all_gather": (communication.AllGather(mesh, "dp", 0), part),
    }
    runs = {
        name: repeated(lambda collective=collective, x=x: collective(x).asnumpy(), BARE_CALLS)
        for name, (collective, x) in calls.items()
    }
    return [Variant(f"bare/{name}", "bare/mindspore_all_reduce", run, calls=BARE_CALLS) for name, run in runs.items()]


def remarks(results):
    """Ratios that have a limit, and what bare collectives take of a step; `(lines, whether all limits are kept)`."""
    limits = [(f"{name}/{mode}", f"{base}/{mode}", limit) for mode in MODES for name, base, limit in LIMITS]
    lines, all_kept = ratio_remarks(results, limits)
    for name, result in results.items():
        if name.startswith("bare/"):
            shares = (f"{result.median / results[f'single/{mode}'].median:.3f} of single/{mode}" for mode in MODES)
            lines.append(f"- {name}: {result.median * 1e3:.1f} ms, {' and '.join(shares)}")
    return lines, all_kept


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, DP, make_variants, TITLE, remarks))
