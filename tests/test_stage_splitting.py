"""The Llama model cut into pipeline stages: every split is the whole model, in parts."""

import mindspore as ms
import numpy as np
import pytest
from support.nightly import daily
from support.split_models import (
    SMALL,
    SPLITS,
    Sequence,
    batch,
    build,
    built,
    config_of,
    parts_of,
    run,
    whole_of,
)

from mindformers_core.models import LlamaConfig, model_split_manual
from mindformers_core.pipeline import split_layers, stages_of_rank
from mindformers_core.tensor_parallel import materialize


def stages_of(name, **changes):
    return [built(config_of(name, **changes), layers) for layers in parts_of(name)]


def manual_stages(counts, **changes):
    """The same from the whole model by `model_split_manual`."""
    stages = []
    for stage in range(len(counts)):
        stages.append(model_split_manual(build(LlamaConfig(**SMALL, **changes)), stage, counts))
        materialize(stages[-1], seed=1)
    return stages


def assert_composes(stages, whole, twice=()):
    """The stages' parameters, with their values, are the whole model's, each once and in order (`twice`: again)."""
    parameters = [item for stage in stages for item in stage.parameters_and_names()]
    paths = [path for path, _ in parameters]
    expected = dict(whole.parameters_and_names())
    assert [path for place, path in enumerate(paths) if path not in paths[:place]] == list(expected)
    assert sorted(paths) == sorted([*expected, *twice])
    assert all(parameter.name == path for path, parameter in parameters)
    for path, parameter in parameters:
        np.testing.assert_array_equal(parameter.asnumpy(), expected[path].asnumpy(), err_msg=path)


@pytest.mark.parametrize("name", SPLITS)
def test_layers_and_places_of_stages(name):
    ranks, _, split, counts, held = SPLITS[name]
    parts = parts_of(name)
    assert [part.count for part in parts] == counts
    assert [part.offset for part in parts] == [sum(counts[:stage]) for stage in range(len(counts))]
    assert [part.is_first for part in parts] == [stage == 0 for stage in range(len(counts))]
    assert [part.is_last for part in parts] == [stage == len(counts) - 1 for stage in range(len(counts))]
    place = split.get("chunks", 1), split.get("placement", "loop")
    assert [stages_of_rank(rank, ranks, *place) for rank in range(ranks)] == held


WHOLE = [*((name, False) for name in SPLITS), ("empty", True), ("v, both", True)]
DAILY = [("embedding", False), ("loop, uneven", False), ("v, both", True)]  # beside the gradients of others


@pytest.mark.parametrize(("name", "tied"), daily(DAILY, WHOLE))
def test_stages_are_the_whole(name, tied):
    """Parameters with their initial values, and the loss where the stages run one after another."""
    stages, whole = stages_of(name, tie_word_embeddings=tied), whole_of(name, tie_word_embeddings=tied)
    assert len(stages) == len(SPLITS[name][3])
    assert_composes(stages, whole, ["model.embed_tokens.weight"] if tied and len(stages) > 1 else [])
    loss = run(stages, *batch()).asnumpy()
    np.testing.assert_allclose(loss, whole(*batch()).asnumpy(), rtol=1e-6)


GRADIENTS = [("empty", True), ("heterogeneous", True), ("uneven", False), ("v", True)]


@pytest.mark.parametrize(("name", "tied"), daily(GRADIENTS[:2], GRADIENTS))
def test_gradients_of_stages_are_the_wholes(name, tied):
    """Those of equal path are summed: the embedding's, where it is tied."""
    stages, whole = stages_of(name, tie_word_embeddings=tied), whole_of(name, tie_word_embeddings=tied)
    weights = [parameter for stage in stages for parameter in stage.trainable_params()]
    found = {}
    for weight, gradient in zip(weights, ms.grad(lambda *given: run(stages, *given), None, weights)(*batch())):
        found[weight.name] = found.get(weight.name, 0) + gradient.asnumpy()
    weights = whole.trainable_params()
    assert len(found) == len(weights)
    for weight, gradient in zip(weights, ms.grad(whole, None, weights)(*batch())):
        expected = gradient.asnumpy()
        assert np.abs(expected).max() > 1e-6, weight.name
        np.testing.assert_allclose(
            found[weight.name], expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max(), err_msg=weight.name
        )


