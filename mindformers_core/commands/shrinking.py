"""A recipe of few ranks and small sizes with the plan of a large one: `shrunk_recipe`.

The large model is planned on shapes alone. Of the layers of a stage those remain that differ; of stages those that are
planned otherwise, of replicas, shards, parts of sequences and of layers a few, of every size the divisors that the plan
needs; and the plan is carried over with all its choices, see `resized`.
"""

import gc
import re
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import product
from math import lcm, prod
from typing import NamedTuple

from mindformers_core.communication.world import rank_of
from mindformers_core.data.reading import micro_batch, sample_arrays
from mindformers_core.models.experts import RouterConfig
from mindformers_core.padding import stored_shape
from mindformers_core.program.plan import OperatorPlan, Redistribution
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.propagation.resized import resized
from mindformers_core.ranges import check_range
from mindformers_core.recipe.checks import check_recipe, layer_specs
from mindformers_core.recipe.pipeline import check_pipeline, layers_of_stages
from mindformers_core.recipe.sections import batch_plan, micro_batch_size, micro_batches_of_a_run, recipe_mesh
from mindformers_core.sharding.plan_passes import planned_call
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.trainer.cells import build_cells
from mindformers_core.verification.sizes import divisors_of, least_sizes, parts_of_products, parts_of_sizes
from mindformers_core.zero.buckets import parse_comm_fusion

# What at least remains of each size, tried in this order; where something does, also all divisors of it that are
# numbers of ranks
_SHARES = (0, 2**-8, 2**-4, 2**-2, 2**-1)
# Axes of which few ranks may remain
NARROWED = (
    "data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel",
)  # fmt: skip
# What is tried: at most so many; what 2 divides may have to be no multiple of the number of ranks; of four ranks some
# aren't neighbours, in a ring, too; three stages have one in the middle
_DATA, _TENSOR, _STAGES = (2, 3, 2**30), (4, 2**30), (3, 4, 2**30)
_FEW = 16  # ranks that all remain
_SEVERAL = 2  # samples of a micro-batch, of which there were at least as many
_LAYERS = 4  # of few ranks, so that parameters are more than 32
_FIRST = "first_k_dense_replace"  # a model's number of first layers that are of another kind
_RUNS = 3  # in a step: the first, the last, and one between, unless each has several micro-batches, in a pipeline


def planned(recipe, choices=None, forgets=False, taken=lambda stage, *found: found):
    """Number of a stage -> `(ShardedTree, CellGraph, CellPlan)`, in order, or what is taken of it.

    Args:
        choices: number of a stage -> function of its `CellGraph` and of `mesh` that returns its plan. Default:
            propagate.
        forgets: whether contents of constants are dropped, such as masks of long sequences.
        taken: function of the stage and these three, for a recipe with more stages than memory has room for.
    """

    def plan_stage(stage, tree):
        saved = choices and partial(choices[stage], mesh=tree.mesh)
        graph, plan, _ = planned_call(tree, "", micro_batch(recipe, tree.cells[""], stage), {}, saved)
        for constant in (each for call in graph.calls() for each in call.constants if forgets):
            constant.forget()
        return taken(stage, tree, graph, plan)

    return _of_stages(recipe, plan_stage)


def _of_stages(recipe, function):
    """Number of a stage -> `function(number, its ShardedTree)`, called while this process stands for a rank of it."""
    mesh, found = recipe_mesh(recipe), {}
    for rank in mesh.group(mesh.rank_list[0], ("pp",)):
        with rank_of(mesh.size, rank, device_target=recipe.context.device_target):
            for stage, net in build_cells(recipe, mesh, rank).items():
                found[stage] = function(stage, tree_of(net))
    return dict(sorted(found.items()))


