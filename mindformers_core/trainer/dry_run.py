"""`train --dry-run`: the recipe's model, sharded and run forward on shapes alone, and what every rank would hold.

One process stands for any number of ranks: the fake communication backend sends nothing, and on MindSpore's meta
device nothing is allocated or computed.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

import mindspore as ms

from mindformers_core.communication import init_distributed
from mindformers_core.communication.world import shutdown
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaForCausalLM
from mindformers_core.tensor_parallel import shard
from mindformers_core.trainer.pipeline_recipe import recipe_timeline
from mindformers_core.trainer.pipeline_step import build_chunks
from mindformers_core.trainer.recipe import MESH_AXES, accumulation_steps, mesh_shape

__all__ = ["dry_run", "ParameterFact", "pipeline_report", "report"]

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MOMENT_BYTES = 2 * 4  # AdamW keeps two float32 moments


@dataclass(frozen=True)
class ParameterFact:
    """One parameter: its path, whole and local shape, dtype by name, and layout as text."""

    name: str
    global_shape: tuple
    local_shape: tuple
    dtype: str
    layout: str


def dry_run(recipe):
    """The report, after building, sharding and running the model forward on rank 0 of the recipe's mesh.

    Raises:
        ValueError: anything that would make the real run fail on shapes: a dim that its axes don't divide, ….
    """
    mesh = init_device_mesh(mesh_shape(recipe), MESH_AXES)
    micro_batches = accumulation_steps(recipe, mesh.axis_size("dp"))
    ranks = mesh.group(mesh.rank_list[0], ("pp",))
    parts = [_facts_of_rank(recipe, mesh, rank) for rank in ranks]
    training, length = recipe.training, recipe.train_dataset.seq_length
    kind = "micro-batches" if len(parts) == 1 else "pipeline runs"
    batches = f"{mesh.axis_size('dp')} dp ranks x {micro_batches} {kind} x {training.local_batch_size}"
    head = (
        f"mesh        {mesh}: {mesh.size} ranks\n"
        f"batch       {training.global_batch_size} sequences of {length} tokens a step: {batches}\n"
    )
    if len(parts) == 1:
        return head + report(parts[0])
    return head + pipeline_report(recipe_timeline(recipe), parts)


def _facts_of_rank(recipe, mesh, rank):
    """`ParameterFact`s of what a rank holds, after its Cells have run forward on shapes alone."""
    init_distributed("fake", world_size=mesh.size, rank=rank)
    try:
        if recipe.parallelism.pipeline_parallel == 1:
            chunks = [(0, _whole_model(recipe, mesh))]
            batch = recipe.training.local_batch_size
        else:
            chunks = build_chunks(recipe, mesh, rank)
            batch = recipe.parallelism.pipeline_parallel_microbatch_size
        for index, net in chunks:
            _run_forward(recipe, mesh, index, net, batch)
        return [_fact(parameter) for _, net in chunks for parameter in net.trainable_params()]
    finally:
        shutdown()


def _whole_model(recipe, mesh):
    with ms.DeviceCtx("meta"):
        return shard(LlamaForCausalLM(recipe.model), mesh, recipe.parallelism, mode=recipe.context.engine)


def _run_forward(recipe, mesh, stage, net, batch):
    """A forward pass of a Cell on the meta device; stages after the first take hidden states."""
    length, sizes = recipe.train_dataset.seq_length, recipe.parallelism
    with ms.DeviceCtx("meta"):
        ids = ms.mint.zeros((batch, length), dtype=ms.int32)
        if stage == 0:
            net(ids, ids)
            return
        length = length // sizes.tensor_parallel if sizes.sequence_parallel else length
        shape = (batch, length, recipe.model.hidden_size)
        net(ms.mint.zeros(shape, dtype=getattr(ms, recipe.model.dtype)), ids)


def pipeline_report(timeline, parts):
    """The text for a pipeline: its schedule, every pipeline rank, and the figures of the fullest rank.

    Args:
        timeline: the `Timeline` of the schedule, all passes of a stage taken as equally long.
        parts: for every pipeline rank the list of its `ParameterFact`s.
    """
    sizes = [_bytes(facts) for facts in parts]
    fullest = sizes.index(max(sizes))
    lines = [f"pipeline    {timeline.bubble_fraction:.1%} of the time is bubbles (if all stages' passes are alike)"]
    for rank, (facts, size) in enumerate(zip(parts, sizes)):
        lines.append(
            f"  rank {rank:<4} {sum(math.prod(fact.local_shape) for fact in facts):,} parameters on each of its "
            f"devices, {_gib(size).strip()}, at most {timeline.peak_live[rank]:g} micro-batches live"
        )
    whole = sum({fact.name: math.prod(fact.global_shape) for facts in parts for fact in facts}.values())
    lines.append(f"parameters  {whole:,} in all; on pipeline rank {fullest}, the fullest:")
    return "\n".join(lines) + "\n" + report(parts[fullest])


def report(facts):
    """The text of a dry run's figures for a list of `ParameterFact`."""
    whole = sum(math.prod(fact.global_shape) for fact in facts)
    local = sum(math.prod(fact.local_shape) for fact in facts)
    parameter_bytes, moment_bytes = _bytes_by_dtype(facts)
    total = _bytes(facts)
    lines = [f"parameters  {whole:,} in all, {local:,} on each rank", "bytes on each rank (without activations)"]
    for kind in ("parameters", "gradients"):
        lines += [f"  {kind:<12} {dtype:<9} {_gib(count)}" for dtype, count in parameter_bytes.items()]
    lines += [f"  {'AdamW state':<12} {'float32':<9} {_gib(moment_bytes)}", f"  {'together':<22} {_gib(total)}", ""]
    return "\n".join(lines + _table(facts))


def _bytes_by_dtype(facts):
    """`(bytes of parameters by dtype, bytes of moments)`."""
    parameter_bytes, moment_bytes = Counter(), 0
    for fact in facts:
        parameter_bytes[fact.dtype] += math.prod(fact.local_shape) * _ITEM_BYTES[fact.dtype]
        moment_bytes += math.prod(fact.local_shape) * _MOMENT_BYTES
    return parameter_bytes, moment_bytes


def _bytes(facts):
    """Bytes of parameters, gradients and moments."""
    parameter_bytes, moment_bytes = _bytes_by_dtype(facts)
    return 2 * sum(parameter_bytes.values()) + moment_bytes


def _table(facts):
    """One line for every kind of parameter: those of all layers that are alike are counted together."""
    kinds = Counter((re.sub(r"\.\d+\.", ".*.", f.name), f.global_shape, f.local_shape, f.layout) for f in facts)
    rows = [("parameter", "count", "whole shape", "on a rank", "layout")]
    rows += [
        (name, str(count), str(whole), str(local), layout) for (name, whole, local, layout), count in kinds.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _fact(parameter):
    layout = parameter.layout
    local_shape = layout.local_shape(parameter.global_shape, parameter.name)
    dtype = str(parameter.dtype).rpartition(".")[2].lower()
    return ParameterFact(parameter.name, tuple(parameter.global_shape), local_shape, dtype, str(layout))


def _gib(count):
    return f"{count:>18,}  ({count / 2**30:.2f} GiB)"
