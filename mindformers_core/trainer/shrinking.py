"""A recipe of few ranks and small sizes with the plan of a large one: `narrowed_recipe`, then `shrunk_recipe`.

The large model is planned on shapes alone. Of the layers of a stage those remain that differ; of replicas, shards and
stages a few remain where the model is planned alike on them; of every size remain the divisors that the plan needs; and
the plan is carried over with all its choices, see `resized`.
"""

import gc
import re
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from math import lcm, prod

from mindformers_core.communication.world import rank_of
from mindformers_core.program.plan import OperatorPlan, Redistribution
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
from mindformers_core.verification.sizes import alike_sizes, divisors_of, least_sizes, parts_of_sizes
from mindformers_core.zero.buckets import parse_comm_fusion

# What at least remains of each size, tried in this order; where something does, also all divisors of it that are
# numbers of ranks
_SHARES = (0, 2**-8, 2**-4, 2**-2, 2**-1)
NARROWED = ("data_parallel_replicate", "data_parallel_shard", "pipeline_parallel")  # axes of which few ranks may remain
_DATA, _STAGES = (2, 4, 8, 2**30), (3, 4, 2**30)  # what is tried: at most so many; three stages have one in the middle
_FEW = 16  # ranks that all remain
_SEVERAL = 2  # samples of a micro-batch, of which there were at least as many
_LAYERS = 4  # of few ranks, so that parameters are more than 32
_RUNS = 3  # in a step: the first, the last, and one between


def planned(recipe, choices=None, forgets=False, taken=lambda stage, *found: found):
    """Number of a stage -> `(ShardedTree, CellGraph, CellPlan)`, in order, or what is taken of it.

    Args:
        recipe: the `Recipe`.
        choices: number of a stage -> function of its `CellGraph` that returns its plan. Default: propagate.
        forgets: whether contents of constants are dropped, such as masks of long sequences.
        taken: function of the stage and these three, for a recipe with more stages than memory has room for.
    """

    def plan(stage, tree):
        graph, frame = annotated_plan(tree, "", micro_batch(recipe, stage), {}, (choices or {}).get(stage))
        for constant in (each for call in graph.calls() for each in call.constants if forgets):
            constant.forget()
        return taken(stage, tree, graph, frame)

    return _of_stages(recipe, plan)


def _of_stages(recipe, function):
    """Number of a stage -> `function(number, its ShardedTree)`, called while this process stands for a rank of it."""
    mesh, found = recipe_mesh(recipe), {}
    for rank in mesh.group(mesh.rank_list[0], ("pp",)):
        with rank_of(mesh.size, rank, device_target=recipe.context.device_target):
            for stage, net in build_cells(recipe, mesh, rank).items():
                found[stage] = function(stage, tree_of(net))
    return dict(sorted(found.items()))


