"""A recipe of small sizes with the plan of a large one: `shrunk_recipe`.

The large model is planned on shapes alone. Of the layers of a stage those remain that differ; of every size remain the
divisors that the plan needs; and the plan is carried over with all its choices, see `resized`.
"""

import re
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from math import lcm

from mindformers_core.communication.world import rank_of
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models.spec import LayerRange
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.propagation.resized import without_calls
from mindformers_core.ranges import check_range
from mindformers_core.sharding.program import annotated_plan
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.trainer.data import micro_batch
from mindformers_core.trainer.pipeline_recipe import check_pipeline, layers_of_stages, micro_batches_of_a_run
from mindformers_core.trainer.recipe import MESH_AXES, accumulation_steps, mesh_shape
from mindformers_core.trainer.recipe_checks import check_recipe
from mindformers_core.trainer.step import build_cells
from mindformers_core.verification.sizes import divisors_of, least_sizes, parts_of_sizes
from mindformers_core.zero.buckets import parse_comm_fusion

__all__ = ["ShrunkRecipe", "shrunk_recipe"]

# What at least remains of each size, and whether all divisors among the numbers of ranks remain: tried in this order
_TRIALS = ((0, False), (0, True), (1 / 16, True), (1 / 4, True), (1 / 2, True))
_SEVERAL = 2  # samples of a micro-batch, and runs in a step, of which there were at least as many


@dataclass(frozen=True)
class ShrunkRecipe:
    """A recipe of small sizes.

    Attributes:
        recipe: the `Recipe`, on the same mesh, with fewer layers and micro-batches.
        choices: number of a stage -> the plan of the large recipe, without the layers that the small one lacks:
            `prepare(net, *micro_batch(recipe, stage), saved_plan=choices[stage])` makes the small program of it.
        layers: for every layer of the small model the number of the layer of the large one that it stands for.
    """

    recipe: object
    choices: dict
    layers: tuple


def shrunk_recipe(recipe):
    """The recipe with the least sizes at which its plan remains the same.

    This process stands for all ranks, one after the other.

    Args:
        recipe: the `Recipe`, with `data_parallel_shard` given.

    Returns:
        A `ShrunkRecipe`.

    Raises:
        ValueError: the recipe is impossible, runs without programs (eager), or has another plan at small sizes.
    """
    if recipe.context.engine == "eager":
        raise ValueError("context.engine: eager has no programs that could be verified: use context.engine=generated")
    large = _planned(recipe)
    stages = [LayerRange(0, getattr(recipe.model, "num_hidden_layers", 0))]
    stages = layers_of_stages(recipe) if recipe.parallelism.pipeline_parallel > 1 else stages
    stages = [tuple(range(each.offset, each.offset + each.count)) for each in stages]
    fewer = [_layer_kinds(recipe, frame, numbers) for numbers, (_, frame) in zip(stages, large.values(), strict=True)]
    everything = [({}, numbers) for numbers in stages]
    for kept in (fewer, everything) if fewer != everything else (everything,):
        for share, exact in _TRIALS:
            try:
                return _shrunk(recipe, large, kept, share, exact)
            except Exception as error:  # a user's model may fail in any way at sizes that aren't its own
                reason = str(error).rstrip(".")
    raise ValueError(
        f"the recipe has no small sizes with the same plan ({reason}): verify it at its own sizes, with --full"
    )


def _planned(recipe, choices=None):
    """Number of a stage -> (`ShardedTree`, `CellPlan` with the keepers of recompute and swap)."""

    def plan(stage, tree):
        given = choices[stage] if choices else None
        with tree.for_compiled() if recipe.context.mode == 0 else nullcontext():
            graph, frame = annotated_plan(tree, "", micro_batch(recipe, stage), {}, given)
            for constant in (each for call in graph.calls() for each in call.constants):
                constant.forget()  # masks of long sequences
            return tree, frame

    return _of_stages(recipe, plan)


def _of_stages(recipe, function):
    """Number of a stage -> `function(number, its ShardedTree)`, called while this process stands for a rank of it."""
    mesh, found = init_device_mesh(mesh_shape(recipe), MESH_AXES), {}
    for rank in mesh.group(mesh.rank_list[0], ("pp",)):
        with rank_of(mesh.size, rank, device_target=recipe.context.device_target):
            for stage, net in build_cells(recipe, mesh, rank).items():
                found[stage] = function(stage, tree_of(net))
    return dict(sorted(found.items()))