def _choices_of(tree, plan):
    """What a plan decides, whatever the number of equal layers: a set of texts."""

    def at(pairs):
        return [(layout.axes, layout.partial, layout.varying, layout.dims == layout.axes) for _, layout in pairs]

    stored = [each.plan for each in tree.storage.parameters]
    found = {f"{re.sub('[0-9]+', '*', each.path)} {each.dim} {_kind(each)}" for each in stored}
    for path, inner in {(re.sub("[0-9]+", "*", path), inner) for path, inner in plan.walk()}:
        for entry in inner.instructions:
            keeper, how = inner.keepers.get(entry), ""
            if isinstance(entry, Redistribution):
                how = [(step.kind, step.op, step.dim, step.to_dim, step.axes) for step in entry.steps]
            elif isinstance(entry, OperatorPlan):
                several = [[size > 1 for size in shape] for shape in entry.local_shapes]
                how = entry.node.operator, entry.axes_of, entry.algorithm, entry.cut_axes, several
            ends = at(entry.consumed), at(entry.produced), keeper and keeper.name
            found.add(f"{path} {how} {ends}")
    return frozenset(found)


def _kind(plan):
    """How `hsdp()` shards a parameter, without numbers."""
    return re.sub(r"\[.*?\]|[\d.e+]+", "#", f"{plan.unit}: {plan.reason}")


def _layers_of_stages(recipe):
    """The numbers of the layers of every stage."""
    if recipe.parallelism.pipeline_parallel > 1:
        return [tuple(range(each.offset, each.offset + each.count)) for each in layers_of_stages(recipe)]
    return [tuple(range(getattr(recipe.model, "num_hidden_layers", 0)))]


class _Stage(NamedTuple):
    """What a small recipe needs of a stage of a large one: numbers of the layers that remain, what the plan decides,
    the plan as a function of a graph and a mesh, sharding of the parameters, and tensors `(shape, layout)`."""

    layers: tuple
    decided: tuple
    plan: object
    parameters: list
    tensors: set


def _planned_stages(recipe):
    """The `_Stage`s of a recipe; stages that are planned alike share a plan."""
    numbers, known = _layers_of_stages(recipe), {}

    def taken(stage, tree, _, plan):
        gc.collect()  # Cells and plan of the stage before
        dropped, kept = _layer_kinds(recipe, plan, numbers[stage])
        decided = _choices_of(tree, plan), tuple(number - numbers[stage][0] for number in kept)
        if decided in known:
            return known[decided]._replace(layers=kept)
        outside, tensors = tuple(f"{path}." for path in dropped), set()
        for entry in {entry for _, inner in plan.walk() for entry in inner.instructions}:
            tensors |= {(value.shape, layout) for value, layout in (*entry.consumed, *entry.produced)}
        tensors |= {(stored_shape(each), each.layout) for each in tree.cells[""].get_parameters()}
        own = [each.plan for each in tree.storage.parameters if not each.plan.path.startswith(outside)]
        return known.setdefault(decided, _Stage(kept, decided, partial(resized, plan, dropped=dropped), own, tensors))

    return list(planned(recipe, forgets=True, taken=taken).values())


def _meshes(given, stages):
    """Numbers of ranks to try, as `NARROWED`, ascending, each with the stages that remain: all kinds of them."""
    found, chunks = {given: stages}, len(stages) // given[-1]
    tensor = (2, *_TENSOR) if given[2] >= _TENSOR[0] else _TENSOR  # where a sequence has four ranks, two are enough
    for data, *others in product(_DATA, _TENSOR, tensor, _STAGES) if prod(given) > _FEW else ():
        mesh = tuple(map(min, given, (data, data, *others)))
        kept = [*stages[: mesh[-1] * chunks - 1], stages[-1]]
        if {each.decided for each in kept} == {each.decided for each in stages}:
            found[mesh] = kept
    return sorted(found.items(), key=lambda entry: prod(entry[0]))


