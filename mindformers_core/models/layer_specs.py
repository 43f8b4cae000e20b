"""What a decoder layer is made of, and which layers a pipeline stage holds. Pure Python.

The numbering is Megatron-LM's, which the RFC (ICY7S6, `build_layer`) follows: layer numbers count from 1, locally in a
chunk of the model; adding the chunk's offset gives the number in the whole model. Stages count from 0 over all ranks
and chunks, in the order in which a micro-batch passes them.
"""

from dataclasses import dataclass, field

from mindformers_core.pipeline.schedules.placement import PLACEMENTS

__all__ = [
    "LayerSpec",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "layers_of_stages",
    "stage_count",
    "stage_index",
    "tied_paths",
]


@dataclass(frozen=True)
class LayerSpec:
    """A Cell class and the classes of its parts, so that a layer can be changed from outside.

    Attributes:
        module: the layer's class, made by `module(config, layer_number, **submodules)`.
        submodules: classes by argument name.
    """

    module: type
    submodules: dict = field(default_factory=dict)


def stage_count(config):
    """Number of stages of the whole model, over all ranks and chunks."""
    return config.pipeline_parallel * config.virtual_pipeline


def stage_index(config, vp_stage=None):
    """Number of the stage, from 0, that is chunk `vp_stage` of this process; without one, its only chunk.

    `config.pipeline_placement` says how chunks lie on ranks: of p ranks, rank r holds as chunk c the stage c·p + r
    ("loop", Narayanan et al. 2021), or the stages r and 2p - 1 - r ("v", Qi et al. 2024).

    Raises:
        ValueError: `vp_stage` out of range, or None where there are several chunks.
    """
    _check_chunk(config, vp_stage)
    ranks = PLACEMENTS[config.pipeline_placement](stage_count(config), config.pipeline_parallel)
    own = [stage for stage, rank in enumerate(ranks) if rank == config.pipeline_rank]
    return own[vp_stage or 0]


def get_num_layers_to_build(config, vp_stage=None):
    """Number of layers in this process's chunk `vp_stage` of the model; without one, in its only chunk.

    Raises:
        ValueError: as `stage_index`.
    """
    return layers_of_stages(config)[stage_index(config, vp_stage)]


def get_transformer_layer_offset(config, vp_stage=None):
    """Number of layers of the whole model before this process's chunk `vp_stage`.

    Raises:
        ValueError: as `stage_index`.
    """
    return sum(layers_of_stages(config)[: stage_index(config, vp_stage)])


def layers_of_stages(config):
    """Number of decoder layers of every stage: as `config.layers_per_stage` says, or else all alike.

    With `config.account_for_embedding_in_pipeline_split` the embedding counts as a layer, so the first stage has one
    decoder layer less than the others; with `config.account_for_loss_in_pipeline_split` the output layer does, and the
    last stage has one less (Megatron-LM).

    Raises:
        ValueError: layers that can't be spread so.
    """
    if config.layers_per_stage is not None:
        _check_layers_per_stage(config)
        return tuple(config.layers_per_stage)
    stages = stage_count(config)
    before, after = config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split
    total = config.num_hidden_layers + before + after
    if total % stages:
        raise ValueError(_uneven(config, total, before, after))
    counts = [total // stages] * stages
    counts[0] -= before
    counts[-1] -= after
    return tuple(counts)


def tied_paths(config):
    """Paths of the parameters that the first and the last stage share, as `PipelineStage` takes them."""
    return ("model.embed_tokens.weight",) if config.tie_word_embeddings else ()


def _uneven(config, total, before, after):
    """What to say of layers that are no multiple of the stages."""
    stages = stage_count(config)
    counted = [name for name, asked in (("embedding", before), ("output layer", after)) if asked]
    what = f" with {' and '.join(counted)} counted makes {total}, which" if counted else ""
    below = total // stages * stages - before - after
    fitting = [str(count) for count in (below, below + stages) if count >= 1]
    return (
        f"num_hidden_layers: {config.num_hidden_layers}{what} should be a multiple of pipeline_parallel * "
        f"virtual_pipeline ({stages}): for example {' or '.join(fitting)}; or give the number of layers of every "
        "stage as layers_per_stage"
    )


def _check_layers_per_stage(config):
    given, stages = config.layers_per_stage, stage_count(config)
    what = f"layers_per_stage: {list(given)}"
    if len(given) != stages:
        raise ValueError(
            f"{what} has {len(given)} entries, but pipeline_parallel {config.pipeline_parallel} * virtual_pipeline "
            f"{config.virtual_pipeline} makes {stages} stages: give the number of layers of each"
        )
    if sum(given) != config.num_hidden_layers:
        raise ValueError(f"{what} makes {sum(given)} layers, but num_hidden_layers is {config.num_hidden_layers}")
    if 0 in given[1:-1]:
        raise ValueError(
            f"{what} leaves stage {given.index(0, 1)} without anything: only the first stage, which has the embedding, "
            "and the last one, which has the output layer, can do without decoder layers"
        )
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if getattr(config, name):
            raise ValueError(f"{what} already says where all layers are: leave {name} out, or layers_per_stage")


def _check_chunk(config, vp_stage):
    chunks = config.virtual_pipeline
    if vp_stage is None and chunks > 1:
        raise ValueError(f"vp_stage: with virtual_pipeline={chunks} say which chunk to build, 0 to {chunks - 1}")
    if vp_stage is not None and not 0 <= vp_stage < chunks:
        raise ValueError(f"vp_stage: {vp_stage} should be from 0 to {chunks - 1} with virtual_pipeline={chunks}")
