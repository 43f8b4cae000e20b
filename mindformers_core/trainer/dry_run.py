"""`train --dry-run`: the recipe's model, sharded and run forward on shapes alone, and what every rank would hold.

One process stands for any number of ranks: the fake communication backend sends nothing, and on MindSpore's meta
device nothing is allocated or computed.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

import mindspore as ms

from mindformers_core.analysis.memory import recomputed_at_once
from mindformers_core.analysis.prediction import saved_bytes
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication import init_distributed
from mindformers_core.communication.world import shutdown
from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.mesh import init_device_mesh
from mindformers_core.recompute.stages import check_stages
from mindformers_core.sharding.inspecting import explain_activations, prepare
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.trainer.data import micro_batch
from mindformers_core.trainer.pipeline_recipe import recipe_timeline
from mindformers_core.trainer.pipeline_step import build_chunks, hsdp_chunks, sharded_model
from mindformers_core.trainer.recipe import MESH_AXES, accumulation_steps, global_batch_size, mesh_shape
from mindformers_core.trainer.zero_recipe import SHARDED, zero_settings
from mindformers_core.zero import memory_report

__all__ = ["RankFacts", "ParameterFact", "dry_run", "pipeline_report", "report"]

_COMPUTED = {  # fields of a memory report's `MemoryEstimate`
    "weights": "weights",
    "parts": "their parts",
    "gradients": "gradients",
    "state": "AdamW state",
    "buckets": "buckets",
}
_ROWS = _COMPUTED | {
    "activations": "activations",
    "recomputed": "computed again at once",
}


@dataclass(frozen=True)
class ParameterFact:
    """One parameter.

    Attributes:
        name: its path.
        global_shape, local_shape, part_shape: whole; as a rank computes with it; of the part that a rank keeps between
            steps, and updates.
        dtype: name of the dtype.
        layout: that of the part, as text.
        reason: why `hsdp()` leaves it whole on the ranks that shard others; empty where it cuts it.
    """

    name: str
    global_shape: tuple
    local_shape: tuple
    part_shape: tuple
    dtype: str
    layout: str
    reason: str = ""


@dataclass(frozen=True)
class RankFacts:
    """What a rank holds.

    Attributes:
        parameters: `ParameterFact`s, each parameter once.
        level: of `hsdp()`, 0 for plain data parallelism.
        shards: number of parts that parameters are cut into.
        bytes: keys of `_ROWS` -> bytes, at the fullest time of a step; activations are those that PyNative keeps for
            the backward pass of all micro-batches that are live at a time, besides one layer's that are computed again.
        activations: lines about what is recomputed and swapped, of one micro-batch.
        summaries: `(stage, stage_summary of its ActivationPolicy)` of the rank's stages.
    """

    parameters: tuple
    level: int
    shards: int
    bytes: dict
    activations: tuple = ()
    summaries: tuple = ()

    @property
    def total(self):
        """All bytes."""
        return sum(self.bytes.values())


def dry_run(recipe):
    """The report, after building, sharding and running the model forward on rank 0 of the recipe's mesh.

    Raises:
        ValueError: anything that would make the real run fail on shapes: a dim that its axes don't divide, …; layers
            and patterns of recompute and swap that are nowhere.
    """
    mesh = init_device_mesh(mesh_shape(recipe), MESH_AXES)
    dp_size = mesh.axis_size("dp")
    micro_batches = accumulation_steps(recipe, dp_size)
    ranks = mesh.group(mesh.rank_list[0], ("pp",))
    timeline = recipe_timeline(recipe) if len(ranks) > 1 else None
    live = timeline.peak_live if timeline else (1,)
    parts = [_facts_of_rank(recipe, mesh, rank, micro_batches, count) for rank, count in zip(ranks, live, strict=True)]
    by_stage = dict(entry for part in parts for entry in part.summaries)
    summaries = [by_stage[stage] for stage in sorted(by_stage)]
    if any(summaries):
        check_stages(recipe.recompute, recipe.swap, summaries)
    training, length = recipe.training, recipe.train_dataset.seq_length
    kind = "micro-batches" if len(parts) == 1 else "pipeline runs"
    batches = f"{dp_size} dp ranks x {micro_batches} {kind} x {training.local_batch_size}"
    head = (
        f"mesh        {mesh}: {mesh.size} ranks\n"
        f"batch       {global_batch_size(recipe, dp_size)} sequences of {length} tokens a step: {batches}\n"
    )
    if len(parts) == 1:
        return head + report(parts[0])
    return head + pipeline_report(timeline, parts)


def _facts_of_rank(recipe, mesh, rank, micro_batches, live):
    """The `RankFacts` of a rank, on which `live` micro-batches are at a time, its Cells run on shapes."""
    init_distributed("fake", world_size=mesh.size, rank=rank)
    try:
        if recipe.parallelism.pipeline_parallel == 1:
            chunks = [(0, sharded_model(recipe, mesh))]
        else:
            chunks = build_chunks(recipe, mesh, rank)
        for stage, net in chunks:
            _plan(recipe, stage, net)
        zero = zero_settings(recipe, mesh, micro_batches)
        nets = [net for _, net in chunks]
        hsdp_chunks(recipe, nets, zero)
        summaries = tuple((stage, _summary(recipe, stage, net)) for stage, net in chunks)
        is_short = any(each and each["short"] for _, each in summaries)  # of a budget, checked for all stages
        activations = () if is_short else _activations(recipe, chunks)
        facts = _facts(recipe, nets, zero["shard_size"], activations, summaries)
        if recipe.context.engine != "eager":  # which has no plan
            kept, recomputed = zip(*(_kept(recipe, stage, net) for stage, net in chunks))
            facts.bytes.update(activations=int(live * sum(kept)), recomputed=max(recomputed))
        return facts
    finally:
        shutdown()


def _plan(recipe, stage, net):
    """Have a stage find its layouts, or fail with the error of the real run."""
    given = micro_batch(recipe, stage)
    if recipe.context.engine == "generated":
        prepare(net, *given, compiled=recipe.context.mode == 0)
    else:
        with ms.DeviceCtx("meta"):
            net(*(ms.mint.zeros(each.shape, dtype=getattr(ms, each.dtype)) for each in given))


def _kept(recipe, stage, net):
    """Bytes of what a stage takes in a micro-batch and keeps for its backward pass; and those that come back in it."""
    given, policy = micro_batch(recipe, stage), tree_of(net).activations
    frame = prepare(net, *given, compiled=recipe.context.mode == 0).frame
    explained, layers = policy.explained(frame), {path for paths in policy.layers.values() for path in paths}
    taken = sum(math.prod(each.shape) * ITEM_BYTES[each.dtype] for each in given)
    kept = saved_bytes(frame, explained.dropped, algorithm_of, arguments_need=False)
    return taken + kept, recomputed_at_once(frame, layers, explained.marks)


def _summary(recipe, stage, net):
    """`stage_summary` of the `ActivationPolicy` of a stage, once it has the program that training would run."""
    activations = tree_of(net).activations
    if activations.marks:
        prepare(net, *micro_batch(recipe, stage), compiled=recipe.context.mode == 0)
    return activations.stage_summary()


def _activations(recipe, chunks):
    """Lines about what is recomputed and swapped in each of the Cells of a rank."""
    lines = []
    for stage, net in chunks:
        found = explain_activations(net, *micro_batch(recipe, stage), compiled=recipe.context.mode == 0)
        is_stage = found and recipe.parallelism.pipeline_parallel > 1
        lines += [f"stage {stage}:", *(f"  {line}" for line in found)] if is_stage else found
    return tuple(lines)


def _facts(recipe, nets, shards, activations, summaries):
    """The `RankFacts` of Cells under `hsdp()`."""
    at_once = recipe.context.mode == 0 or recipe.parallelism.pipeline_parallel > 1  # all gradients of a backward pass
    reports = [memory_report(net, compiled=at_once) for net in nets]
    fullest = max(("pass", "update"), key=lambda moment: sum(report.computed[moment].total for report in reports))
    figures = [report.computed[fullest] for report in reports]
    bytes_by_kind = {kind: sum(getattr(each, kind) for each in figures) for kind in _COMPUTED}
    parameters = {}
    for net, report in zip(nets, reports, strict=True):
        plans = {plan.path: plan for plan in report.step.plans}
        for path, parameter in net.parameters_and_names():
            parameters[path] = _fact(parameter, plans[path], shards)
    level = recipe.parallelism.zero_level if shards > 1 else 0
    return RankFacts(tuple(parameters.values()), level, shards, bytes_by_kind, activations, summaries)


def pipeline_report(timeline, parts):
    """The text for a pipeline: its schedule, every pipeline rank, and the figures of the fullest rank.

    Args:
        timeline: the `Timeline` of the schedule, all passes of a stage taken as equally long.
        parts: for every pipeline rank its `RankFacts`.
    """
    sizes = [facts.total for facts in parts]
    fullest = sizes.index(max(sizes))
    lines = [f"pipeline    {timeline.bubble_fraction:.1%} of the time is bubbles (if all stages' passes are alike)"]
    for rank, (facts, size) in enumerate(zip(parts, sizes)):
        lines.append(
            f"  rank {rank:<4} {_count(facts.parameters, 'local_shape'):,} parameters on each of its "
            f"devices, {_gib(size).strip()}, at most {timeline.peak_live[rank]:g} micro-batches live"
        )
    whole = sum({fact.name: math.prod(fact.global_shape) for facts in parts for fact in facts.parameters}.values())
    lines.append(f"parameters  {whole:,} in all; on pipeline rank {fullest}, the fullest:")
    return "\n".join(lines) + "\n" + report(parts[fullest])


def report(facts):
    """The text of a dry run's figures for a `RankFacts`."""
    parameters = facts.parameters
    whole, local = (_count(parameters, shape) for shape in ("global_shape", "local_shape"))
    lines = [f"parameters  {whole:,} in all, {local:,} on each rank", *_sharded(facts)]
    lines.append("bytes on each rank at the fullest time (without buffers of an operator, while it runs)")
    lines += [f"  {title:<22} {_gib(facts.bytes[kind])}" for kind, title in _ROWS.items() if facts.bytes.get(kind)]
    if "activations" in facts.bytes:
        lines += [f"  {'together':<22} {_gib(facts.total)}, fits in {-(-facts.total // 10**9)} GB"]
    else:
        lines += [f"  {'together':<22} {_gib(facts.total)}, and activations, which no plan of the eager engine tells"]
    if facts.activations:
        lines += ["activations of one micro-batch, on each rank", *(f"  {line}" for line in facts.activations)]
    lines.append("")
    return "\n".join(lines + _table(parameters))


