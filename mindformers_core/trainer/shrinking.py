"""A recipe of small sizes with the plan of a large one: `shrunk_recipe`.

The large model is planned on shapes alone. Of a stage's layers those remain that differ from each other; of every size
the divisors that the plan needs remain; and the plan itself is carried over, with all choices, see `resized`.
"""

from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from math import lcm

from mindformers_core.communication import init_distributed
from mindformers_core.communication.world import shutdown
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models.spec import LayerRange
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.propagation.resized import without_calls
from mindformers_core.ranges import check_range
from mindformers_core.sharding.program import plan_call
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.trainer.data import micro_batch
from mindformers_core.trainer.pipeline_recipe import check_pipeline, layers_of_stages, micro_batches_of_a_run
from mindformers_core.trainer.recipe import MESH_AXES, accumulation_steps, mesh_shape
from mindformers_core.trainer.recipe_checks import check_recipe
from mindformers_core.trainer.step import build_cells
from mindformers_core.verify.differences import first_difference
from mindformers_core.verify.sharded_alike import fusion_alike, sharding_difference, threshold_alike
from mindformers_core.verify.sizes import divisors_of, least_sizes, parts_of_sizes
from mindformers_core.zero.plan import plan_parameters

__all__ = ["ShrunkRecipe", "shrunk_recipe"]

# How small parts may be, and whether sizes keep all divisors among the numbers of ranks: tried in this order
_TRIALS = ((2, False), (2, True), (4, True), (8, True))
_MOST_RUNS = 2  # of a schedule, or micro-batches, whose gradients are summed in a step


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

    The communication of this process must not be initialized: it stands for all ranks, one after the other.

    Args:
        recipe: the `Recipe`, with `data_parallel_shard` given.

    Returns:
        A `ShrunkRecipe`.

    Raises:
        ValueError: the recipe is impossible, runs without programs (eager), or has another plan at small sizes.
    """
    if recipe.context.engine == "eager":
        raise ValueError("context.engine: eager has no programs that could be verified: use context.engine=generated")
    large, reasons = _planned(recipe), []
    for kept in dict.fromkeys((_kept_layers(recipe, large, True), _kept_layers(recipe, large, False))):
        for least, exact in _TRIALS:
            try:
                return _shrunk(recipe, large, kept, least, exact)
            except (ValueError, TypeError) as error:
                reasons.append(str(error))
    raise ValueError(
        f"the recipe has no small sizes with the same plan ({reasons[-1].rstrip('.')}): verify it at its own sizes, with --full"
    )


def _planned(recipe, choices=None):
    """Number of a stage -> (`ShardedTree`, `CellPlan` with the keepers of recompute and swap)."""
    mesh, found, compiled = init_device_mesh(mesh_shape(recipe), MESH_AXES), {}, recipe.context.mode == 0
    for stage, net in _built(recipe, mesh):
        tree = tree_of(net)
        with tree.for_compiled() if compiled else nullcontext():
            given = choices[stage] if choices else None
            _, frame = plan_call(tree, "", micro_batch(recipe, stage), {}, given)
            found[stage] = tree, tree.activations.annotate("", frame, tree.compiling) if given is None else frame
    return dict(sorted(found.items()))


def _built(recipe, mesh):
    """`(number, Cell)` of every stage; the process stands for its rank until the next one."""
    for rank in mesh.group(mesh.rank_list[0], ("pp",)):
        init_distributed("fake", world_size=mesh.size, rank=rank)
        try:
            yield from build_cells(recipe, mesh, rank).items()
        finally:
            shutdown()


def _kept_layers(recipe, large, distinct):
    """For every stage `(containers of layers, numbers of the layers to keep, numbers of all)`.

    Args:
        recipe, large: the large recipe and its `_planned` stages.
        distinct: whether of equal layers only the first and the last one of a stage are kept.
    """
    count = getattr(recipe.model, "num_hidden_layers", None)
    if recipe.parallelism.pipeline_parallel > 1:
        ranges = layers_of_stages(recipe)
    else:
        ranges = [LayerRange(0, count or 0)]
    found = []
    for layers, (tree, frame) in zip(ranges, large.values(), strict=True):
        numbers = tuple(range(layers.offset, layers.offset + layers.count))
        children = {}
        for prefix, _, name in (path.rpartition(".") for path in tree.cells):
            if name.isdigit() and not any(part.isdigit() for part in prefix.split(".")):
                children.setdefault(prefix, []).append(int(name))
        containers = tuple(prefix for prefix, names in children.items() if tuple(names) == numbers)
        kept = _distinct(tree, frame, containers, numbers) if distinct and containers else numbers
        found.append((containers, kept, numbers))
    return tuple(found)


def _distinct(tree, frame, containers, numbers):
    """The first and the last one of `numbers`, and the first one of each kind of layer."""
    calls, kinds = {number: [] for number in numbers}, {}
    for path, inner in frame.walk():
        prefix, _, name = path.rpartition(".")
        if prefix in containers:
            calls[int(name)].append(inner)
    for number, frames in calls.items():
        again = [path for path in tree.activations.recomputed_cells for c in containers if f"{path}.".startswith(f"{c}.{number}.")]
        again = [path.replace(f".{number}", ".*", 1) for path in again]
        if not any(again == other[0] and _same(frames, other[1]) for other in kinds.values()):
            kinds[number] = again, frames
    return tuple(sorted({*numbers[:1], *kinds, *numbers[-1:]}))


def _same(frames, others):
    """Whether two layers have equal programs."""
    pairs = list(zip(frames, others))
    return len(frames) == len(others) and all(
        one is other or one.graph.key == other.graph.key and first_difference(one, other) is None
        for one, other in pairs
    )


def _shrunk(recipe, large, kept, least, exact):
    """The `ShrunkRecipe` of one trial.

    Raises:
        ValueError: the trial fails.
    """
    dropped = [
        {f"{prefix}.{number}" for prefix in containers for number in {*numbers} - {*numbers_kept}}
        for containers, numbers_kept, numbers in kept
    ]
    layers = tuple(number for _, numbers_kept, _ in kept for number in numbers_kept)
    choices = {stage: without_calls(large[stage][1], paths) for stage, paths in zip(large, dropped)}
    small = _with_few_micro_batches(_with_layers(recipe, kept, layers), least)
    small = _with_sizes(small, large, exact, least)
    plans = {stage: _parameters(tree, paths) for (stage, (tree, _)), paths in zip(large.items(), dropped)}
    small = _sharded_alike(small, large, plans)
    stages = _planned(small, choices)
    for stage, (tree, frame) in stages.items():
        pairs = [(plan, stored.plan) for (_, plan), stored in zip(plans[stage], tree.storage.parameters, strict=True)]
        why = sharding_difference(pairs) or first_difference(large[stage][1], frame) or _thin(choices[stage], frame)
        if why:
            raise ValueError(why)
    return ShrunkRecipe(small, choices, layers)


def _parameters(tree, dropped):
    """Pairs (number, `ParameterPlan`) of the parameters of a tree outside of the dropped layers."""
    stored = [(number, each.plan) for number, each in enumerate(tree.storage.parameters)]
    prefixes = tuple(f"{path}." for path in dropped)
    return [(number, plan) for number, plan in stored if not plan.path.startswith(prefixes)]


def _thin(large, small):
    """None, or a sentence on a dim that has one local element at small sizes, and several at the recipe's."""
    for (_, one), (_, other) in zip(large.walk(), small.walk(), strict=True):
        operators = ([e for e in frame.instructions if isinstance(e, OperatorPlan)] for frame in (one, other))
        for theirs, ours in zip(*operators, strict=True):
            for big, shape in zip(theirs.local_shapes, ours.local_shapes):
                if any(count == 1 < before for before, count in zip(big, shape)):
                    name = ours.node.operator
                    return f"{other.graph.label} has {shape} of {name} on a rank, where the recipe has {big}"
    return None


