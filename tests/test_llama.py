"""The Llama model on one card, and its configuration and stages."""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from mindspore.common.initializer import Normal
from support.nightly import daily
from support.split_models import batch as small_batch

from mindformers_core.layout import layout
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.models.attention import GroupedAttention
from mindformers_core.models.positions import places_seen
from mindformers_core.models.rotary import apply_rotary, rotary_tables
from mindformers_core.pipeline import split_layers
from mindformers_core.sharding.initialize import materialize

SMALL = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 16}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def small_model(**changes):
    with ms.DeviceCtx("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}))
    materialize(model, seed=1)
    return model


def test_logits_and_loss():
    model, (ids, labels) = small_model(), small_batch()
    logits = model(ids)
    assert logits.shape == (2, 8, 32) and logits.dtype == ms.float32
    expected = ops.cross_entropy(logits.reshape(-1, 32), labels.reshape(-1), ignore_index=-100)
    loss = model(ids, labels)
    assert loss.shape == () and loss.dtype == ms.float32
    np.testing.assert_allclose(loss.asnumpy(), expected.asnumpy(), rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("tied", daily([True], [False, True]), ids=["untied", "tied"])
def test_every_parameter_has_a_gradient_and_jit_equals_pynative(tied):
    model, batch = small_model(tie_word_embeddings=tied), small_batch()
    weights = model.trainable_params()
    run = ms.value_and_grad(model, None, weights)

    @ms.jit
    def compiled(ids, labels):
        return run(ids, labels)

    loss, gradients = run(*batch)
    loss_jit, gradients_jit = compiled(*batch)
    np.testing.assert_allclose(loss.asnumpy(), loss_jit.asnumpy(), rtol=1e-6)
    assert len(gradients) == len(weights) == 21 - tied
    for weight, gradient, gradient_jit in zip(weights, gradients, gradients_jit):
        assert gradient.shape == weight.shape
        assert np.abs(gradient.asnumpy()).max() > 1e-6, weight.name
        found, expected = gradient_jit.asnumpy(), gradient.asnumpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6, err_msg=weight.name)


def test_gradient_agrees_with_finite_differences():
    """Along one random direction for every parameter."""
    model, batch = small_model(initializer_range=0.3, num_hidden_layers=1), small_batch()
    weights = model.trainable_params()
    gradients = ms.grad(model, None, weights)(*batch)
    rng = np.random.default_rng(6)
    for weight, gradient in zip(weights, gradients):
        value, direction = weight.asnumpy().copy(), rng.normal(size=weight.shape).astype(np.float32)
        direction *= 3e-3 / np.abs(direction).max()
        losses = []
        for sign in (1, -1):
            weight.set_data(Tensor(value + sign * direction))
            losses.append(float(model(*batch).asnumpy()))
        weight.set_data(Tensor(value))
        expected = float((gradient.asnumpy() * direction).sum())
        assert abs((losses[0] - losses[1]) / 2 - expected) < 2e-2 * abs(expected) + 3e-6, weight.name


def test_parameter_names_are_hugging_faces():
    names = [parameter.name for parameter in small_model().trainable_params()]
    assert names[:2] == ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]
    assert "model.layers.1.self_attn.k_proj.weight" in names and "model.layers.0.mlp.down_proj.weight" in names
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_tied_embedding_is_one_parameter():
    model, (ids, _) = small_model(tie_word_embeddings=True), small_batch()
    assert [p.name for p in model.trainable_params() if p.shape == (32, 24)] == ["model.embed_tokens.weight"]
    hidden_states = model.model(ids).asnumpy()
    expected = hidden_states @ model.model.embed_tokens.weight.asnumpy().T
    np.testing.assert_allclose(model(ids).asnumpy(), expected, rtol=1e-4, atol=1e-6)


def test_a_position_sees_only_those_before_it():
    model, (ids, _) = small_model(), small_batch()
    changed = ids.asnumpy().copy()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    before, after = model(ids).asnumpy(), model(Tensor(changed)).asnumpy()
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.abs(before[:, 5:] - after[:, 5:]).max(axis=(0, 2)).min() > 1e-6