def _layer_kinds(recipe, frame, numbers):
    """Path -> number of the layers of a stage that can be left out, and the numbers of the others.

    The first one of every kind remains: with another program, or among other layers that settings of recompute and
    swap name. At least two layers remain.
    """
    calls, kinds = {}, []
    for path, inner in frame.walk():
        prefix, _, name = path.rpartition(".")
        if name.isdigit() and not re.search(r"\d", prefix):
            calls.setdefault(prefix, {}).setdefault(int(name), []).append(inner)
    layers = {prefix: found for prefix, found in calls.items() if tuple(found) == numbers}
    if not layers:
        return {}, numbers
    named = [recipe.recompute.full, *(entry.layers for entry in (*recipe.swap.layer_swap, *recipe.swap.op_swap))]
    for number in numbers:
        asked = [number in each for each in named if isinstance(each, tuple)]
        frames = [each for found in layers.values() for each in found[number]]
        if not any((asked, frames) == kind[1:] for kind in kinds):  # equal layers share a plan
            kinds.append((number, asked, frames))
    kept = [number for number, _, _ in kinds]
    kept = kept if len(kept) > 1 else sorted({numbers[0], numbers[-1]})
    return {f"{prefix}.{number}" for prefix in layers for number in {*numbers} - {*kept}}, tuple(kept)


def _shrunk(recipe, large, kept, share, exact):
    """The `ShrunkRecipe` of one trial.

    Args:
        recipe, large: the large recipe, and its `_planned` stages.
        kept: for every stage the paths of the layers that are left out, and the numbers of the others.
        share, exact: an entry of `_TRIALS`.

    Raises:
        ValueError: the trial has another plan.
    """
    choices, plans = {}, {}
    for (stage, (tree, frame)), (dropped, _) in zip(large.items(), kept):
        choices[stage] = without_calls(frame, dropped)
        outside = tuple(f"{path}." for path in dropped)
        plans[stage] = [each.plan for each in tree.storage.parameters if not each.plan.path.startswith(outside)]
    small = _with_few_micro_batches(_with_layers(recipe, [numbers for _, numbers in kept]))
    small = _sharded_alike(_with_sizes(small, large, share, exact), plans)
    for stage, (tree, _) in _planned(small, choices).items():
        for old, stored in zip(plans[stage], tree.storage.parameters, strict=True):
            _check_sharding(old, stored.plan)
    return ShrunkRecipe(small, choices, tuple(number for _, numbers in kept for number in numbers))


def _check_sharding(large, small):
    """Raise `ValueError` where `hsdp()` shards a parameter in another way; both are `ParameterPlan`s."""
    numberless = [re.sub(r"\[.*?\]|[\d.e+]+", "#", f"{plan.unit}: {plan.reason}") for plan in (large, small)]
    if large.dim != small.dim or numberless[0] != numberless[1]:
        shown = [f"along dim {plan.dim}" if plan.dim is not None else plan.reason for plan in (large, small)]
        raise ValueError(
            f"hsdp() shards '{large.path}' {shown[0]} at the recipe's sizes, and {shown[1]} at small sizes"
        )


def _with_layers(recipe, stages):
    """The recipe with the layers of these numbers, for every stage, only."""
    model, sizes, swap, again = recipe.model, recipe.parallelism, recipe.swap, recipe.recompute
    count, layers = getattr(model, "num_hidden_layers", 0), [number for numbers in stages for number in numbers]
    if count == len(layers):
        return recipe

    def places(numbers):
        return numbers if numbers is True else tuple(place for place, layer in enumerate(layers) if layer in numbers)

    changes = {"num_hidden_layers": len(layers)}
    for name, value in vars(model).items():
        if isinstance(value, (tuple, list)) and len(value) == count:  # an entry for every layer
            changes[name] = type(value)(value[number] for number in layers)
    if sizes.pipeline_parallel > 1:
        counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        changes |= {name: False for name in counted if hasattr(model, name)}
        sizes = replace(sizes, pipeline_parallel_layers_per_stage=tuple(map(len, stages)))
    if isinstance(again.full, tuple):
        again = replace(again, full=places(again.full))
    if swap.is_on and not swap.is_short:
        entries = {name: getattr(swap, name) for name in ("layer_swap", "op_swap")}
        swap = replace(swap, **tree_map(lambda entry: replace(entry, layers=places(entry.layers)), entries))
    return replace(recipe, model=replace(model, **changes), parallelism=sizes, recompute=again, swap=swap)


