"""Sequences that ranks share: the order of their tokens is one of the batch, and nothing else depends on it."""

from dataclasses import replace
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from support.nightly import daily
from test_label_weights import MODEL

from mindformers_core.algorithms.attention import _blocks
from mindformers_core.algorithms.attention_rows import seen_blocks
from mindformers_core.batches import BatchPlan, places_of, static_order
from mindformers_core.commands.diffing import run_simulated
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.data.balanced import Balanced
from mindformers_core.data.mixture import Mixture
from mindformers_core.data.reading import local_batch
from mindformers_core.data.sources import Tokens
from mindformers_core.data.streams import Sequences, Stream
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models.configuration import LlamaConfig
from mindformers_core.models.llama import LlamaForCausalLM
from mindformers_core.recipe import sections
from mindformers_core.recipe.loader import recipe_from_dict
from mindformers_core.recipe.sections import recipe_mesh
from mindformers_core.sharding.initialize import materialize
from mindformers_core.trainer.cells import build_model

LENGTH = 48
DOCUMENTS = (1, 1, 20, 1, 47, 2, 30, 96, 5, 1, 1, 13, 24, 1)  # lengths; some have one token, some are cut


def stream(packs=True):
    """Sequences of documents whose tokens are all different."""
    starts = np.concatenate([[0], np.cumsum(DOCUMENTS * 3)[:-1]])
    ids = np.arange(sum(DOCUMENTS) * 3, dtype=np.int32)
    return Stream((Sequences(Tokens(ids, starts, "ids"), LENGTH, 2**16, packs),), Mixture((1,)), 5)


def products(places, keys, positions, ranks):
    """Pairs of query and key that attention computes in PyNative, of tokens with these places, on one of some ranks.

    Args:
        places, keys: of the queries, and of the keys in their order.
        positions: of all tokens in their documents.
    """
    first, last = places - positions[places], places + 1
    order, reach = ((0,), (None, 0)) if ranks == 1 else (None, (None, None))
    shapes = [(1, len(each), 8, 32) for each in (places, keys)]
    blocks = _blocks(*shapes, order, reach, False, (ms.float32, 32, 32, 0.0))
    found = seen_blocks(blocks, first, last, keys)
    return sum((stop - start) * sum(high - low for low, high, _ in ranges) for start, stop, ranges in found)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_busiest_rank(ranks):
    """Over the mean: zigzag and contiguous without documents; area for three mixes of documents, of which all ranks
    together compute what one card does."""
    length, draw = 8192, np.random.default_rng(ranks)
    whole = np.arange(length)

    def busiest(places):
        """By the pairs of a causal mask."""
        found = (places + 1).reshape(ranks, -1).sum(1)
        return found.max() / found.mean()

    zigzag = places_of(static_order("zigzag", ranks), length)
    assert busiest(zigzag) <= 1.001
    assert busiest(whole) == pytest.approx(2 - 1 / ranks, 1e-3)
    mixes = {
        "short ones": draw.lognormal(5, 1, 500),
        "all alike": np.full(20, 1000),
        "one long one": np.r_[np.full(10, 100), 5000, draw.integers(1, 300, 100)],
    }
    for name, lengths in mixes.items():
        positions = np.concatenate([np.arange(each) for each in lengths.astype(int)])[:length]
        row = SimpleNamespace(batch=lambda *_, row=positions[None]: [row] * 3)
        *_, (places,) = Balanced(row, "area", ranks).batch(0, 1)
        parts = np.split(places, ranks)
        alone = products(whole, whole, positions, 1)
        for keys in [places], parts:  # all at once, and part after part, as by the ring
            found = [sum(products(part, each, positions, ranks) for each in keys) for part in parts]
            assert max(found) <= 1.02 * np.mean(found) and sum(found) <= 1.02 * alone < 0.4 * length**2, (name, found)


