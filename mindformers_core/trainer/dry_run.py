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
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaForCausalLM
from mindformers_core.tensor_parallel import shard
from mindformers_core.trainer.recipe import MESH_AXES, accumulation_steps, mesh_shape

__all__ = ["dry_run", "ParameterFact", "report"]

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
    init_distributed("fake", world_size=mesh.size, rank=0)
    with ms.DeviceCtx("meta"):
        net = shard(LlamaForCausalLM(recipe.model), mesh, recipe.parallelism, mode=recipe.context.engine)
        ids = ms.mint.zeros((recipe.training.local_batch_size, recipe.train_dataset.seq_length), dtype=ms.int32)
        net(ids, ids)
    facts = [_fact(parameter) for parameter in net.trainable_params()]
    training, length = recipe.training, recipe.train_dataset.seq_length
    parts = f"{mesh.axis_size('dp')} dp ranks x {micro_batches} micro-batches x {training.local_batch_size}"
    head = (
        f"mesh        {mesh}: {mesh.size} ranks\n"
        f"batch       {training.global_batch_size} sequences of {length} tokens a step: {parts}\n"
    )
    return head + report(facts)


def report(facts):
    """The text of a dry run's figures for a list of `ParameterFact`."""
    whole = sum(math.prod(fact.global_shape) for fact in facts)
    local = sum(math.prod(fact.local_shape) for fact in facts)
    parameter_bytes, moment_bytes = Counter(), 0
    for fact in facts:
        parameter_bytes[fact.dtype] += math.prod(fact.local_shape) * _ITEM_BYTES[fact.dtype]
        moment_bytes += math.prod(fact.local_shape) * _MOMENT_BYTES
    total = 2 * sum(parameter_bytes.values()) + moment_bytes
    lines = [f"parameters  {whole:,} in all, {local:,} on each rank", "bytes on each rank (without activations)"]
    for kind in ("parameters", "gradients"):
        lines += [f"  {kind:<12} {dtype:<9} {_gib(count)}" for dtype, count in parameter_bytes.items()]
    lines += [f"  {'AdamW state':<12} {'float32':<9} {_gib(moment_bytes)}", f"  {'together':<22} {_gib(total)}", ""]
    return "\n".join(lines + _table(facts))


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