def narrowed_recipe(recipe):
    """The recipe on the least replicas, shards and stages on which it has the same plan at its own sizes.

    Tensor parallelism stays as it is. This process stands for all ranks, one after the other.

    Args:
        recipe: the `Recipe`, with `data_parallel_shard` given.

    Returns:
        A `Recipe` with the layers that differ, on fewer ranks; the given one where its plan would be another.
    """
    sizes, numbers = recipe.parallelism, _layers_of_stages(recipe)
    given = tuple(getattr(sizes, name) for name in NARROWED)
    meshes = {tuple(map(min, given, (data, data, stages))) for data in _DATA for stages in _STAGES}
    meshes = sorted(meshes - {given}, key=prod)
    if not meshes or prod(given) * sizes.tensor_parallel <= _FEW:
        return recipe

    def taken(stage, tree, _, frame):
        gc.collect()  # Cells and plan of the stage before
        return _layer_kinds(recipe, frame, numbers[stage])[1], _choices_of(tree, frame)

    layers, choices = zip(*planned(recipe, forgets=True, taken=taken).values())
    runs = accumulation_steps(recipe, sizes.data_parallel_replicate * sizes.data_parallel_shard)
    training = replace(recipe.training, global_batch_size=None, gradient_accumulation_steps=runs)
    own, tensor = _own_sizes(recipe), sizes.tensor_parallel
    for mesh in meshes:
        counts = [*zip(given[:2], mesh), (tensor, tensor)]
        model = _resized_model(recipe.model, own, alike_sizes({*tree_leaves(own, int)}, counts))
        chosen = [*range(mesh[2] * len(layers) // sizes.pipeline_parallel - 1), len(layers) - 1]
        parallelism = replace(sizes, **dict(zip(NARROWED, mesh)))
        with suppress(ValueError):  # an impossible recipe
            small = replace(recipe, parallelism=parallelism, training=training, model=model)
            check_recipe(small := _with_layers(small, [layers[stage] for stage in chosen]))
            found = [_choices_of(tree, frame) for tree, _, frame in planned(small, forgets=True).values()]
            if found == [choices[stage] for stage in chosen] and all(each in found for each in choices):
                return small
    return recipe


def _choices_of(tree, frame):
    """What a plan decides, whatever the sizes of mesh axes and the number of equal layers: a set of texts."""

    def at(pairs):
        return [(layout.axes, layout.partial, layout.varying, layout.dims == layout.axes) for _, layout in pairs]

    stored = [each.plan for each in tree.storage.parameters]
    found = {f"{re.sub('[0-9]+', '*', plan.path)} {plan.dim} {_kind(plan)}" for plan in stored}
    for path, inner in frame.walk():
        for entry in inner.instructions:
            keeper, how = inner.keepers.get(entry), ""
            if isinstance(entry, Redistribution):
                how = [(step.kind, step.op, step.dim, step.to_dim, step.axes) for step in entry.steps]
            elif isinstance(entry, OperatorPlan):
                several = [[size > 1 for size in shape] for shape in entry.local_shapes]
                how = entry.node.operator, entry.axes_of, entry.algorithm, entry.cut_axes, several
            ends = at(entry.consumed), at(entry.produced), keeper and keeper.name
            found.add(f"{re.sub('[0-9]+', '*', path)} {how} {ends}")
    return found


def _kind(plan):
    """How `hsdp()` shards a parameter, without numbers."""
    return re.sub(r"\[.*?\]|[\d.e+]+", "#", f"{plan.unit}: {plan.reason}")


def _layers_of_stages(recipe):
    """The numbers of the layers of every stage."""
    if recipe.parallelism.pipeline_parallel > 1:
        return [tuple(range(each.offset, each.offset + each.count)) for each in layers_of_stages(recipe)]
    return [tuple(range(getattr(recipe.model, "num_hidden_layers", 0)))]


def shrunk_recipe(recipe):
    """The recipe with the least sizes at which its plan remains the same, and with few layers and micro-batches.

    This process stands for all ranks, one after the other.

    Args:
        recipe: the `Recipe`, with `data_parallel_shard` given.

    Returns:
        `(small, plans)`: the small `Recipe`, on the same mesh, and its plans, as of `simulate`.

    Raises:
        ValueError: the recipe is impossible, or has another plan at small sizes.
    """
    stages, layers, choices, parameters, tensors = _layers_of_stages(recipe), [], {}, {}, set()
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
            if large.dim != small.dim or _kind(large) != _kind(small):
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


def _own_sizes(recipe):
    """Name -> value of the settings of a model, without its number of layers."""
    names = [each.name for each in fields(recipe.model) if each.init and each.name != "num_hidden_layers"]
    return {name: getattr(recipe.model, name) for name in names}


def _resized_model(model, own, small):
    """The model of other sizes; `small`: size -> new size."""
    values = tree_map(lambda leaf: small.get(leaf, leaf) if type(leaf) is int else leaf, own)
    return replace(model, **values)


def _with_sizes(recipe, parts, share):
    """The recipe with the least sizes of the model and of a sequence; see `least_sizes`."""
    parallelism, section = recipe.parallelism, recipe.train_dataset
    ranks = parallelism.data_parallel_replicate, parallelism.data_parallel_shard, parallelism.tensor_parallel
    own, divisors = _own_sizes(recipe), divisors_of(ranks)
    sizes = {section.seq_length, *(leaf for leaf in tree_leaves(own, int) if type(leaf) is int)}
    if section.factory:  # a user's data have sizes of their own
        sizes -= {size for each in micro_batch(recipe) for size in each.shape[1:]} - {section.seq_length}
    for size in sizes if share else ():
        parts[size] = lcm(parts.get(size, 1), *(divisor for divisor in divisors if size % divisor == 0))

    def changed(small, length=None):
        dataset = replace(section, seq_length=length or small[section.seq_length])
        return replace(recipe, model=_resized_model(recipe.model, own, small), train_dataset=dataset)

    def fits(small):
        with suppress(ValueError, TypeError):
            candidate = changed(small)
            for entry in fields(candidate.model):
                check_range(getattr(candidate.model, entry.name), entry.metadata, entry.name)
            check_recipe(candidate)
            return True
        return False

    small = least_sizes(sizes, parts, divisors, share, fits)
    count, length = parts.get(section.seq_length, 1), small[section.seq_length]
    odd = length - count  # every rank has an odd number of positions
    is_free = share == 0 and length // count in range(4, length + 1, 2) and odd not in small.values()
    is_free = is_free and all(section.seq_length % divisor == 0 or odd % divisor for divisor in divisors)
    return changed(small, odd if is_free else length)


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