def shrunk_recipe(recipe):
    """The recipe on the fewest ranks, and with the least sizes, that its plan can be carried over to.

    Of more than 16 ranks few remain of each axis; of layers and micro-batches some. This process stands for all ranks,
    one after the other.

    Args:
        recipe: the `Recipe`, with `data_parallel_shard` given.

    Returns:
        `(small, plans)`: the small `Recipe`, and its plans, as of `simulate`.

    Raises:
        ValueError: the recipe is impossible, or has another plan at small sizes.
    """
    sizes, stages = recipe.parallelism, _planned_stages(recipe)
    given, tensors = tuple(vars(sizes)[name] for name in NARROWED), {pair for each in stages for pair in each.tensors}
    plan = batch_plan(recipe, recipe_mesh(recipe).axis_size("dp"))
    runs = min(plan.runs, _RUNS - (sizes.pipeline_parallel > 1))
    training = replace(recipe.training, global_batch_size=None, gradient_accumulation_steps=runs)
    for (mesh, kept), share in product(_meshes(given, stages), _SHARES):
        small = replace(recipe, training=training, parallelism=replace(sizes, **dict(zip(NARROWED, mesh))))
        try:
            small = _with_few_micro_batches(_with_layers(small, [each.layers for each in kept]), plan.empty > 0)
            small = _with_sizes(small, tensors, [*zip(given, mesh)][:-1], share)
            return (small := _sharded_alike(small, [each.parameters for each in kept])), _plans(small, kept)
        except Exception as error:  # a user's model may fail in any way at sizes that aren't its own
            reason = str(error).rstrip(".")
    raise ValueError(
        f"the recipe has no small sizes with the same plan ({reason}): verify it at its own sizes, with --full"
    )


def _layer_kinds(recipe, plan, numbers):
    """Paths of the layers of a stage that are like others, in plan and settings, and numbers of at least two others."""
    layers, first = {}, {}  # path of a CellList -> number -> `CellPlan`s; kind of a layer -> number
    for path, inner in plan.walk():
        prefix, _, name = path.rpartition(".")
        if name.isdigit() and not re.search(r"\d", prefix):
            layers.setdefault(prefix, {}).setdefault(int(name), []).append(inner)
    layers = {prefix: found for prefix, found in layers.items() if tuple(found) == numbers}
    if not layers:
        return frozenset(), numbers
    named = [recipe.recompute.full, *(entry.layers for entry in (*recipe.swap.layer_swap, *recipe.swap.op_swap))]
    for number in numbers:
        asked = tuple(number in each for each in named if isinstance(each, tuple))
        plans = tuple(each for found in layers.values() for each in found[number])  # equal layers share a plan
        first.setdefault((asked, plans), number)
    few = numbers[:_LAYERS] if recipe_mesh(recipe).size <= _LAYERS and recipe.parallelism.pipeline_parallel == 1 else ()
    kept = tuple(first.values()) if len(first) > 1 else tuple(sorted({numbers[0], *few[:-1], numbers[-1]}))
    return frozenset(f"{prefix}.{number}" for prefix in layers for number in {*numbers} - {*kept}), kept


def _plans(recipe, stages):
    """The plans of a small recipe; `ValueError` where `hsdp()` shards parameters otherwise than in the large one."""
    plans = {}
    for stage, (tree, graph, plan) in planned(recipe, [each.plan for each in stages]).items():
        plans[stage, tree.mesh] = graph, plan
        for large, stored in zip(stages[stage].parameters, tree.storage.parameters, strict=True):
            small = stored.plan
            if large.dim != small.dim or _kind(large) != _kind(small):
                shown = [each.reason or f"along dim {each.dim}" for each in (large, small)]
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
    if (first := getattr(model, _FIRST, None)) is not None:
        changes[_FIRST] = sum(number < first for number in layers)
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


def _with_few_micro_batches(recipe, has_empty_rows):
    """The recipe with as few micro-batches as exercise its schedule, with an empty row if it has any."""
    training, sizes = recipe.training, recipe.parallelism
    whole, size = micro_batches_of_a_run(recipe), min(micro_batch_size(recipe), _SEVERAL)
    sizes = replace(sizes, pipeline_parallel_microbatch_size=size)
    for count in range(min(whole, sizes.pipeline_parallel + 1), whole + 1):
        small = replace(recipe, parallelism=sizes, training=replace(training, local_batch_size=count * size))
        with suppress(ValueError):  # a schedule may want a multiple of the number of ranks
            check_pipeline(small)
            return _with_empty_row(small) if has_empty_rows else small


