"""`hsdp()` against one card: every level, shard size, engine, with accumulation and clipping; what it communicates."""

from math import prod

import numpy as np
from mindspore import Tensor
from support.launch import on_ranks
from zero_runs import (
    NORM,
    alone,
    batches,
    compare,
    llama,
    mesh_of_all,
    micro_batches,
    sharded_llama,
    train_parts,
)

from mindformers_core.communication import count_collectives, world
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.tensor_parallel import DTensor, shard
from mindformers_core.zero import hsdp, value_and_grad
from mindformers_core.zero.storage import storage_of


def check(level, shard_size, accumulate, clipped, steps, tp=1, compiled=False, changes=(), **settings):
    """Some steps of AdamW give what they give on one card."""
    label = f"{level}, {shard_size=}, {accumulate=}, {clipped=}, {tp=}, {compiled=}, {settings}"
    settings |= {"optimizer_level": level, "shard_size": shard_size, "accumulate_grad_step": accumulate}
    net, max_norm = sharded_llama(mesh := mesh_of_all(tp), changes=changes, **settings), NORM if clipped else 0
    found = train_parts(net, mesh, steps, max_norm, compiled=compiled)
    compare(net, found, alone(steps, max_norm, **dict(changes)), label)
    return net, found


@on_ranks(nightly=(4,))
def case_steps_of_each_level_equal_one_card():
    """All four ranks shard, pairs do, or none; small weights cut, too, or whole. By day: the two cases below."""
    check("level2", 2, 4, clipped=True, steps=2, tp=2)
    check("level2", 4, 4, clipped=True, steps=2, gradient_accumulation_shard=False)
    check("level1", 1, 1, clipped=False, steps=2)
    check("level1", 4, 1, clipped=False, steps=2, threshold=2)
    check("level2", 2, 1, clipped=True, steps=2)
    check("level3", 4, 1, clipped=True, steps=2, threshold=2)


@on_ranks(4)
def case_accumulated_steps_equal_one_card():
    """Four micro-steps of one sequence a rank, pairs of which share."""
    check("level1", 2, 4, clipped=True, steps=1, threshold=2, gradient_accumulation_shard=True)


@on_ranks(4)
def case_steps_with_tensor_parallel_equal_one_card():
    """dp 2 x tp 2 with sequence parallel; gathering the parts gives the whole weights."""
    net, found = check("level3", 2, 1, clipped=True, steps=2, tp=2)
    for path, part in list(net.parameters_and_names())[:4]:
        whole = DTensor.from_local(Tensor(found.parameters[path]), part.layout).full_tensor()
        np.testing.assert_allclose(whole.asnumpy(), alone(2, NORM).parameters[path], 1e-5, 1e-5, err_msg=path)


@on_ranks(nightly=(4,))
def case_compiled_steps_equal_one_card():
    """With tensor parallel in one graph; at level 3 see `case_compiled_levels_equal_one_rank`."""
    check("level1", 2, 1, clipped=True, steps=2, tp=2, compiled=True, changes=(("num_hidden_layers", 1),))


@on_ranks(nightly=(2,))
def case_compiled_accumulated_steps_equal_one_card():
    """One graph whose gradients come at its end. Daily, of a smaller model: `case_zero_units`."""
    check("level2", 2, 4, clipped=True, steps=2, compiled=True, changes=(("num_hidden_layers", 1),))


@on_ranks(2)
def case_eager_steps_equal_one_card():
    """Operator by operator."""
    check("level3", 2, 2, clipped=True, steps=2, mode="eager", changes=(("num_hidden_layers", 1),))


TIED = ("num_hidden_layers", 1), ("tie_word_embeddings", True)


@on_ranks(2)
def case_tied_embeddings_train_as_on_one_card():
    """One weight in two places; at level 3 it isn't one of those that come and go."""
    check("level3", 2, 1, clipped=True, steps=2, changes=TIED)


@on_ranks(nightly=(2,))
def case_tied_embeddings_in_other_ways_train_as_on_one_card():
    """At level 1; compiled; both levels eager, beside weights that aren't tied."""
    check("level1", 2, 1, clipped=True, steps=2, changes=TIED)
    check("level3", 2, 1, clipped=True, steps=2, changes=TIED, compiled=True)
    check("level3", 2, 1, clipped=True, steps=2, changes=TIED, mode="eager")
    check("level2", 2, 2, clipped=True, steps=2, mode="eager", changes=TIED[:1])


# Communication


def own_llama(**settings):
    """A Llama under `hsdp()` of which every rank computes a loss of its own, so that all that is sent is ZeRO's."""
    net = shard(llama(num_hidden_layers=1), DeviceMesh((1,), ("tp",), (world().rank,)))
    return hsdp(net, mesh=init_device_mesh((world().size,), ("dp",)), **{"threshold": 0, **settings})


