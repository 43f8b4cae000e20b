"""Pipelines of 2 stages on 2 ranks against one process with the same micro-batches; and what bare transfers cost.

A stack of Llama decoder layers, forward and backward, gradients of all parameters summed over 8 micro-batches. `single`
is the whole stack as one stage on rank 0 while rank 1 waits, `value_and_grad` the same without stages. That all give
the same loss and gradients is checked before any is timed. The ideal beside each ratio is compute and bubble alone: the
simulated makespan, with a forward pass and both halves of a backward pass equally long, over the work of all ranks.
"""

import sys

import mindspore as ms
import numpy as np
from harness import Variant, run_benchmark, verdict
from mindspore import Tensor, nn, ops
from transfers import transfer_variants

from mindformers_core.communication import world
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig
from mindformers_core.models.decoder import DecoderLayer
from mindformers_core.models.positions import places_seen
from mindformers_core.models.rotary import rotary_tables
from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage, Schedule1F1B, simulate
from mindformers_core.pipeline.schedules.named import SCHEDULES, schedule_class
from mindformers_core.pipeline.schedules.placement import PLACEMENTS
from mindformers_core.sharding.initialize import materialize
from mindformers_core.tensor_parallel import jit, shard

STAGES = 2
MICRO_BATCHES = 8
LAYERS, HIDDEN, LENGTH, MICRO_BATCH = 4, 256, 128, 2
TITLE = (
    f"{LAYERS} decoder layers, hidden {HIDDEN}, length {LENGTH}, {MICRO_BATCHES} micro-batches of {MICRO_BATCH}, "
    f"float32, forward and backward, {STAGES} pipeline ranks"
)
CONFIG = LlamaConfig(
    hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8,
    vocab_size=HIDDEN, max_position_embeddings=LENGTH,
)  # fmt: skip
SEED = 5
TOLERANCE = 1e-5  # of a loss or gradient, relative to the largest value in it
CHUNKED = {"interleaved_1f1b": 2, "looped_bfs": 2, "zb_v": 2, "dualpipe_v": 2}  # stages on every rank, where not 1
LIMIT = 0.727  # of 1F1B's time over that of one process: PyTorch's on gloo, on such a machine


class Part(nn.Cell):
    """Some of the layers, by number; with the last one the mean square of what comes out as the loss."""

    def __init__(self, numbers):
        super().__init__()
        self.layers = nn.CellDict([(str(number), DecoderLayer(CONFIG, number + 1)) for number in numbers])
        self.is_last = LAYERS - 1 in numbers

    def construct(self, hidden_states):
        tables = rotary_tables(LENGTH, CONFIG.head_dim, CONFIG.rope_theta)
        _, seen = places_seen(LENGTH, (0,))
        for layer in self.layers.values():
            hidden_states = layer(hidden_states, *tables, *seen)
        return ops.mean(ops.square(hidden_states)) if self.is_last else hidden_states


def make_variants():
    """All variants, once the schedules are checked to agree with the single process."""
    batch = np.random.default_rng(SEED).normal(size=(MICRO_BATCHES * MICRO_BATCH, LENGTH, HIDDEN)).astype(np.float32)
    x = Tensor(batch)
    truth = plain_of(x, is_compiled=False)()
    variants = []
    for mode in ("pynative", "jit"):
        is_compiled, base = mode == "jit", f"single/{mode}"
        steps = {"single": single_of(x, is_compiled), "value_and_grad": plain_of(x, is_compiled)}
        steps |= {name: schedule_of(name, x, is_compiled) for name in SCHEDULES}
        for name, step in steps.items():
            check_agreement(f"{name}/{mode}", step(), truth)
            variants.append(Variant(f"{name}/{mode}", base, step, ranks=None if name in SCHEDULES else (0,)))
    return variants + transfer_variants(MICRO_BATCH * LENGTH * HIDDEN)


def schedule_of(name, x, is_compiled):
    """A function that gives the loss, or None, and the gradients of this rank's stages."""
    kind, chunks = schedule_class(name), CHUNKED.get(name, 1)
    ranks = PLACEMENTS[kind.placement](STAGES * chunks, STAGES)
    own = [stage for stage, rank in enumerate(ranks) if rank == world().rank]
    return run_of(kind, own, STAGES * chunks, init_device_mesh((STAGES,), ("pp",)), x, is_compiled)


