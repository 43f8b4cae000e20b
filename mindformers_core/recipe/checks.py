"""Checks of a recipe for keys that exclude each other. No MindSpore is called here."""

import math

from mindformers_core.hints import near_multiples, nearest
from mindformers_core.models.spec import routed_layers
from mindformers_core.recipe.learning_rate import LrScheduler
from mindformers_core.recipe.pipeline import check_pipeline
from mindformers_core.recipe.sections import MESH_AXES, batch_plan, dataset_layouts, mesh_shape
from mindformers_core.recompute.settings import check_compilable, check_gathers
from mindformers_core.redistribution.quantities import named_device_model
from mindformers_core.scopes import errors_at
from mindformers_core.zero.buckets import parse_comm_fusion
from mindformers_core.zero.plan import LEVELS

# MindSpore 2.10 has no bfloat16 CPU kernel of Gather, which the embedding needs
_DTYPES = {"CPU": ("float32", "float16")} | dict.fromkeys(("GPU", "Ascend"), ("float32", "float16", "bfloat16"))


def check_recipe(recipe):
    """Raise `ValueError` or `TypeError` for the first keys that exclude each other, with their paths.

    Layers and patterns of recompute and swap are matched later, with the Cells.
    """
    for check in (
        _check_available, _check_model_divides, _check_experts, _check_placement, check_pipeline, _check_zero,
        _check_recompute, _check_data, _check_schedule,
    ):  # fmt: skip
        check(recipe)
    sizes = recipe.parallelism
    if sizes.data_parallel_shard > 0:
        batch_plan(recipe, sizes.data_parallel_replicate * sizes.data_parallel_shard)


def recipe_device_model(recipe):
    """The `DeviceModel` of `context.device_model`, or None."""
    name = recipe.context.device_model
    with errors_at("context.device_model: "):
        return None if name is None else named_device_model(name)


def ranks_of_exchange(sizes):
    """Number of ranks that exchange their parts of sequences for a part of the heads, of a `Parallelism`."""
    return sizes.context_parallel if sizes.context_parallel_algorithm == "all_to_all" else 1


def _check_available(recipe):
    sizes = recipe.parallelism
    recipe_device_model(recipe)
    if sizes.data_parallel_shard < 1 and sizes.data_parallel_shard != -1:
        raise ValueError(f"parallelism.data_parallel_shard: {sizes.data_parallel_shard} is neither -1 nor at least 1")
    if recipe.context.mode == 0 and recipe.context.engine == "eager":
        raise ValueError(
            "context.engine: eager can't be compiled, as context.mode: 0 (graph mode) asks: use "
            "context.engine=generated, or context.mode=1 (PyNative)"
        )
    dtypes, dtype = _DTYPES[recipe.context.device_target], getattr(recipe.model, "dtype", "float32")
    if dtype not in dtypes:
        raise ValueError(
            f"model.dtype: MindSpore can't run {dtype} models on context.device_target "
            f"{recipe.context.device_target}: use {' or '.join(dtypes)} there, or another device_target"
        )


def _check_model_divides(recipe):
    tp = recipe.parallelism.tensor_parallel
    for key, size in recipe.spec.divided(recipe.model):
        if size % tp:
            fitting = [divisor for divisor in range(1, tp) if size % divisor == 0]
            raise ValueError(
                f"model.{key}: {size} can't be cut into parallelism.tensor_parallel {tp} parts: try {fitting[-1]}"
            )
        if key == "num_attention_heads" and size % (tp * ranks_of_exchange(recipe.parallelism)):
            raise ValueError(
                "parallelism.context_parallel_algorithm: all_to_all cuts heads over context_parallel "
                f"{recipe.parallelism.context_parallel} x tensor_parallel {tp}, which don't divide model.{key} {size}: "
                "use ring, gather or auto"
            )
    _check_sequence_divides(recipe)


