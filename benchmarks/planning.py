"""What planning costs before anything runs: redistributions, tables of pipelines, the graph of a large model.

Pure Python, in one process. Each is beside a part of the same work that is written by hand, as directly as can be.
"""

import sys
from itertools import count, product
from types import SimpleNamespace

import mindspore as ms
from harness import Variant, repeated, run_benchmark

from mindformers_core.capture.capture import capture
from mindformers_core.layout import Layout, bind_layout, layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.operators import tensor_meta
from mindformers_core.pipeline.schedules.named import schedule_class
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.checking import check_plan
from mindformers_core.propagation.propagate import propagate
from mindformers_core.redistribution import plan_redistribution
from mindformers_core.sharding.declare import collect_declarations

TITLE = "Planning, in Python"
PLANS = 1000  # in a run
RANKS, MICRO_BATCHES, CHUNKS = 64, 1024, 4  # of the table
LAYERS = 80  # of the model, with Llama 3 70B's sizes
SIZES = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
LIMITS = {"redistribution/new": 100e-6, "table/planned": 10.0, "capture/80_layers": 15.0}  # seconds
CHECK_LIMIT = 0.03  # of planning: what its type checker may take


def make_variants():
    """All of them."""
    mesh, sizes = DeviceMesh((2, 4), ("dp", "tp")), count(1)
    source, target = Layout.on(mesh, [("dp",), ("tp",)]), Layout.on(mesh, [("dp",), ()])

    def known():
        plan_redistribution(source, target, (8, 8), "float32")

    def new():
        plan_redistribution(source, target, (8 * next(sizes), 16), "float32")

    return [
        Variant("redistribution/known", "redistribution/known", repeated(known, PLANS), calls=PLANS),
        Variant("redistribution/new", "redistribution/known", repeated(new, PLANS), calls=PLANS),
        Variant("table/steps", "table/steps", steps_by_hand),
        Variant("table/planned", "table/steps", planned),
        *(_capture(layers) for layers in (1, LAYERS)),
        *_plan_and_check(LAYERS),
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
    model, ids = _llama(layers)
    return Variant(f"capture/{layers}_layers", "capture/1_layers", lambda: capture(model, ids, labels=ids))


def _llama(layers):
    with ms.DeviceCtx("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_hidden_layers=layers, **SIZES))
    return model, tensor_meta((16, 1024), "int32")


def _plan_and_check(layers):
    """Layouts of 8 x 8 data and tensor parallelism with sequence parallelism; and the type checker over the plan."""
    mesh, (model, ids) = DeviceMesh((8, 8), ("dp", "tp")), _llama(layers)
    declarations = collect_declarations(model, SimpleNamespace(batch_axes="dp", sequence_parallel=True), None)
    graph = capture(model, ids, labels=ids)
    arguments = {value.id: Layout.on(mesh, ((), ())) for value in tree_leaves(graph.arguments)}
    stored = {}
    for use in (use for call in graph.calls() for use in call.parameters):
        stored[use.path] = bind_layout(layout(), mesh, len(use.value.shape))
    for path, declared in declarations.items():
        for name, given in declared.weights.items():
            stored[f"{path}.{name}"] = bind_layout(given, mesh)

    def plan_anew():
        return propagate(graph, mesh, arguments, stored, declarations)

    plan = plan_anew()
    return [
        Variant(f"propagate/{layers}_layers", "capture/1_layers", plan_anew),
        Variant(f"check/{layers}_layers", "capture/1_layers", lambda: check_plan(plan, final=True)),
    ]


def remarks(results):
    """Each limit beside what was measured."""
    lines = []
    for name, limit in LIMITS.items():
        verdict = "kept" if results[name].median < limit else "EXCEEDED"
        lines.append(f"- {name}: {results[name].median:.3g} s; limit {limit:g} s, {verdict}")
    names = [f"{part}/{LAYERS}_layers" for part in ("check", "capture", "propagate")]
    check, *planning = [results[name].median for name in names]
    share = check / sum(planning)
    verdict = "kept" if share < CHECK_LIMIT else "EXCEEDED"
    lines.append(f"- {names[0]}: {share:.2%} of capture and propagation; limit {CHECK_LIMIT:.0%}, {verdict}")
    return lines, share < CHECK_LIMIT and all(results[name].median < limit for name, limit in LIMITS.items())


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, 1, make_variants, TITLE, remarks))