def single_of(x, is_compiled):
    """The same for the whole stack as the only stage, so that only what lies between stages makes a difference."""
    return run_of(Schedule1F1B, [0], 1, init_device_mesh((1,), ("pp",), [world().rank]), x, is_compiled)


def run_of(kind, own, stage_num, mesh, x, is_compiled):
    """A function that runs the stages `own` of `stage_num` and gives the loss, or None, and `{name: gradient}`."""
    per_stage, stages = LAYERS // stage_num, []
    for index in own:
        with ms.DeviceCtx("meta"):
            net = Part(range(index * per_stage, (index + 1) * per_stage))
        shard(net, init_device_mesh((1,), ("tp",), [world().rank]), seed=SEED)
        stages.append(PipelineStage(net, index, stage_num, mesh=mesh, compiled=is_compiled))
    schedule = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], MICRO_BATCHES)

    def run():
        for stage in stages:
            stage.zero_gradients()
        loss = schedule.run(x)
        named = {}
        for stage in stages:
            named.update(zip((weight.name for weight in stage.parameters), stage.gradients, strict=True))
        return finished(loss, named)

    return run


def plain_of(x, is_compiled):
    """The same for the whole stack as people write it: `value_and_grad`, micro-batch by micro-batch."""
    with ms.DeviceCtx("meta"):
        net = Part(range(LAYERS))
    materialize(net, SEED)
    weights = net.trainable_params()
    gradient_of = ms.value_and_grad(net, None, weights)

    def step(micro_batch):
        return gradient_of(micro_batch)

    step = jit(step) if is_compiled else step
    micro_batches = [x[start : start + MICRO_BATCH] for start in range(0, len(x), MICRO_BATCH)]

    def run():
        total, summed = step(micro_batches[0])
        for micro_batch in micro_batches[1:]:
            loss, gradients = step(micro_batch)
            total = total + loss
            summed = [one + other for one, other in zip(summed, gradients, strict=True)]
        named = {weight.name: gradient / MICRO_BATCHES for weight, gradient in zip(weights, summed, strict=True)}
        return finished(total / MICRO_BATCHES, named)

    return run


def finished(loss, gradients):
    """The results, once they are computed: a graph runs on behind its call."""
    for gradient in gradients.values():
        gradient.asnumpy()
    return loss, gradients


def check_agreement(name, mine, truth):
    """Compare what a rank has of loss and gradients with the single process.

    Raises:
        ValueError: something differs.
    """
    pairs = [("loss", mine[0], truth[0])] if mine[0] is not None else []
    pairs += [(f"gradient of {label}", gradient, truth[1][label]) for label, gradient in mine[1].items()]
    for label, one, other in pairs:
        one, other = np.asarray(one.asnumpy()), np.asarray(other.asnumpy())
        error = np.abs(one - other).max() / np.abs(other).max()
        if not error <= TOLERANCE:
            raise ValueError(f"{name}: {label} differs from one process's by {error:.1e} of its largest value")


def remarks(results):
    """Every schedule's ratio beside its ideal, and whether 1F1B keeps the limit; `(lines, kept)`."""
    lines, all_kept = [], True
    for mode in ("pynative", "jit"):
        for name in SCHEDULES:
            ratio = results[f"{name}/{mode}"].median / results[f"single/{mode}"].median
            chunks = CHUNKED.get(name, 1)
            table = schedule_class(name).planned(STAGES, MICRO_BATCHES, chunks).table
            ideal = simulate(table).makespan / (3 * MICRO_BATCHES * STAGES * chunks)
            line = f"- {name}/{mode}: {ratio:.3f} of single/{mode}; ideal {ideal:.4f}, {ratio / ideal:.3f} of that"
            if name == "1f1b":
                all_kept = all_kept and ratio <= LIMIT
                line += f"; {verdict(ratio, LIMIT)}"
            lines.append(line)
    return lines, all_kept


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, STAGES, make_variants, TITLE, remarks, timeout=1800))
