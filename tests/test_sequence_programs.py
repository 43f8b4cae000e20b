"""`verify` of ranks that share sequences: a small Llama by every algorithm, balance, mask and mesh, all gradients.

Sizes of different dims are equal on purpose, so that a wrong one would fit: samples, heads, groups of heads, the head
size, and on cp 4 the tokens of a rank are 4.
"""

from itertools import product

import numpy as np
import pytest
from mindspore import ops
from support.nightly import daily
from support.verified_calls import MESH, Sample, check_of, numbers

from mindformers_core.commands.diffing import run_simulated
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.data.mixture import Mixture
from mindformers_core.data.sources import Tokens
from mindformers_core.data.streams import Sequences, Stream
from mindformers_core.layout import layout
from mindformers_core.recipe.loader import recipe_from_dict
from mindformers_core.tensor_parallel.attention import attention

LENGTH, DOCUMENTS = 16, (1, 1, 6, 1, 17, 2, 9, 1, 1, 5, 3, 17)
MODEL = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip
ZERO = {"zero_threshold_kb": 0, "zero_level": 3}
MESHES = {
    "cp 2": {"context_parallel": 2},
    "cp 4": {"context_parallel": 4},
    "cp 2, level 3": {"context_parallel": 2, **ZERO},
    "tp 4": {"tensor_parallel": 4},
    "cp 2 x tp 2": {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    "dp 2 x cp 2, level 3": {"context_parallel": 2, "data_parallel_shard": 2, **ZERO},
    "dp 2 x cp 2 x tp 2": {"context_parallel": 2, "data_parallel_shard": 2, "tensor_parallel": 2},
    "pp 2 x cp 2": {"context_parallel": 2, "pipeline_parallel": 2, "pipeline_parallel_microbatch_size": 2},
}
COMBINATIONS = [*product(("gather", "ring", "all_to_all"), ("contiguous", "zigzag", "area"), (False, True), MESHES)]
DAILY = [("ring", "zigzag", True, "cp 4")]


def dataset(packs):
    """Sequences of documents, many of one token."""
    ids = np.random.default_rng(0).integers(0, 24, sum(DOCUMENTS)).astype(np.int32)
    starts = np.cumsum((0, *DOCUMENTS[:-1]))
    return Stream((Sequences(Tokens(ids, starts, "ids"), LENGTH, 2**16, packs),), Mixture((1,)), 5)


def rows(*_):
    return dataset(False)


def packed_rows(*_):
    return dataset(True)


def recipe_of(packs=False, model=(), again=False, **parallelism):
    """A step of 4 sequences; `again`: whether layers are computed again in the backward pass."""
    count = parallelism.get("pipeline_parallel", 1)
    return recipe_from_dict({
        "model": MODEL | {"num_hidden_layers": count} | dict(model),
        "parallelism": {"data_parallel_shard": 1, **parallelism},
        "train_dataset": {
            "factory": f"test_sequence_programs:{'packed_rows' if packs else 'rows'}", "seq_length": LENGTH},
        "training": {"local_batch_size": 4 // parallelism.get("data_parallel_shard", 1)},
        "context": {"device_model": "CPU"}, "evaluation": {"samples": 4},
        "recompute": {"full": again},
    })  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "balance", "packs", "mesh"), daily(DAILY, COMBINATIONS))
def test_a_step_on_all_ranks(algorithm, balance, packs, mesh):
    """Causal and of documents, some of one token: loss, all tensors, all gradients, the update."""
    ways = {"context_parallel_algorithm": algorithm, "context_parallel_balance": balance}
    check = verify_recipe(recipe_of(packs, **MESHES[mesh], **ways), full=True)
    assert not check.faults, check.report()
    assert check.compared > 50


MASKS = [*product(("full", "window"), ("gather", "ring", "all_to_all"))]


@pytest.mark.parametrize(("mask", "algorithm"), daily([("window", "ring")], MASKS))
def test_other_masks_than_causal_ones(mask, algorithm, monkeypatch):
    """A Llama whose tokens see all others, or a window, in zigzag on two ranks: loss and all gradients.

    Of the window's six, one query of a chunk of four sees one key of the chunk two before.
    """

    def masked(query, key, value, first, last, places, scale, order, reach, *others):
        reach = (None, None) if mask == "full" else (5, 0)
        ranges = (first, first + LENGTH) if mask == "full" else (ops.relu(last - 6), last)
        return attention(query, key, value, *ranges, places, scale, order, reach, *others)

    monkeypatch.setattr("mindformers_core.models.attention.attention", masked)
    check = verify_recipe(recipe_of(**MESHES["cp 2"], context_parallel_algorithm=algorithm), full=True)
    assert not check.faults, check.report()