MANUAL = [("empty", True), ("whole", True), ("uneven", False)]


@pytest.mark.parametrize(("name", "tied"), daily(MANUAL[:1], MANUAL))
def test_manual_split_makes_the_same_stages(name, tied):
    counts = SPLITS[name][3]
    by_hand = manual_stages(counts, tie_word_embeddings=tied)
    for stage, other in zip(by_hand, stages_of(name, tie_word_embeddings=tied)):
        assert [*dict(stage.parameters_and_names())] == [*dict(other.parameters_and_names())]
        assert stage.shard(Sequence) == other.shard(Sequence)
    whole = whole_of(name, tie_word_embeddings=tied)
    assert_composes(by_hand, whole, ["model.embed_tokens.weight"] if tied and len(counts) > 1 else [])
    np.testing.assert_allclose(run(by_hand, *batch()).asnumpy(), whole(*batch()).asnumpy(), rtol=1e-6)


def test_manual_split_in_the_rfcs_words():
    """Deleted layers, and None for what the other stage has."""
    first, last = build(LlamaConfig(**SMALL)), build(LlamaConfig(**SMALL))
    for number in range(2, 6):
        del first.model.layers[str(number)]
    first.model.norm = None
    first.lm_head = None
    for number in range(2):
        del last.model.layers[str(number)]
    last.model.embed_tokens = None
    for stage in (first, last):
        materialize(stage, seed=1)
    whole = whole_of("whole")
    assert_composes([first, last], whole)
    np.testing.assert_allclose(run([first, last], *batch()).asnumpy(), whole(*batch()).asnumpy(), rtol=1e-6)


def test_compiled_stages_compute_the_whole():
    """A stage without layers, one without embedding and head, and one with a tied embedding that isn't the first."""
    config = LlamaConfig(**SMALL | {"num_hidden_layers": 1}, tie_word_embeddings=True)
    stages = [built(config, part) for part in split_layers(1, 3, layers_per_stage=[0, 1, 0])]

    def compiled(stage):
        @ms.jit
        def step(states, labels):
            return stage(states, labels)

        return step

    loss = run([compiled(stage) for stage in stages], *batch()).asnumpy()
    np.testing.assert_allclose(loss, run(stages, *batch()).asnumpy(), rtol=1e-6)


def test_a_stage_never_makes_the_others_parameters(monkeypatch):
    """Of a model of 120 GB the stage of a small layer is built and given values."""
    made = []
    original = ms.Parameter.__init__

    def counted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(tuple(self.shape))

    monkeypatch.setattr(ms.Parameter, "__init__", counted)
    sizes = {"vocab_size": 2**24, "hidden_size": 512, "intermediate_size": 2**22, "num_hidden_layers": 3}
    blocks = [{}, {"intermediate_size": 48}, {}]
    config = LlamaConfig(**sizes, num_attention_heads=4, heterogeneous_block_specs=blocks)
    stage = built(config, split_layers(3, 3)[1])
    attention, mlp = [(512, 512)] * 4, [(48, 512), (48, 512), (512, 48)]
    assert sorted(set(made)) == sorted({(512,), *attention, *mlp})
    values = {path: p.asnumpy().shape for path, p in stage.parameters_and_names()}
    assert sorted(values.values()) == sorted([(512,), (512,), *attention, *mlp])
    assert all(path.startswith("model.layers.1.") for path in values)


@pytest.mark.parametrize(
    ("stage", "counts", "layers", "message"),
    [
        (2, [3, 3], None, "stage_index: 2 should be from 0 to 1"),
        (-1, [3, 3], None, "stage_index: -1 should be from 0 to 1"),
        (0, [3, 4], None, r"layers_per_stage: \[3, 4\] makes 7 layers, but num_hidden_layers is 6"),
        (0, [3, 3], split_layers(6, 2)[0], "a stage already: it has 3 of 6 layers"),
    ],
)
def test_manual_split_errors(stage, counts, layers, message):
    model = build(LlamaConfig(**SMALL), layers)
    names = [*dict(model.parameters_and_names())]
    with pytest.raises(ValueError, match=message):
        model_split_manual(model, stage, counts)
    assert [*dict(model.parameters_and_names())] == names