@pytest.mark.parametrize("mode", ["pynative", "jit"])
def test_rotary_embedding_against_complex_numbers(mode):
    """Pair (i, i + d/2) as a complex number, turned by exp(i·p·theta^(-2i/d))."""
    length, dim, theta = 7, 6, 100.0
    x = np.random.default_rng(3).normal(size=(2, length, 3, dim)).astype(np.float32)

    def turn(x):
        return apply_rotary(x, *rotary_tables(x.shape[1], 6, 100.0))

    turned = (ms.jit(turn) if mode == "jit" else turn)(Tensor(x)).asnumpy()
    angles = np.arange(length)[:, None] * theta ** (-2 * np.arange(dim // 2) / dim)
    expected = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * np.exp(1j * angles)[:, None, :]
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), rtol=1e-5, atol=1e-6)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_query_attention_against_explicit_repeat(kv_heads):
    config = LlamaConfig(**{**SMALL, "num_key_value_heads": kv_heads, "head_dim": 10})
    cell = GroupedAttention(config, Normal(0.5))
    x = np.random.default_rng(4).normal(size=(2, 5, 24)).astype(np.float32)
    tables = rotary_tables(5, 10, config.rope_theta)
    actual = cell(Tensor(x), *tables, *places_seen(5, (0,))[1]).asnumpy()

    def heads(projection, count):
        return (x @ projection.weight.asnumpy().T).reshape(2, 5, count, 10)

    query = apply_rotary(Tensor(heads(cell.q_proj, 4)), *tables).asnumpy()
    key = apply_rotary(Tensor(heads(cell.k_proj, kv_heads)), *tables).asnumpy().repeat(4 // kv_heads, axis=2)
    value = heads(cell.v_proj, kv_heads).repeat(4 // kv_heads, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(10)
    scores[:, :, ~np.tril(np.ones((5, 5), bool))] = -np.inf
    mixed = np.einsum("bhqk,bkhd->bqhd", softmax(scores), value).reshape(2, 5, 40)
    np.testing.assert_allclose(actual, mixed @ cell.o_proj.weight.asnumpy().T, rtol=1e-4, atol=1e-5)


def test_half_precision():
    model, batch = small_model(dtype="float16"), small_batch()
    assert all(p.dtype == ms.float16 for p in model.trainable_params())
    assert model(batch[0]).dtype == ms.float16
    loss = model(*batch)
    assert loss.dtype == ms.float32
    np.testing.assert_allclose(loss.asnumpy(), small_model()(*batch).asnumpy(), rtol=1e-3)


def test_building_and_running_on_meta_allocates_nothing():
    large = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672}
    config = LlamaConfig(**large, num_hidden_layers=4, num_attention_heads=64, num_key_value_heads=8)
    with ms.DeviceCtx("meta"):
        ids = Tensor(np.zeros((2, 128), np.int32))
        assert LlamaForCausalLM(config)(ids, ids).shape == ()


def test_stages_of_a_pipeline_compute_the_whole():
    """4 stages, run one after another, give the loss of the whole model."""
    whole, (ids, labels) = small_model(num_hidden_layers=4), small_batch()
    hidden_states, names = ids, []
    for layers in split_layers(4, 4):
        with ms.DeviceCtx("meta"):
            stage = LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_hidden_layers": 4}), layers=layers)
        materialize(stage, seed=1)
        names += [parameter.name for parameter in stage.trainable_params()]
        hidden_states = stage(hidden_states, labels)
    assert names == [parameter.name for parameter in whole.trainable_params()]
    np.testing.assert_allclose(hidden_states.asnumpy(), whole(ids, labels).asnumpy(), rtol=1e-6)


def test_hooks_name_the_batch_only_where_the_config_does():
    model = small_model()
    names = "input_ids", "labels", "positions", "places"
    assert model.shard(None) == (dict.fromkeys(names), None, None)
    inputs, outputs, weights = model.shard(SimpleNamespace(batch_axes=("dp", "cp")))
    assert inputs == dict.fromkeys(names, layout(("dp", "cp"), ...))
    assert model.shard(SimpleNamespace(sequence_axes="cp"))[0] == dict.fromkeys(names, layout(..., "cp"))
    assert outputs is None and weights is None
    layer = next(iter(model.model.layers.values()))
    sequence_parallel = SimpleNamespace(sequence_parallel=True)
    assert layer.mlp.shard(sequence_parallel)[0] == layout(..., None, None)
    assert layer.self_attn.shard(sequence_parallel)[0] == {"hidden_states": layout(..., None, None)}