GROUPS = [  # heads of keys and values, mesh, algorithm
    (1, "cp 4", "gather"), (1, "cp 4", "ring"), (2, "cp 2 x tp 2", "gather"), (2, "cp 2 x tp 2", "ring"),
    (2, "cp 2", "all_to_all"), (1, "cp 2 x tp 2", "all_to_all"), (2, "cp 2 x tp 2", "all_to_all"), (1, "tp 4", "auto"),
    (2, "tp 4", "auto"), (2, "cp 4", "all_to_all"), (1, "cp 2 x tp 2", "gather"), (1, "cp 2 x tp 2", "ring"),
    (2, "cp 4", "gather"), (2, "cp 4", "ring"), (1, "cp 4", "all_to_all"), (1, "cp 2", "all_to_all"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("groups", "mesh", "algorithm"), daily(GROUPS[-1:], GROUPS))
def test_few_heads_of_keys_and_values(groups, mesh, algorithm):
    """Also fewer than the ranks that share them, which have copies; weights are dropped, and again when recomputed."""
    model = {"num_key_value_heads": groups, "attention_dropout": 0.4}
    recipe = recipe_of(True, model, True, **MESHES[mesh], context_parallel_algorithm=algorithm)
    check = verify_recipe(recipe, full=True)
    assert not check.faults, check.report()


@pytest.mark.parametrize(
    ("heads", "size", "mesh", "algorithm", "message"),
    [
        (6, 4, "tp 4", "auto", "heads: 6 can't be cut into parallelism.tensor_parallel 4 parts"),
        (4, 2, "tp 4", "auto", "heads x head_dim: 2 can't be cut into parallelism.tensor_parallel 4 parts"),
        (6, 4, "cp 2 x tp 2", "all_to_all", "tensor_parallel 2, which don't divide model.num_attention_heads 6: use"),
    ],
)  # fmt: skip
def test_heads_that_ranks_do_not_divide(heads, size, mesh, algorithm, message):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": size}
    with pytest.raises(ValueError, match=message):
        recipe_of(False, sizes, **MESHES[mesh], context_parallel_algorithm=algorithm)


class OneLabel:
    """Rows of which one label counts."""

    def __init__(self, place):
        self.place = place

    def batch(self, first, count):
        ids, labels, *others = packed_rows().batch(first, count)
        return ids, np.where(np.arange(LENGTH) == self.place, labels, -100).astype(np.int32), *others


def losses_of_tokens(**parallelism):
    """The losses of the tokens at both sides of every border of the cuts below, one at a time, on every rank."""
    found = []

    def evaluate(job):
        found.append([job.evaluate(OneLabel(place))["eval_loss"] for place in (3, 4, 7, 8, 11, 12)])

    run_simulated(recipe_of(True, **parallelism), 0, evaluate)
    return np.array(found)


BORDERS = [("zigzag", "ring", 2), ("area", "gather", 2), ("contiguous", "all_to_all", 4), ("contiguous", "ring", 4)]


@pytest.mark.long
@pytest.mark.parametrize(("balance", "algorithm", "ranks"), daily(BORDERS[:1], BORDERS))
def test_the_loss_of_a_token_at_every_border(balance, algorithm, ranks):
    """Where one label counts, on one rank: it is shifted before the cut, and the mean is one over all ranks."""
    (expected,) = losses_of_tokens()
    ways = {"context_parallel_balance": balance, "context_parallel_algorithm": algorithm}
    found = losses_of_tokens(context_parallel=ranks, **ways)
    assert expected.all() and len(found) == ranks
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), 1e-5)


def linear_attention(query, key, value):
    """Causal, of positive features, with its running state (Katharopoulos et al., arXiv 2006.16236)."""
    state = ops.cumsum(ops.expand_dims(key, 3) * ops.expand_dims(value, 2), 1)
    top, total = (ops.expand_dims(query, 3) * state).sum(2), (query * ops.cumsum(key, 1)).sum(2)
    return top / ops.expand_dims(total, 2)


def decaying_state(query, key, value):
    """A state that decays by as much as the keys say, as that of an SSM: sums of logarithms, and of what they scale."""
    decay = ops.cumsum(-key, 1)
    return query * ops.exp(decay) * ops.cumsum(value * ops.exp(-decay), 1)


@pytest.mark.parametrize("scan", [linear_attention, decaying_state])
def test_the_state_of_a_scan_goes_from_rank_to_rank(scan):
    """Forward and all gradients; keys and values aren't gathered, but the parts' states."""
    cut = [layout(None, "a")] * 3
    check = check_of(Sample("", scan, tuple(numbers(2, 4, 3, low=0.5, high=1) for _ in range(3)), cuts=(cut,)), MESH)
    plans = [entry for _, plan in check.plans.values() for found in plan.walk() for entry in found[1].instructions]
    assert [each.algorithm for each in plans if getattr(each, "algorithm", None)].count("cumsum") == 2
    assert not [each for each in plans if any(step.kind == "all_gather" for step in getattr(each, "steps", ()))]


def two_losses(hidden, target):
    """Of the next token, and of the one after it: the model shifts what is already shifted."""
    later = ops.pad(target[:, 1:], (0, 0, 0, 1))
    return ops.square(hidden - target).mean() + ops.square(hidden * 2 - later)[:, :-1].mean()


def test_what_a_model_shifts_crosses_ranks():
    cut = [layout(None, "a")] * 2
    check_of(Sample("", two_losses, (numbers(2, 4, 3), numbers(2, 4, 3)), cuts=(cut,)), MESH)