def _sharded(facts):
    """What data-parallel ranks shard, and what stays whole on all of them: lines."""
    if facts.level == 0:
        return []
    kept = _count(facts.parameters, "part_shape")
    lines = [
        f"zero        level {facts.level}, {SHARDED[facts.level]} in {facts.shards} parts: a rank keeps and updates "
        f"{kept:,} parameters"
    ]
    whole = [fact for fact in facts.parameters if fact.reason]
    if whole:
        names = sorted({_any_layer(fact.name) for fact in whole})
        lines.append(f"  {len(whole)} stay whole, {_count(whole, 'local_shape'):,} parameters: {', '.join(names)}")
    return lines


def _count(parameters, shape):
    """Elements of all `ParameterFact`s, in the shape of this name."""
    return sum(math.prod(getattr(fact, shape)) for fact in parameters)


def _any_layer(name):
    """A parameter's path with `*` for the number of a layer."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _table(parameters):
    """One line for every kind of parameter: those of all layers that are alike are counted together."""
    kinds = Counter((_any_layer(f.name), f.global_shape, f.local_shape, f.part_shape, f.layout) for f in parameters)
    rows = [("parameter", "count", "whole shape", "on a rank", "its part", "layout of the part")]
    rows += [(name, str(count), *map(str, shapes), layout) for (name, *shapes, layout), count in kinds.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _fact(parameter, plan, shards):
    """The `ParameterFact` of a part, with its `ParameterPlan`."""
    shapes = tuple(parameter.global_shape), plan.shape, plan.shard_shape(shards)
    return ParameterFact(plan.path, *shapes, plan.dtype, str(parameter.layout), plan.reason)


def _gib(count):
    return f"{count:>20,} ({count / 2**30:.2f} GiB)"
