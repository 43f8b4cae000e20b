"""What planning costs before anything runs: redistributions, tables of pipelines, the graph of a large model.

Pure Python, in one process. Each is beside a part of the same work that is written by hand, as directly as can be.
"""

import sys
from itertools import count, product

import mindspore as ms
from harness import Variant, run_benchmark

from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.operators import tensor_meta
from mindformers_core.pipeline.schedules.named import schedule_class
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType
from mindformers_core.redistribution import plan_redistribution
from mindformers_core.tensor_parallel.capturing.capture import capture

TITLE = "Planning, in Python"
PLANS = 1000  # in a run
RANKS, MICRO_BATCHES, CHUNKS = 64, 1024, 4  # of the table
LAYERS = 80  # of the model, with Llama 3 70B's sizes
SIZES = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
LIMITS = {"redistribution/new": 100e-6, "table/planned": 10.0, "capture/80_layers": 15.0}  # seconds


def make_variants():
    """All of them."""
    mesh, sizes = DeviceMesh((2, 4), ("dp", "tp")), count(1)
    source, target = Layout.on(mesh, [("dp",), ("tp",)]), Layout.on(mesh, [("dp",), ()])

    def known():
        for _ in range(PLANS):
            plan_redistribution(source, target, (8, 8), "float32")

    def new():
        for _ in range(PLANS):
            plan_redistribution(source, target, (8 * next(sizes), 16), "float32")

    return [
        Variant("redistribution/known", "redistribution/known", known, calls=PLANS),
        Variant("redistribution/new", "redistribution/known", new, calls=PLANS),
        Variant("table/steps", "table/steps", steps_by_hand),
        Variant("table/planned", "table/steps", planned),
        *(_capture(layers) for layers in (1, LAYERS)),
    ]


def steps_by_hand():
    """The steps that compute, of all ranks, in any order: forward and backward."""
    stages = range(RANKS * CHUNKS)
    return [
        [MetaStep(micro, kind, stage) for micro, stage in product(range(MICRO_BATCHES), stages)]
        for kind in (MetaStepType.FWD, MetaStepType.BWD)
    ]


def planned():
    """Interleaved 1F1B: ordered, lowered to sends and receives, and validated."""
    return schedule_class("interleaved_1f1b").planned(RANKS, MICRO_BATCHES, CHUNKS)


def _capture(layers):
    with ms.DeviceCtx("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_hidden_layers=layers, **SIZES))
    ids = tensor_meta((16, 1024), "int32")
    return Variant(f"capture/{layers}_layers", "capture/1_layers", lambda: capture(model, ids, labels=ids))


def remarks(results):
    """Each limit beside what was measured."""
    lines = []
    for name, limit in LIMITS.items():
        verdict = "kept" if results[name].median < limit else "EXCEEDED"
        lines.append(f"- {name}: {results[name].median:.3g} s; limit {limit:g} s, {verdict}")
    return lines, all(results[name].median < limit for name, limit in LIMITS.items())


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, 1, make_variants, TITLE, remarks))
