"""Training by recipe with sharded state, gradients and weights: the curve and the parameters of one rank."""

from case_training import DEEP, compare_with_one_rank, pipeline
from support.launch import on_ranks

from mindformers_core.checkpoint.tensors import states_of
from mindformers_core.communication import count_collectives

DP_AND_TP, DP, PP_AND_DP = (1, 2, 1, 2), (1, 4, 1, 1), (2, 2, 1, 1)


def zero(level, *overrides):
    """Overrides for a level; all weights that can be are cut."""
    sharded = f"parallelism.zero_level={level}", "parallelism.zero_threshold_kb=0", "parallelism.data_parallel_shard=-1"
    return *sharded, *overrides


def compare(level, local, *overrides, shape=DP_AND_TP, shards=2, alike=()):
    """Two steps with `local` sequences at once of the 8 of a step equal those of one rank, and the optimizer's
    parameters and moments are parts, over tp and `shards` data-parallel ranks."""
    overrides = zero(level, f"training.local_batch_size={local}", *overrides)
    count = 8 // (local * shape[1])
    job = compare_with_one_rank(*overrides, shape=shape, alike=alike, micro_batches=count)
    parameters = job.optimizer.parameters
    assert {part.name for _, part in states_of(job.optimizer)} == {part.name for part in parameters}
    sizes = [part.layout.mesh.axis_size(*sum(part.layout.dims, ())) for part in parameters]
    assert max(sizes) == shards * shape[3], sizes
    return job


@on_ranks(4)
def case_levels_equal_one_rank():
    """Data and tensor parallel, PyNative: four micro-batches, whose gradients are reduced once."""
    job = compare(1, 1, "parallelism.sequence_parallel=true")
    with count_collectives() as counts:
        job.train_step()
    assert [counts[kind, ("dp",)][0] for kind in ("all_gather", "reduce_scatter")] == [1, 1], counts
    compare(3, 1, "parallelism.sequence_parallel=true")


@on_ranks(nightly=(4,))
def case_compiled_levels_equal_one_rank():
    """Graph mode, Muon: at level 3 every layer is a graph of its own, as daily in `case_zero_stages_equal_one_card`.

    Weights are cut over ranks that share sequences, too.
    """
    cut = "context.mode=0", "parallelism.context_parallel=2"
    compare(3, 4, *cut, shape=(1, 2, 2, 1), shards=4, alike=("optimizer={type: Muon}",))


@on_ranks(nightly=(4,))
def case_other_levels_equal_one_rank():
    """None, with one micro-batch; operator by operator, daily in `case_zero`."""
    compare(0, 4, shards=1)
    compare(3, 4, "context.engine=eager")


@on_ranks(nightly=(4,))
def case_groups_that_shard_equal_one_rank():
    """Two groups of two ranks: sharded within a group, alike in both. Daily: `case_zero`."""
    for level in (1, 3):
        compare(level, 1, "parallelism.data_parallel_replicate=2", shape=DP)


@on_ranks(4)
def case_pipelined_levels_equal_one_rank(*overrides):
    """Every stage is sharded over its data-parallel ranks; several runs a step, tied embeddings; LARS."""
    two = *DEEP, "model.num_hidden_layers=2", "optimizer={type: LARS, trust: 0.1}"
    compare(2, 2, *pipeline("zb_h1"), *overrides, shape=PP_AND_DP, alike=two)


@on_ranks(nightly=(4,))
def case_compiled_pipelined_levels_equal_one_rank():
    """The same in graph mode, of pipelines, as daily in `case_pipelines_compose_with_the_other_axes`."""
    case_pipelined_levels_equal_one_rank("context.mode=0")


@on_ranks(nightly=(4,))
def case_pipelined_gathers_equal_one_rank():
    """Two stages on a rank, whose weights come and go."""
    compare(3, 2, *pipeline("zb_v", 2), shape=PP_AND_DP, alike=DEEP)
