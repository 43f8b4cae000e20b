"""Assigns decoder layers to the stages of a pipeline, and stages to ranks. Pure Python.

Stages are numbered from 0 over all ranks and chunks, in the order in which a micro-batch passes them (Megatron-LM).
"""

from itertools import accumulate

from mindformers_core.models.spec import LayerRange
from mindformers_core.pipeline.schedules.placement import PLACEMENTS


def split_layers(count, stages, layers_per_stage=None, embedding_counts=False, loss_counts=False):
    """The decoder layers of every stage.

    Args:
        count: number of decoder layers of the whole model.
        stages: number of stages, over all ranks and chunks.
        layers_per_stage: number of decoder layers of each stage; the first and the last may have none. Default: all
            stages have the same number.
        embedding_counts: whether the embedding counts as a layer, so that the first stage has one decoder layer less
            than the others (Megatron-LM's `account_for_embedding_in_pipeline_split`).
        loss_counts: the same for the output layer and the last stage (`account_for_loss_in_pipeline_split`).

    Returns:
        A tuple of `LayerRange`.

    Raises:
        ValueError: `count` isn't divisible, or `layers_per_stage` doesn't fit it.
    """
    if layers_per_stage is None:
        total = count + embedding_counts + loss_counts
        if total % stages:
            below = total // stages * stages - embedding_counts - loss_counts
            fitting = " or ".join(str(fit) for fit in (below, below + stages) if fit >= 1)
            counted = [
                name for name, is_one in (("embedding", embedding_counts), ("output layer", loss_counts)) if is_one
            ]
            what = f" with {' and '.join(counted)} counted makes {total}, which" if counted else ""
            raise ValueError(
                f"num_hidden_layers: {count}{what} should be a multiple of the number of stages ({stages}): for "
                f"example {fitting}; or give the number of layers of every stage as layers_per_stage"
            )
        counts = [total // stages] * stages
        counts[0] -= embedding_counts
        counts[-1] -= loss_counts
    else:
        counts = list(layers_per_stage)
        _check_counts(count, stages, counts, embedding_counts or loss_counts)
    offsets = [0, *accumulate(counts)]
    return tuple(
        LayerRange(offsets[stage], counts[stage], is_first=stage == 0, is_last=stage == stages - 1)
        for stage in range(stages)
    )


def split_config(config, stages, layers_per_stage=None):
    """`split_layers` of a model's config, with its `num_hidden_layers`, and what counts as a layer, if it says so."""
    counts = (getattr(config, f"account_for_{part}_in_pipeline_split", False) for part in ("embedding", "loss"))
    return split_layers(config.num_hidden_layers, stages, layers_per_stage or None, *counts)


def stages_of_rank(rank, ranks, chunks=1, placement="loop"):
    """Numbers of the stages that a pipeline rank holds, ascending.

    Args:
        rank: which of the pipeline's ranks, from 0.
        ranks: number of the pipeline's ranks.
        chunks: number of stages on each rank.
        placement: of p ranks, rank r holds the stages r, p + r, … ("loop", Narayanan et al. 2021), or r and
            2p - 1 - r ("v", Qi et al. 2024).

    Raises:
        ValueError: a number of chunks that the placement doesn't support.
    """
    return [stage for stage, holder in enumerate(PLACEMENTS[placement](ranks * chunks, ranks)) if holder == rank]


def _check_counts(count, stages, counts, some_counted):
    what = f"layers_per_stage: {counts}"
    if len(counts) != stages:
        raise ValueError(f"{what} has {len(counts)} entries, but there are {stages} stages: give the layers of each")
    if sum(counts) != count:
        raise ValueError(f"{what} makes {sum(counts)} layers, but num_hidden_layers is {count}")
    if 0 in counts[1:-1]:
        raise ValueError(
            f"{what} leaves stage {counts.index(0, 1)} without anything: only the first stage, which has the "
            "embedding, and the last one, which has the output layer, can do without decoder layers"
        )
    if some_counted:
        raise ValueError(
            f"{what} already says where all layers are: leave account_for_embedding_in_pipeline_split and "
            "account_for_loss_in_pipeline_split out, or layers_per_stage"
        )