def _with_layers(recipe, kept, layers):
    """The recipe with the layers of these numbers only."""
    model, sizes = recipe.model, recipe.parallelism
    count = getattr(model, "num_hidden_layers", None)
    if count in (None, len(layers)):
        return recipe
    changes = {"num_hidden_layers": len(layers)}
    for entry in fields(model):
        value = getattr(model, entry.name)
        if isinstance(value, (tuple, list)) and len(value) == count:  # an entry for every layer
            changes[entry.name] = type(value)(value[number] for number in layers)
    if sizes.pipeline_parallel > 1:
        counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        changes |= {name: False for name in counted if hasattr(model, name)}
        sizes = replace(sizes, pipeline_parallel_layers_per_stage=tuple(len(numbers) for _, numbers, _ in kept))
    again, swap = recipe.recompute, recipe.swap
    if isinstance(again.full, tuple):
        again = replace(again, full=_places(again.full, layers))
    entries = {}
    for name in ("layer_swap", "op_swap"):
        moved = [(entry, _places(entry.layers, layers)) for entry in getattr(swap, name)]
        entries[name] = tuple(replace(entry, layers=places) for entry, places in moved if places)
    swap = replace(swap, **entries) if swap.is_on and not swap.is_short else swap
    return replace(recipe, model=replace(model, **changes), parallelism=sizes, recompute=again, swap=swap)


def _places(numbers, layers):
    return numbers if numbers is True else tuple(place for place, layer in enumerate(layers) if layer in numbers)