@pytest.mark.parametrize("balance", ["contiguous", "zigzag", "area"])
@pytest.mark.parametrize("packs", [False, True])
def test_labels_positions_and_places_travel_with_their_tokens(balance, packs):
    """On dp 2 x cp 2, at every border of chunks and documents: the label is the next token of the document, or none."""
    mesh, plan, truth = DeviceMesh((2, 2), ("dp", "cp")), BatchPlan(7, 2, 2), stream(packs).batch(0, 7)
    data = stream(packs) if balance == "contiguous" else Balanced(stream(packs), balance, 2)
    count, seen = len(data.batch(0, 1)), []
    for rank in range(4):
        found = local_batch(plan, [Layout.on(mesh, (("dp",), ("cp",)))] * count, rank, {1: -100}, data)
        dp, cp = mesh.coordinate(rank)
        rows = [row for run in range(plan.runs) for row in range(run * 4 + dp * 2, run * 4 + dp * 2 + 2)]
        places = {"contiguous": np.arange(LENGTH), "zigzag": places_of((0, 3, 1, 2), LENGTH)}.get(balance)
        for row, *arrays in zip(rows, *(array.reshape(-1, LENGTH // 2) for array in found), strict=True):
            own = arrays[3] if balance == "area" else places.reshape(2, -1)[cp]
            expected = [array[min(row, 6)][own] for array in truth]
            if row == 7:
                expected[1][:] = -100
            for one, other in zip(arrays, expected):
                np.testing.assert_array_equal(one, other)
            if balance == "area" and not packs:
                np.testing.assert_array_equal(arrays[2], own)
            seen += [(row, place) for place in own.tolist()]
    assert sorted(seen) == [(row, place) for row in range(8) for place in range(LENGTH)]
    documents = np.cumsum(DOCUMENTS * 3)
    for token, label in zip(truth[0].ravel(), truth[1].ravel()):
        follows = label == token + 1 and (not packs or label not in documents)
        assert follows or packs and label == -100


def test_data_that_have_no_order_of_tokens():
    """Whatever the length of training is: evaluation may have another one."""
    ids = np.arange(24).reshape(2, 12)

    def batch(*arrays, balance="zigzag"):
        return Balanced(SimpleNamespace(batch=lambda *_: arrays), balance, 2).batch(0, 2)

    np.testing.assert_array_equal(batch(ids)[0][0], [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8])
    with pytest.raises(ValueError, match=r"array 1 of the dataset has samples of shape \[\], .* 12 tokens of array 0"):
        batch(ids, ids[:, 0])
    with pytest.raises(ValueError, match=r"array 2 .* shape \[12, 12\], .*: use context_parallel_balance=contiguous"):
        batch(ids, ids, np.ones((2, 12, 12)))
    with pytest.raises(ValueError, match="a sequence of 11 tokens can't be cut into the 2 equal chunks"):
        batch(ids[:, 1:], balance="area")
    with pytest.raises(ValueError, match="area takes a dataset of ids, labels and positions, .* has 4 arrays"):
        batch(ids, ids, ids, ids, balance="area")


def test_positions_and_places_are_the_third_and_fourth_inputs(monkeypatch):
    recipe = recipe_of({"context_parallel": 2, "context_parallel_balance": "area"}, layers=1)
    spec = replace(recipe.spec, inputs=("input_ids", "labels", "weights", "positions", "places"))
    monkeypatch.setattr(sections, "model_spec", lambda _: spec)
    with pytest.raises(ValueError, match="has no third and fourth input positions, places: use contiguous"):
        build_model(recipe)


@pytest.mark.parametrize("balance", ["zigzag", "area"])
@pytest.mark.parametrize("packs", [False, True])
def test_a_token_has_the_logits_of_its_place(balance, packs):
    """On one card, in every row; documents of one token see themselves alone."""
    arrays = stream(packs).batch(0, 3)
    with ms.DeviceCtx("meta"):
        net = LlamaForCausalLM(LlamaConfig(**MODEL | {"vocab_size": 730, "max_position_embeddings": LENGTH}))
    materialize(net, 1)
    ids, _, *positions = map(Tensor, arrays)
    expected = net(ids, None, *positions).asnumpy()
    data = Balanced(stream(packs), balance, 3)
    net.share_sequences(data.order or (0,), "auto")
    ids, _, *others = data.batch(0, 3)
    places = others[1] if balance == "area" else np.broadcast_to(places_of(data.order, LENGTH), ids.shape)
    found = net(Tensor(ids), None, *map(Tensor, others)).asnumpy()
    np.testing.assert_allclose(found, np.take_along_axis(expected, places[:, :, None], 1), 1e-4, 1e-6)


def packed_dataset(*_):
    return stream()


CUTS = {
    "zigzag, cp 2": {"context_parallel": 2},
    "area, cp 2": {"context_parallel": 2, "context_parallel_balance": "area"},
    "area, dp 2 x cp 2 at level 3": {
        "context_parallel": 2, "context_parallel_balance": "area", "data_parallel_shard": 2, "zero_level": 3,
        "zero_threshold_kb": 0},
    "area, pp 2 x cp 2": {
        "context_parallel": 2, "context_parallel_balance": "area", "pipeline_parallel": 2,
        "pipeline_parallel_microbatch_size": 1},
    "contiguous, cp 4": {"context_parallel": 4, "context_parallel_balance": "contiguous"},
}  # fmt: skip


KEPT = "loss", "gradient_norm", "learning_rate", "epoch", "eval_loss", "eval_perplexity"


def by_tokens(step, tokens):
    """A schedule by the tokens of all ranks."""
    return 1e-2 * step * tokens / (6 * LENGTH)


def recipe_of(parallelism, layers=2):
    """Two steps of packed documents."""
    return recipe_from_dict({
        "model": MODEL | {"vocab_size": 730, "max_position_embeddings": LENGTH, "num_hidden_layers": layers},
        "parallelism": {"data_parallel_shard": 1, **parallelism},
        "train_dataset": {"factory": "test_balance:packed_dataset", "seq_length": LENGTH},
        "training": {"local_batch_size": 2, "global_batch_size": 6, "steps": 2}, "evaluation": {"samples": 5},
        "lr_scheduler": {"type": "test_balance:by_tokens"}, "context": {"device_model": "CPU"},
    })  # fmt: skip


def figures(parallelism):
    """Of a step on every rank, and what is evaluated after its update; all that is counted."""
    recipe = recipe_of(parallelism)

    def evaluate_too(job):
        step = job.train_step
        job.train_step = lambda: step() | job.evaluate(stream())

    found = []
    for rows in run_simulated(recipe, 1, evaluate_too):
        tokens = [row["tokens_per_second"] * row["seconds"] for row in rows]
        operations = [row["mfu"] * row["seconds"] * recipe_mesh(recipe).size for row in rows]
        found.append([[*map(row.get, KEPT), *counted] for row, *counted in zip(rows, tokens, operations)])
    return np.array(found, float)


@pytest.fixture(scope="module")
def one_card():
    return figures({})[0]


@pytest.mark.long
@pytest.mark.parametrize("name", daily(["area, cp 2"], CUTS))
def test_training_and_evaluation_of_documents(name, one_card):
    """Losses, norms, learning rates, tokens and operations are those of one card, on all ranks."""
    assert one_card[0, KEPT.index("learning_rate")] == 1e-2
    for found in figures(CUTS[name]):
        np.testing.assert_allclose(found, one_card, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("balance", daily(["zigzag"], ["zigzag", "area", "contiguous"]))
def test_programs_of_ranks_that_share_sequences(balance):
    """`verify`: every tensor, and all gradients, with dropped weights of attention."""
    recipe = recipe_of({"context_parallel": 2, "context_parallel_balance": balance}, layers=1)
    check = verify_recipe(replace(recipe, model=replace(recipe.model, attention_dropout=0.25)), full=True)
    assert not check.faults, check.report()