def counted(accumulate=1, **settings):
    """What a second step communicates, by micro-step; and the Cell."""
    net = own_llama(accumulate_grad_step=accumulate, **settings)
    gradient_of, mesh = value_and_grad(net), mesh_of_all()
    counts = []
    for batch in batches(2):
        for micro_batch in micro_batches(net, mesh, batch):
            with count_collectives() as counter:
                gradient_of(*micro_batch)
            counts.append(dict(counter))
    return counts[accumulate:], net


def bytes_of_all(net):
    """Psi: bytes of all weights."""
    return 4 * sum(prod(parameter.global_shape) for parameter in net.get_parameters())


@on_ranks(2, nightly=(4,))
def case_a_step_communicates_what_the_paper_says():
    """2 Psi at levels 1 and 2, 3 Psi at level 3, as rings send it, to the byte; a call for each bucket."""
    size = world().size
    for level, gathers in (("level1", 1), ("level2", 1), ("level3", 2)):
        [counts], net = counted(shard_size=size, optimizer_level=level, prefetch=2)
        storage, share = storage_of(net), bytes_of_all(net) * (size - 1) // size
        assert counts == {
            ("all_gather", ("dp",)): (gathers * len(storage.gathers), gathers * share),
            ("reduce_scatter", ("dp",)): (len(storage.reduces), share),
        }, (level, counts)
    [counts], net = counted(optimizer_level="level2")
    assert counts == {("all_reduce", ("dp",)): (1, 2 * bytes_of_all(net) * (size - 1) // size)}, counts
    [counts], net = counted(shard_size=size, optimizer_level="level3", reshard_after_forward=False)
    assert counts["all_gather", ("dp",)][1] == bytes_of_all(net) * (size - 1) // size, counts


@on_ranks(4)
def case_a_hybrid_step_communicates_parts_across():
    """Reduce-scatter within a pair, all-reduce of halves across; what is small is reduced over all."""
    for level, gathers in (("level1", 1), ("level3", 2)):
        [counts], net = counted(shard_size=2, optimizer_level=level)
        half = bytes_of_all(net) // 2
        sent = {key: total for key, (_, total) in counts.items()}
        assert sent == {
            ("all_gather", ("dp_shard",)): gathers * half,
            ("reduce_scatter", ("dp_shard",)): half,
            ("all_reduce", ("dp_replicate",)): half,  # 2 (n - 1) / n of a half, n = 2
        }, (level, counts)
    net = own_llama(threshold=2, shard_size=2)
    with count_collectives() as counts:
        value_and_grad(net)(*micro_batches(net, mesh_of_all(), batches(1)[0])[0])
    small = 4 * (3 * 32 + 2 * 16 * 32)  # norms, and projections of keys and values, of 2 KB just
    assert counts["all_reduce", ("dp_replicate", "dp_shard")] == (1, 2 * small * 3 // 4), counts


ONCE, ALWAYS = (0, 1), (1, 1)
MICRO_STEPS = (  # level, weights gathered and gradients reduced by micro-step, whether sums are sharded
    ("level1", (1, 0), ONCE, None),
    ("level1", (1, 0), ALWAYS, True),
    ("level2", (1, 0), ALWAYS, None),
    ("level3", (2, 2), ALWAYS, None),
    ("level3", (2, 2), ONCE, False),
)


@on_ranks(2)
def case_what_micro_steps_communicate(rows=MICRO_STEPS[::2]):
    """Weights are gathered once a step, or, where units come and go, twice a micro-step; gradients are reduced in every
    micro-step where sums are sharded, else in the last one.
    """
    for level, gathers, scatters, shards in rows:
        counts, net = counted(2, shard_size=2, optimizer_level=level, gradient_accumulation_shard=shards)
        half = bytes_of_all(net) // 2
        scattered = [count.get(("reduce_scatter", ("dp",)), (0, 0))[1] for count in counts]
        assert scattered == [times * half for times in scatters], (level, shards, counts)
        gathered = [count.get(("all_gather", ("dp",)), (0, 0))[1] for count in counts]
        assert gathered == [times * half for times in gathers], (level, counts)
        assert set().union(*counts) == {("reduce_scatter", ("dp",)), ("all_gather", ("dp",))}


@on_ranks(nightly=(2,))
def case_what_other_micro_steps_communicate():
    case_what_micro_steps_communicate(MICRO_STEPS[1::2])


@on_ranks(2)
def case_buckets_change_calls_and_not_bytes():
    """By size, by index, each tensor by itself, or all together; for each kind of collective its own."""
    count = len(llama(num_hidden_layers=1).trainable_params())
    for fusion, calls in (
        ("auto", (1, 1)),
        (0, (count, count)),
        ({"mode": "index", "config": [5, 9]}, (3, 3)),
        ({"allgather": 0, "reducescatter": {"mode": "size", "config": 1}}, (count, 1)),
    ):
        [counts], net = counted(shard_size=2, optimizer_level="level2", comm_fusion=fusion)
        half = bytes_of_all(net) // 2
        found = counts["all_gather", ("dp",)], counts["reduce_scatter", ("dp",)]
        assert found == tuple((number, half) for number in calls), (fusion, counts)