def _check_experts(recipe):
    """Mesh axes lie along experts, or inside of them; those that are left have equal ones."""
    sizes, known = recipe.parallelism, MESH_AXES[1:]
    for key in ("expert_parallel", "expert_tensor_parallel"):
        for axis in getattr(sizes, key):
            if axis not in known:
                raise ValueError(f"parallelism.{key}: '{axis}' is none of {', '.join(known)}{nearest(axis, known)}")
    both = (*sizes.expert_parallel, *sizes.expert_tensor_parallel)
    twice = next((axis for axis in both if both.count(axis) > 1), None)
    if twice is not None:
        raise ValueError(
            f"parallelism.expert_parallel: axis '{twice}' is named twice in {list(sizes.expert_parallel)} and "
            f"expert_tensor_parallel {list(sizes.expert_tensor_parallel)}: an axis cuts experts once"
        )
    model, axes = recipe.model, list(sizes.expert_parallel)
    if not axes or sizes.data_parallel_shard == -1 or not hasattr(model, "layer_spec"):
        return
    of_axis = dict(zip(MESH_AXES, mesh_shape(recipe)))
    parts = math.prod(of_axis[axis] for axis in axes)
    for count in {spec.router["num_experts"] for spec in layer_specs(model) if spec.router}:
        if count % parts:
            raise ValueError(
                f"parallelism.expert_parallel: {axes} has {parts} ranks, which don't divide {count} experts, and an "
                "axis is cut as a whole: name others, or split the axis of a mesh of your own in two: docs/experts.md"
            )


def layer_specs(model):
    """The `LayerSpec`s of all layers, of a model that has any."""
    return map(model.layer_spec, range(1, model.num_hidden_layers + 1)) if hasattr(model, "layer_spec") else ()


def _check_placement(recipe):
    """Of experts that move."""
    if not recipe.moe.placement.interval:
        return
    config, key = recipe.model, f"moe.placement.interval: {recipe.moe.placement.interval}"
    if not hasattr(config, "layer_spec") or not routed_layers(config)[0]:
        raise ValueError(f"{key} moves experts, which {recipe.model_name} has none of: leave it out")
    if not recipe.parallelism.expert_parallel:
        raise ValueError(
            f"{key} moves experts between the ranks of parallelism.expert_parallel, which names no axis: name one, as "
            "parallelism.expert_parallel=[dp], or leave it out"
        )
    if recipe.monitor.digests:
        raise ValueError(
            f"{key} moves experts to other places, by which monitor.digests sums elements up: leave one of them out"
        )


def _check_sequence_divides(recipe):
    """Of a model whose samples are sequences of `train_dataset.seq_length` tokens."""
    sizes, length = recipe.parallelism, recipe.train_dataset.seq_length
    cuts = {"context_parallel": sizes.context_parallel}
    cuts |= {"tensor_parallel": sizes.tensor_parallel} if sizes.sequence_parallel else {}
    cuts, parts = {key: size for key, size in cuts.items() if size > 1}, math.prod(cuts.values())
    chunks = math.lcm(parts, len(sizes.order or (0,)))
    if length % chunks:
        why = ", as sequence_parallel needs" if sizes.sequence_parallel else ""
        if length % parts == 0:
            why = f", each of chunks of context_parallel_balance {sizes.context_parallel_balance}"
        raise ValueError(
            f"train_dataset.seq_length: {length} can't be cut into parallelism."
            f"{' x '.join(f'{key} {size}' for key, size in cuts.items())} parts{why}: try "
            f"{near_multiples(length, chunks)}"
            f"{', or context_parallel_balance=contiguous' if length % parts == 0 else ''}"
        )
    balance, chunk = sizes.context_parallel_balance, length // len(sizes.order or range(length))
    for group in {spec.capacity[1] for spec in layer_specs(recipe.model) if spec.capacity and sizes.order != (0,)}:
        if chunk % group:
            raise ValueError(
                f"model.expert_capacity: groups of {group} tokens aren't consecutive where context_parallel_balance "
                f"{balance} puts chunks in another order: use {f'a size that divides {chunk}, or ' * (chunk > 1)}"
                "context_parallel_balance=contiguous"
            )


