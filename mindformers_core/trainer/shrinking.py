"""A recipe of small sizes with the plan of a large one: `shrunk_recipe`.

The large model is planned on shapes alone. Of the layers of a stage those remain that differ; of every size remain the
divisors that the plan needs; and the plan is carried over with all its choices, see `resized`.
"""

import re
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from math import lcm

from mindformers_core.communication.world import rank_of
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.propagation.resized import resized
from mindformers_core.ranges import check_range
from mindformers_core.sharding.program import annotated_plan
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.trainer.data import micro_batch
from mindformers_core.trainer.pipeline_recipe import check_pipeline, layers_of_stages, micro_batches_of_a_run
from mindformers_core.trainer.recipe import accumulation_steps, recipe_mesh
from mindformers_core.trainer.recipe_checks import check_recipe
from mindformers_core.trainer.step import build_cells
from mindformers_core.verification.sizes import divisors_of, least_sizes, parts_of_sizes
from mindformers_core.zero.buckets import parse_comm_fusion

# What at least remains of each size, tried in this order; where something does, also all divisors of it that are
# numbers of ranks
_SHARES = (0, 2**-8, 2**-4, 2**-2, 2**-1)
_SEVERAL = 2  # samples of a micro-batch, of which there were at least as many
_LAYERS = 4  # of few ranks, so that parameters are more than 32
_RUNS = 3  # in a step: the first, the last, and one between


def planned(recipe, choices=None, forgets=False):
    """Number of a stage -> `(ShardedTree, CellGraph, CellPlan)`, in order.

    Args:
        recipe: the `Recipe`.
        choices: number of a stage -> function of its `CellGraph` that returns its plan. Default: propagate.
        forgets: whether contents of constants are dropped, such as masks of long sequences.
    """

    def plan(stage, tree):
        graph, frame = annotated_plan(tree, "", micro_batch(recipe, stage), {}, (choices or {}).get(stage))
        for constant in (each for call in graph.calls() for each in call.constants if forgets):
            constant.forget()
        return tree, graph, frame

    return _of_stages(recipe, plan)


def _of_stages(recipe, function):
    """Number of a stage -> `function(number, its ShardedTree)`, called while this process stands for a rank of it."""
    mesh, found = recipe_mesh(recipe), {}
    for rank in mesh.group(mesh.rank_list[0], ("pp",)):
        with rank_of(mesh.size, rank, device_target=recipe.context.device_target):
            for stage, net in build_cells(recipe, mesh, rank).items():
                found[stage] = function(stage, tree_of(net))
    return dict(sorted(found.items()))


def shrunk_recipe(recipe):
    """The recipe with the least sizes at which its plan remains the same, and with few layers and micro-batches.

    This process stands for all ranks, one after the other.

    Args:
        recipe: the `Recipe`, with `data_parallel_shard` given.

    Returns:
        `(small, plans)`: the small `Recipe`, on the same mesh, and its plans, as of `simulate`.

    Raises:
        ValueError: the recipe is impossible, runs without programs (eager), or has another plan at small sizes.
    """
    if recipe.context.engine == "eager":
        raise ValueError("context.engine: eager has no programs that could be verified: use context.engine=generated")
    stages = [tuple(range(getattr(recipe.model, "num_hidden_layers", 0)))]
    if recipe.parallelism.pipeline_parallel > 1:
        stages = [tuple(range(each.offset, each.offset + each.count)) for each in layers_of_stages(recipe)]
    layers, choices, parameters, tensors = [], {}, {}, set()
    for stage, (tree, _, frame) in planned(recipe, forgets=True).items():
        dropped, kept = _layer_kinds(recipe, frame, stages[stage])
        layers.append(kept)
        choices[stage] = partial(resized, frame, dropped=dropped)
        outside = tuple(f"{path}." for path in dropped)
        parameters[stage] = [each.plan for each in tree.storage.parameters if not each.plan.path.startswith(outside)]
        for entry in {entry for _, inner in frame.walk() for entry in inner.instructions}:
            tensors |= {(value.shape, layout) for value, layout in (*entry.consumed, *entry.produced)}
        tensors |= {(tuple(each.global_shape), each.layout) for each in tree.cells[""].get_parameters()}
    for share in _SHARES:
        try:
            small = _with_few_micro_batches(_with_layers(recipe, layers))
            small = _sharded_alike(_with_sizes(small, parts_of_sizes(tensors), share), parameters)
            return small, _plans(small, choices, parameters)
        except Exception as error:  # a user's model may fail in any way at sizes that aren't its own
            reason = str(error).rstrip(".")
    raise ValueError(
        f"the recipe has no small sizes with the same plan ({reason}): verify it at its own sizes, with --full"
    )


