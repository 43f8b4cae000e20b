"""The layers in front of those of a stage, where a model's config says how its pipeline is made (RFC ICY7S6)."""

from mindformers_core.communication.world import world
from mindformers_core.pipeline.layer_split import split_config
from mindformers_core.pipeline.schedules.named import schedule_class


def get_transformer_layer_offset(config, vp_stage=None, pp_rank=None):
    """The number of decoder layers of the whole model before those of a stage of a rank (the name is Megatron-LM's).

    Args:
        config: has `num_hidden_layers`, `pipeline_model_parallel_size`, the number of a pipeline's ranks, and, if each
            holds several stages, `virtual_pipeline_model_parallel_size`, their number. It may have
            `pipeline_parallel_schedule`, whose name says which rank holds which stage (default: "1f1b"), and what
            `split_layers` takes: `pipeline_parallel_layers_per_stage`, `account_for_embedding_in_pipeline_split` and
            `account_for_loss_in_pipeline_split`.
        vp_stage: which of the rank's stages, from 0. Default: its only one.
        pp_rank: which of the pipeline's ranks. Default: this process's, where `pp` is the first axis of the mesh.

    Raises:
        ValueError: no such stage, or layers that can't be split so. RuntimeError: `init_distributed()` wasn't called,
            and no `pp_rank` is given.
    """
    ranks = config.pipeline_model_parallel_size
    count = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
    if vp_stage is None and count > 1 or not 0 <= (vp_stage or 0) < count:
        raise ValueError(f"vp_stage: {vp_stage} should be from 0 to {count - 1}, of the stages of a rank")
    pp_rank = world().rank * ranks // world().size if pp_rank is None else pp_rank
    layers = split_config(config, ranks * count, getattr(config, "pipeline_parallel_layers_per_stage", None))
    holders = schedule_class(getattr(config, "pipeline_parallel_schedule", "1f1b")).stage_ranks(len(layers), ranks)
    return [part for part, holder in zip(layers, holders) if holder == pp_rank][vp_stage or 0].offset
