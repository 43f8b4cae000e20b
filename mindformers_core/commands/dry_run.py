"""`train --dry-run`: the recipe's model, sharded and run forward on shapes alone, and the memory that every rank needs.

One process stands for any number of ranks: the fake communication backend sends nothing, and on MindSpore's meta
device nothing is allocated or computed.
"""

import math
from collections import Counter
from dataclasses import dataclass

import mindspore as ms

from mindformers_core.analysis.memory import recomputed_at_once
from mindformers_core.analysis.prediction import Prediction
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication.world import rank_of
from mindformers_core.data.reading import micro_batch
from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.hints import any_layer, columns
from mindformers_core.optimizers.settings import placed_lines
from mindformers_core.padding import padding_note
from mindformers_core.recipe.pipeline import recipe_timeline
from mindformers_core.recipe.sections import batch_plan, recipe_mesh
from mindformers_core.recompute.stages import check_stages
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.trainer.cells import build_cells, check_patterns, placed_of
from mindformers_core.zero import memory_report
from mindformers_core.zero.plan import LEVELS

_TITLES = {  # kind of bytes -> title; all but the last two are fields of `zero.formulas.MemoryEstimate`
    "weights": "weights",
    "parts": "their parts",
    "gradients": "gradients",
    "state": "optimizer state",
    "buckets": "buckets",
    "activations": "activations",
    "recomputed": "computed again at once",
}


@dataclass(frozen=True)
class ParameterFact:
    """A parameter on a rank."""

    name: str  # its path
    global_shape: tuple
    local_shape: tuple  # of the tensor that the rank computes with
    part_shape: tuple  # of the shard that the rank keeps between steps, and updates
    layout: str  # of that shard
    reason: str = ""  # why `hsdp()` doesn't shard it; empty for a sharded one


@dataclass(frozen=True)
class RankFacts:
    """The memory of a rank."""

    parameters: tuple  # `ParameterFact`s, each parameter once
    level: int  # of `hsdp()`, 0 for plain data parallelism
    shards: int  # of every sharded parameter
    # By keys of `_TITLES`, when the sum is largest. Activations are those that PyNative saves for the backward pass of
    # all live micro-batches; recomputed ones are those of one layer.
    bytes: dict
    activations: tuple = ()  # lines about recompute and swap in one micro-batch

    @property
    def total(self):
        """All bytes."""
        return sum(self.bytes.values())


def dry_run(recipe):
    """The report, after building, sharding and running the model forward on one rank of every pipeline stage.

    Raises:
        ValueError: anything that would make the real run fail on shapes: a dim that its axes don't divide, …; layers
            and patterns of recompute and swap that match nothing.
    """
    check_patterns(recipe)
    mesh = recipe_mesh(recipe)
    ranks = mesh.group(mesh.rank_list[0], ("pp",))
    timeline = recipe_timeline(recipe)
    facts, summaries, placed = [], {}, {}
    for rank, live in zip(ranks, timeline.peak_live, strict=True):
        with rank_of(mesh.size, rank, device_target=recipe.context.device_target):
            cells = build_cells(recipe, mesh, rank)
            facts.append(_facts_of_rank(recipe, cells, live))
            placed |= placed_of(recipe, cells)
            summaries |= {stage: tree_of(net).activations.stage_summary() for stage, net in cells.items()}
    if any(summaries.values()):
        check_stages(recipe.recompute, recipe.swap, [summaries[stage] for stage in sorted(summaries)])
    plan = batch_plan(recipe, mesh.axis_size("dp"))
    kind = "micro-batches" if plan.micro_batches == 1 else "pipeline runs"
    head = (
        f"mesh        {mesh}: {mesh.size} ranks\n"
        f"batch       {plan.samples} sequences of {recipe.train_dataset.seq_length} tokens a step: {plan.ranks} dp "
        f"ranks x {plan.runs} {kind} x {recipe.training.local_batch_size}"
        f"{f', {plan.empty} of these rows empty' if plan.empty else ''}\n"
    ) + "".join(f"{line}\n" for line in placed_lines(placed, recipe.optimizer))
    if recipe.context.mode == 0 and recipe.context.device_target == "CPU":
        head += "memory      more than below: in graph mode MindSpore keeps 8 to 9 times the activations on CPU\n"
    return head + (_pipeline_report(timeline, facts) if len(ranks) > 1 else report(facts[0]))