def _layer_kinds(recipe, frame, numbers):
    """Paths of the layers of a stage that are like others, in plan and settings, and numbers of at least two others."""
    layers, first = {}, {}  # path of a CellList -> number -> `CellPlan`s; kind of a layer -> number
    for path, inner in frame.walk():
        prefix, _, name = path.rpartition(".")
        if name.isdigit() and not re.search(r"\d", prefix):
            layers.setdefault(prefix, {}).setdefault(int(name), []).append(inner)
    layers = {prefix: found for prefix, found in layers.items() if tuple(found) == numbers}
    if not layers:
        return frozenset(), numbers
    named = [recipe.recompute.full, *(entry.layers for entry in (*recipe.swap.layer_swap, *recipe.swap.op_swap))]
    for number in numbers:
        asked = tuple(number in each for each in named if isinstance(each, tuple))
        frames = tuple(each for found in layers.values() for each in found[number])  # equal layers share a plan
        first.setdefault((asked, frames), number)
    few = numbers[:_LAYERS] if recipe_mesh(recipe).size <= _LAYERS and recipe.parallelism.pipeline_parallel == 1 else ()
    kept = tuple(first.values()) if len(first) > 1 else tuple(sorted({numbers[0], *few[:-1], numbers[-1]}))
    return frozenset(f"{prefix}.{number}" for prefix in layers for number in {*numbers} - {*kept}), kept


def _plans(recipe, choices, parameters):
    """The plans of a small recipe; `ValueError` where `hsdp()` shards other `parameters` than of the large one."""
    plans = {}
    for stage, (tree, graph, frame) in planned(recipe, choices).items():
        plans[stage, tree.mesh] = graph, frame
        for large, small in zip(parameters[stage], (each.plan for each in tree.storage.parameters), strict=True):
            kinds = [re.sub(r"\[.*?\]|[\d.e+]+", "#", f"{plan.unit}: {plan.reason}") for plan in (large, small)]
            if large.dim != small.dim or kinds[0] != kinds[1]:
                shown = [plan.reason or f"along dim {plan.dim}" for plan in (large, small)]
                raise ValueError(f"hsdp() shards '{large.path}' {shown[0]}, and {shown[1]} at small sizes")
    return plans


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
    training = replace(training, global_batch_size=None, gradient_accumulation_steps=min(runs, _RUNS))
    if sizes.pipeline_parallel == 1:
        return replace(recipe, training=replace(training, local_batch_size=min(training.local_batch_size, _SEVERAL)))
    whole, size = micro_batches_of_a_run(recipe), min(sizes.pipeline_parallel_microbatch_size, _SEVERAL)
    sizes = replace(sizes, pipeline_parallel_microbatch_size=size)
    for count in range(min(whole, sizes.pipeline_parallel + 1), whole + 1):
        small = replace(recipe, parallelism=sizes, training=replace(training, local_batch_size=count * size))
        with suppress(ValueError):  # a schedule may want a multiple of the number of ranks
            check_pipeline(small)
            return small


def _with_sizes(recipe, parts, share):
    """The recipe with the least sizes of the model and of a sequence; see `least_sizes`."""
    parallelism, section = recipe.parallelism, recipe.train_dataset
    ranks = parallelism.data_parallel_replicate, parallelism.data_parallel_shard, parallelism.tensor_parallel
    names = [each.name for each in fields(recipe.model) if each.init and each.name != "num_hidden_layers"]
    own, divisors = {name: getattr(recipe.model, name) for name in names}, divisors_of(ranks)
    sizes = {section.seq_length, *(leaf for leaf in tree_leaves(own, int) if type(leaf) is int)}
    if section.factory:  # a user's data have sizes of their own
        sizes -= {size for each in micro_batch(recipe) for size in each.shape[1:]} - {section.seq_length}
    for size in sizes if share else ():
        parts[size] = lcm(parts.get(size, 1), *(divisor for divisor in divisors if size % divisor == 0))

    def changed(small):
        values = tree_map(lambda leaf: small.get(leaf, leaf) if type(leaf) is int else leaf, own)
        dataset = replace(section, seq_length=small[section.seq_length])
        return replace(recipe, model=replace(recipe.model, **values), train_dataset=dataset)

    def fits(small):
        with suppress(ValueError, TypeError):
            candidate = changed(small)
            for entry in fields(candidate.model):
                check_range(getattr(candidate.model, entry.name), entry.metadata, entry.name)
            check_recipe(candidate)
            return True
        return False

    return changed(least_sizes(sizes, parts, divisors, share, fits))


def _sharded_alike(recipe, parameters):
    """The small recipe with a threshold and bucket sizes under which `hsdp()` does as with the large `parameters`."""
    small = _of_stages(recipe, lambda stage, tree: [each.plan for each in tree.storage.parameters])
    pairs = [pair for stage, large in parameters.items() for pair in zip(large, small[stage], strict=True)]
    threshold = max((new.nbytes for old, new in pairs if "threshold" in old.reason), default=0) / 1024
    share = sum(new.nbytes for _, new in pairs) / sum(old.nbytes for old, _ in pairs)
    fusion = {  # buckets are full at the same share of all parameters; places count parameters
        kind: {"mode": "index", "config": list(each.places)} if each.megabytes is None else each.megabytes * share
        for kind, each in parse_comm_fusion(recipe.parallelism.comm_fusion).items()
    }
    return replace(recipe, parallelism=replace(recipe.parallelism, zero_threshold_kb=threshold, comm_fusion=fusion))