def _check_data(recipe):
    dataset, model = recipe.train_dataset, recipe.model
    longest, vocab_size = (getattr(model, key, None) for key in ("max_position_embeddings", "vocab_size"))
    if longest is not None and dataset.seq_length > longest:
        raise ValueError(
            f"train_dataset.seq_length: {dataset.seq_length} is more than model.max_position_embeddings {longest}"
        )
    given = [key for key in ("data_path", "sources", "factory") if getattr(dataset, key)]
    if len(given) > 1:
        raise ValueError(f"train_dataset.{given[1]}: train_dataset.{given[0]} is given, too: give one of them")
    for number, source in enumerate(dataset.sources):
        if bool(source.data_path) == bool(source.factory):
            raise ValueError(f"train_dataset.sources[{number}]: give one of data_path and factory")
    if recipe.spec.inputs:
        dataset_layouts(dataset, recipe.spec.inputs)
    if dataset.factory:
        return
    if dataset.packing == "documents" and "positions" not in recipe.spec.inputs[2:3]:
        raise ValueError(
            f"train_dataset.packing: documents needs a model that takes positions, but the ModelSpec of "
            f"{recipe.model_name} has the inputs {', '.join(recipe.spec.inputs) or '-'}: docs/data.md"
        )
    if vocab_size is None:
        raise ValueError(
            "train_dataset.factory: missing: a model without vocab_size doesn't take tokens; name the function that "
            "opens its dataset, as my_package.data:open_images"
        )
    paths = [path for source in (dataset, *dataset.sources) for path in source.data_path]
    if not paths and not dataset.sources and vocab_size < 256:
        raise ValueError(f"model.vocab_size: {vocab_size} is too small for bytes of text: at least 256")


def _check_schedule(recipe):
    schedule = recipe.lr_scheduler
    if not isinstance(schedule, LrScheduler):
        return
    if schedule.warmup_ratio is not None and schedule.warmup_steps:
        raise ValueError("lr_scheduler: warmup_steps and warmup_ratio are both given: give one")
    if schedule.lr_end > schedule.learning_rate:
        raise ValueError(
            f"lr_scheduler.lr_end: {schedule.lr_end} is more than lr_scheduler.learning_rate {schedule.learning_rate}"
        )


def _check_zero(recipe):
    sizes, level = recipe.parallelism, recipe.parallelism.zero_level
    if level > 0 and sizes.data_parallel_shard == sizes.context_parallel == 1:
        raise ValueError(
            f"parallelism.zero_level: {level} shards {LEVELS[f'level{level}']} among data_parallel_shard ranks, but "
            f"parallelism.data_parallel_shard is 1, so nothing would be sharded: use data_parallel_shard=2 or more, or "
            "zero_level=0"
        )
    if sizes.reshard_after_forward is not None and level != 3:
        raise ValueError(
            f"parallelism.reshard_after_forward: {sizes.reshard_after_forward} is about the sharded weights of "
            f"parallelism.zero_level 3, but zero_level is {level}: leave it out, or use zero_level=3"
        )
    if sizes.gradient_accumulation_shard and level == 0:
        raise ValueError(
            "parallelism.gradient_accumulation_shard: true is about sums of gradients that parallelism.zero_level 1, 2 "
            "or 3 shards, but zero_level is 0: leave it out, or use zero_level=2"
        )
    with errors_at("parallelism."):  # the message begins with the key
        parse_comm_fusion(sizes.comm_fusion)


def _check_recompute(recipe):
    asked = {"recompute": recipe.recompute.is_on, "swap": recipe.swap.is_on}
    sections = " and ".join(name for name in asked if asked[name])
    if sections and recipe.context.engine == "eager":
        raise ValueError(
            f"context.engine: eager keeps what every operator keeps, and {sections} can't change that: use "
            f"context.engine=generated, or leave {sections} out"
        )
    if recipe.context.mode == 0:
        check_compilable(recipe.recompute, recipe.swap)
    level = recipe.parallelism.zero_level
    check_gathers(recipe.recompute, level == 3, "parallelism.zero_level=3", f"zero_level is {level}")