def _facts_of_rank(recipe, cells, live):
    """The `RankFacts` of the `cells` of a rank, with the saved tensors of `live` micro-batches at a time."""
    at_once = recipe.context.mode == 0 or recipe.parallelism.pipeline_parallel > 1  # all gradients of a backward pass
    kept, recomputed, lines, parameters = 0, 0, [], {}
    for stage, net in cells.items():
        given, policy = micro_batch(recipe, net, stage), tree_of(net).activations
        if recipe.context.engine == "eager":  # without a plan
            with ms.DeviceCtx("meta"):
                net(*(ms.mint.zeros(each.shape, dtype=getattr(ms, each.dtype)) for each in given))
        else:
            plan = prepare(net, *given, compiled=recipe.context.mode == 0).plan
            explained, layers = policy.explained(plan), {path for paths in policy.layers.values() for path in paths}
            kept += sum(math.prod(each.shape) * ITEM_BYTES[each.dtype] for each in given)
            kept += Prediction(plan, algorithm_of, arguments_need=False).saved_bytes(explained.dropped)
            recomputed = max(recomputed, recomputed_at_once(plan, layers, explained.notes))
            if explained.lines and recipe.parallelism.pipeline_parallel > 1:
                lines += [f"stage {stage}:", *(f"  {line}" for line in explained.lines)]
            else:
                lines += explained.lines
    state_bytes = recipe.optimizer.state_bytes + 4 * (recipe.training.average_decay is not None)
    reports = [memory_report(net, state_bytes=state_bytes, compiled=at_once) for net in cells.values()]
    fullest = max(("pass", "update"), key=lambda moment: sum(each.computed[moment].total for each in reports))
    figures, shards = [each.computed[fullest] for each in reports], reports[0].step.settings.shard_size
    nbytes = {kind: sum(getattr(each, kind) for each in figures) for kind in [*_TITLES][:-2]}
    if recipe.context.engine != "eager":
        nbytes |= {"activations": int(live * kept), "recomputed": recomputed}
    for net, each in zip(cells.values(), reports):
        plans = {plan.path: plan for plan in each.step.plans}
        for path, parameter in net.parameters_and_names():
            shapes = tuple(parameter.global_shape), plans[path].shape, plans[path].shard_shape(shards)
            note = padding_note(parameter)
            layout = f"{parameter.layout}; {note}" if note else str(parameter.layout)
            parameters[path] = ParameterFact(path, *shapes, layout, plans[path].reason)
    level = recipe.parallelism.zero_level if shards > 1 else 0
    return RankFacts(tuple(parameters.values()), level, shards, nbytes, tuple(lines))


def _pipeline_report(timeline, ranks):
    """The text for a pipeline: its schedule, every pipeline rank, and the figures of the fullest rank.

    Args:
        timeline: the `Timeline` of the schedule, all passes of a stage taken as equally long.
        ranks: for every pipeline rank its `RankFacts`.
    """
    lines = [f"pipeline    {timeline.bubble_fraction:.1%} of the time is bubbles (if all stages' passes are alike)"]
    for rank, (facts, live) in enumerate(zip(ranks, timeline.peak_live)):
        lines.append(
            f"  rank {rank:<4} {_count(facts.parameters, 'local_shape'):,} parameters on each of its "
            f"devices, {_gib(facts.total).strip()}, at most {live:g} micro-batches live"
        )
    whole = sum({fact.name: math.prod(fact.global_shape) for facts in ranks for fact in facts.parameters}.values())
    fullest = max(ranks, key=lambda facts: facts.total)
    lines.append(f"parameters  {whole:,} in all; on pipeline rank {ranks.index(fullest)}, the fullest:")
    return "\n".join([*lines, report(fullest)])


def report(facts):
    """The text of a dry run's figures for a `RankFacts`."""
    whole, local, kept = (_count(facts.parameters, f"{which}_shape") for which in ("global", "local", "part"))
    lines = [f"parameters  {whole:,} in all, {local:,} on each rank"]
    if facts.level:
        sharded = f"{LEVELS[f'level{facts.level}']} in {facts.shards} parts"
        lines.append(f"zero        level {facts.level}, {sharded}: a rank keeps and updates {kept:,} parameters")
        if unsharded := [fact for fact in facts.parameters if fact.reason]:
            names = ", ".join(sorted({any_layer(fact.name) for fact in unsharded}))
            lines.append(f"  {len(unsharded)} stay whole, {_count(unsharded, 'local_shape'):,} parameters: {names}")
    lines.append("bytes on each rank at the fullest time (without buffers of an operator, while it runs)")
    lines += [f"  {title:<22} {_gib(facts.bytes[kind])}" for kind, title in _TITLES.items() if facts.bytes.get(kind)]
    fits, lacking = f"fits in {-(-facts.total // 10**9)} GB", "and activations, which no plan of the eager engine tells"
    lines.append(f"  {'together':<22} {_gib(facts.total)}, {fits if 'activations' in facts.bytes else lacking}")
    if facts.activations:
        lines += ["activations of one micro-batch, on each rank", *(f"  {line}" for line in facts.activations)]
    return "\n".join([*lines, "", *_table(facts.parameters)])


def _count(parameters, shape):
    """Elements of all `ParameterFact`s, in the shape of this name."""
    return sum(math.prod(getattr(fact, shape)) for fact in parameters)


def _table(parameters):
    """One line for every kind of parameter: those of all layers that are alike are counted together."""
    kinds = Counter((any_layer(f.name), f.global_shape, f.local_shape, f.part_shape, f.layout) for f in parameters)
    rows = [("parameter", "count", "whole shape", "on a rank", "its part", "layout of the part")]
    rows += [(name, str(count), *map(str, shapes), layout) for (name, *shapes, layout), count in kinds.items()]
    return columns(rows)


def _gib(count):
    return f"{count:>20,} ({count / 2**30:.2f} GiB)"