def _with_empty_row(recipe):
    full = batch_plan(recipe, recipe_mesh(recipe).axis_size("dp")).samples
    training = replace(recipe.training, global_batch_size=max(1, full - 1), gradient_accumulation_steps=None)
    return replace(recipe, training=training)


def _own_sizes(recipe):
    """Name -> value of the settings of a model, without its numbers of layers."""
    counts = "num_hidden_layers", _FIRST
    names = [each.name for each in fields(recipe.model) if each.init and each.name not in counts]
    return {name: getattr(recipe.model, name) for name in names}


def _resized_model(model, own, small):
    """The model of other sizes; `small`: size -> new size."""
    values = tree_map(lambda leaf: small.get(leaf, leaf) if type(leaf) is int else leaf, own)
    return replace(model, **values)


def _with_sizes(recipe, tensors, ranks, share):
    """The recipe with the least sizes of the model and of a sequence; see `least_sizes`.

    Args:
        tensors: pairs (global shape, Layout) of the large recipe.
        ranks: pairs (its number of ranks, the one that takes its place) of `NARROWED` without stages.
        share: see `least_sizes`.
    """
    section, own, divisors = recipe.train_dataset, _own_sizes(recipe), divisors_of(ranks)
    fewer = dict(zip(("dp_replicate", "dp_shard", "cp", "tp"), (few for _, few in ranks)))
    parts = parts_of_sizes(tensors, fewer | {"dp": fewer["dp_replicate"] * fewer["dp_shard"]})
    sizes = {section.seq_length, *(leaf for leaf in tree_leaves(own, int) if type(leaf) is int)}
    if section.factory:  # a user's data have sizes of their own
        sizes -= {size for each in sample_arrays(recipe) for size in each.shape[1:]} - {section.seq_length}
    parts = parts_of_products(sizes, parts)
    for size in sizes if share else ():
        counts = zip(parts.get(size, (1, 1)), *(pair for pair in divisors if size % pair[0] == 0))
        parts[size] = tuple(lcm(*count) for count in counts)

    def changed(small, length=None):
        dataset = replace(section, seq_length=length or small[section.seq_length])
        return replace(recipe, model=_resized_model(recipe.model, own, small), train_dataset=dataset)

    def fits(small):
        with suppress(ValueError, TypeError):
            candidate = changed(small)
            for entry in fields(candidate.model):
                check_range(getattr(candidate.model, entry.name), entry.metadata, entry.name)
            check_recipe(candidate)
            for spec in layer_specs(candidate.model):
                RouterConfig(**spec.router or {})
            return True
        return False

    small = least_sizes(sizes, parts, divisors, share, fits)
    count, length = parts.get(section.seq_length, (1, 1))[1], small[section.seq_length]
    odd = length - count  # every rank has an odd number of positions
    is_free = share == 0 and length // count in range(4, length + 1, 2) and odd not in small.values()
    is_free = (
        is_free
        and fits(small | {section.seq_length: odd})
        and all(section.seq_length % many == 0 or odd % few for many, few in divisors)
    )
    return changed(small, odd if is_free else length)


def _sharded_alike(recipe, parameters):
    """The small recipe with a threshold and bucket sizes under which `hsdp()` does as with the large `parameters`."""
    small = _of_stages(recipe, lambda stage, tree: [each.plan for each in tree.storage.parameters])
    pairs = [pair for stage, large in enumerate(parameters) for pair in zip(large, small[stage], strict=True)]
    threshold = max((new.nbytes for old, new in pairs if "threshold" in old.reason), default=0) / 1024
    share = sum(new.nbytes for _, new in pairs) / sum(old.nbytes for old, _ in pairs)
    fusion = {  # buckets are full at the same share of all parameters; places count parameters
        kind: {"mode": "index", "config": list(each.places)} if each.megabytes is None else each.megabytes * share
        for kind, each in parse_comm_fusion(recipe.parallelism.comm_fusion).items()
    }
    return replace(recipe, parallelism=replace(recipe.parallelism, zero_threshold_kb=threshold, comm_fusion=fusion))