def _with_few_micro_batches(recipe, least):
    """The recipe with as few micro-batches as exercise its schedule, and the summing of gradients."""
    training, sizes = recipe.training, recipe.parallelism
    runs = accumulation_steps(recipe, sizes.data_parallel_replicate * sizes.data_parallel_shard)
    changes = {"global_batch_size": None, "gradient_accumulation_steps": min(runs, _MOST_RUNS)}
    if sizes.pipeline_parallel == 1:
        return replace(recipe, training=replace(training, local_batch_size=min(training.local_batch_size, least), **changes))
    whole, size = micro_batches_of_a_run(recipe), min(sizes.pipeline_parallel_microbatch_size, least)
    sizes = replace(sizes, pipeline_parallel_microbatch_size=size)
    for count in range(min(whole, 2 * sizes.pipeline_parallel), whole + 1):
        small = replace(recipe, parallelism=sizes, training=replace(training, local_batch_size=count * size, **changes))
        try:
            check_pipeline(small)
            break
        except ValueError:  # a schedule may want a multiple of the number of ranks
            continue
    return small


def _with_sizes(recipe, large, exact, least):
    """The recipe with the least sizes of the model and of a sequence; see `least_sizes`."""
    sizes, tensors = recipe.parallelism, set()
    for tree, frame in large.values():
        for each in {inner for _, inner in frame.walk()}:
            for entry in each.instructions:
                tensors |= {(value.shape, layout) for value, layout in (*entry.consumed, *entry.produced)}
        shards = [parameter for _, parameter in tree.cells[""].parameters_and_names()]
        tensors |= {(tuple(parameter.global_shape), parameter.layout) for parameter in shards}
    divisors = divisors_of((sizes.data_parallel_replicate, sizes.data_parallel_shard, sizes.tensor_parallel))
    found = {recipe.train_dataset.seq_length, *_whole_numbers(_sizes_of(recipe.model))}
    parts = parts_of_sizes(tensors)
    if exact:
        parts = {size: lcm(parts.get(size, 1), *(divisor for divisor in divisors if size % divisor == 0)) for size in found}

    def changed(small):
        section = recipe.train_dataset
        values = {name: _in_place(value, small) for name, value in _sizes_of(recipe.model).items()}
        section = replace(section, seq_length=small.get(section.seq_length, section.seq_length))
        return replace(recipe, model=replace(recipe.model, **values), train_dataset=section)

    def fits(small):
        try:
            candidate = changed(small)
            for entry in fields(candidate.model):
                check_range(getattr(candidate.model, entry.name), entry.metadata, entry.name)
            check_recipe(candidate)
        except (ValueError, TypeError):
            return False
        return True

    return changed(least_sizes(found, parts, divisors, least, fits))


def _sizes_of(model):
    """Name -> value of the fields of a model's config, without the number of layers."""
    return {each.name: getattr(model, each.name) for each in fields(model) if each.init and each.name != "num_hidden_layers"}


def _whole_numbers(value):
    """The whole numbers in a structure of a config."""
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
    if isinstance(value, (dict, tuple, list)):
        inner = value.values() if isinstance(value, dict) else value
        return {number for each in inner for number in _whole_numbers(each)}
    return {value} if type(value) is int else set()


def _in_place(value, small):
    """A structure of a config with small sizes."""
    if is_dataclass(value):
        return replace(value, **{each.name: _in_place(getattr(value, each.name), small) for each in fields(value) if each.init})
    if isinstance(value, dict):
        return {key: _in_place(each, small) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_in_place(each, small) for each in value)
    return small.get(value, value) if type(value) is int else value


def _sharded_alike(recipe, large, plans):
    """The small recipe with settings of `hsdp()` under which it shards the same parameters."""
    mesh = init_device_mesh(mesh_shape(recipe), MESH_AXES)
    small = {stage: [each.plan for each in tree_of(net).storage.parameters] for stage, net in _built(recipe, mesh)}
    pairs = {s: [(old, new) for (_, old), new in zip(plans[s], small[s], strict=True)] for s in plans}
    threshold, stages = threshold_alike([pair for found in pairs.values() for pair in found]), []
    for stage, (tree, _) in large.items():
        storage = tree.storage
        settings = storage.settings
        sharded = plan_parameters(small[stage], settings.shard_size, threshold, settings.level)
        numbers, olds = zip(*plans[stage]) if plans[stage] else ((), ())
        stages.append((settings, (*storage.gathers, *storage.reduces), list(zip(olds, sharded)), numbers))
    sizes = replace(recipe.parallelism, zero_threshold_kb=threshold, comm_fusion=fusion_alike(stages))
    return replace(recipe, parallelism=sizes)