def _with_few_micro_batches(recipe):
    """The recipe with as few micro-batches as exercise its schedule, and the summing of gradients."""
    training, sizes = recipe.training, recipe.parallelism
    runs = accumulation_steps(recipe, sizes.data_parallel_replicate * sizes.data_parallel_shard)
    training = replace(training, global_batch_size=None, gradient_accumulation_steps=min(runs, _SEVERAL))
    if sizes.pipeline_parallel == 1:
        return replace(recipe, training=replace(training, local_batch_size=min(training.local_batch_size, _SEVERAL)))
    whole, size = micro_batches_of_a_run(recipe), min(sizes.pipeline_parallel_microbatch_size, _SEVERAL)
    sizes = replace(sizes, pipeline_parallel_microbatch_size=size)
    for count in range(min(whole, sizes.pipeline_parallel), whole + 1):
        small = replace(recipe, parallelism=sizes, training=replace(training, local_batch_size=count * size))
        try:
            check_pipeline(small)
            break
        except ValueError:  # a schedule may want a multiple of the number of ranks
            continue
    return small


def _with_sizes(recipe, large, share, exact):
    """The recipe with the least sizes of the model and of a sequence; see `least_sizes`."""
    parallelism, section, tensors = recipe.parallelism, recipe.train_dataset, set()
    for tree, frame in large.values():
        for entry in {entry for _, inner in frame.walk() for entry in inner.instructions}:
            tensors |= {(value.shape, layout) for value, layout in (*entry.consumed, *entry.produced)}
        tensors |= {(tuple(each.global_shape), each.layout) for each in tree.cells[""].get_parameters()}
    ranks = parallelism.data_parallel_replicate, parallelism.data_parallel_shard, parallelism.tensor_parallel
    divisors, parts = divisors_of(ranks), parts_of_sizes(tensors)
    own = {each.name: getattr(recipe.model, each.name) for each in fields(recipe.model) if each.init}
    own.pop("num_hidden_layers", None)
    sizes = {section.seq_length, *(leaf for leaf in tree_leaves(own, int) if type(leaf) is int)}
    for size in sizes if exact else ():
        parts[size] = lcm(parts.get(size, 1), *(divisor for divisor in divisors if size % divisor == 0))

    def changed(small):
        values = tree_map(lambda leaf: small.get(leaf, leaf) if type(leaf) is int else leaf, own)
        dataset = replace(section, seq_length=small[section.seq_length])
        return replace(recipe, model=replace(recipe.model, **values), train_dataset=dataset)

    def fits(small):
        try:
            candidate = changed(small)
            for entry in fields(candidate.model):
                check_range(getattr(candidate.model, entry.name), entry.metadata, entry.name)
            check_recipe(candidate)
        except (ValueError, TypeError):
            return False
        return True

    return changed(least_sizes(sizes, parts, divisors, share, fits))


def _sharded_alike(recipe, plans):
    """The recipe with a threshold and sizes of buckets under which `hsdp()` does with small parameters as with large.

    Args:
        recipe: the small recipe.
        plans: stage -> `ParameterPlan`s of the large one.

    Raises:
        ValueError: no threshold separates the same parameters.
    """
    small = _of_stages(recipe, lambda stage, tree: [stored.plan for stored in tree.storage.parameters])
    pairs = [pair for stage, large in plans.items() for pair in zip(large, small[stage], strict=True)]
    whole = [new.nbytes for old, new in pairs if "threshold" in old.reason]
    cut = [new.nbytes for old, new in pairs if old.dim is not None]
    if whole and cut and min(cut) <= max(whole):
        raise ValueError(f"hsdp() shards a parameter of {min(cut)} bytes, but not one of {max(whole)}")
    share = sum(new.nbytes for _, new in pairs) / sum(old.nbytes for old, _ in pairs)
    fusions = parse_comm_fusion(recipe.parallelism.comm_fusion).items()
    fusion = {  # buckets are full at the same share of all parameters; places count parameters
        kind: {"mode": "index", "config": list(each.places)} if each.megabytes is None else each.megabytes * share
        for kind, each in fusions
    }
    threshold = max(whole, default=0) / 1024
    return replace(recipe, parallelism=replace(recipe.parallelism, zero_threshold_kb=threshold, comm_fusion=fusion))
