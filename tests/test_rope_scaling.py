"""Scaled rotary frequencies: those, and the logits, of Hugging Face's `transformers`, and its configs.

`tests/golden/rope_scaling.safetensors` is from `make_hugging_face_golden.py`; its metadata are the configs.
"""

import dataclasses
import json
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from safetensors import safe_open
from safetensors.numpy import load_file

from mindformers_core.checkpoint.hugging_face import check_config, config_document, model_section
from mindformers_core.models import LlamaConfig
from mindformers_core.models.llama import LlamaForCausalLM
from mindformers_core.models.registry import MODELS
from mindformers_core.models.rope_scaling import rotary_frequencies
from mindformers_core.models.rotary import rotary_tables
from mindformers_core.models.spec import HuggingFaceFormat
from mindformers_core.recipe.loader import load_recipe, recipe_from_dict, recipe_to_dict
from mindformers_core.sharding.initialize import materialize

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = load_file(GOLDEN / "rope_scaling.safetensors")
with safe_open(GOLDEN / "rope_scaling.safetensors", "numpy") as opened:
    CONFIGS = {
        name: json.loads(text) for name, text in sorted(opened.metadata().items())
    }  # as Rust hands them, in any order
SMALL = [name for name in CONFIGS if f"{name}.logits" in EXPECTED]
LLAMA, LENGTH = MODELS["llama"], EXPECTED["ids"].shape[1]


def config_of(found):
    return LlamaConfig(**model_section(LLAMA, "llama", found, "config.json"))


@pytest.mark.parametrize("name", CONFIGS)
def test_their_frequencies(name):
    """In float64; theirs are float32."""
    config = config_of(CONFIGS[name])
    found, factor = rotary_frequencies(LENGTH, config.head_dim, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(found, EXPECTED[f"{name}.frequencies"], rtol=2e-6)
    assert factor == pytest.approx(float(EXPECTED[f"{name}.factor"][0]), rel=1e-12) and found.dtype == np.float64


def test_their_logits():
    """Of one model with each scaling; as constants of one compiled function, tables are the same."""
    weights, configs = load_file(GOLDEN / "llama_untied" / "model.safetensors"), []
    for name in SMALL:
        configs.append(config_of(CONFIGS[name]))
        with ms.DeviceCtx("meta"):
            net = LlamaForCausalLM(configs[-1])
        materialize(net, seed=0)
        for parameter in net.get_parameters():
            parameter.set_data(Tensor(weights[parameter.name]))
        found, expected = net(Tensor(EXPECTED["ids"])).asnumpy()[:, -4:], EXPECTED[f"{name}.logits"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * abs(expected).max(), err_msg=name)
    assert abs(EXPECTED[f"{SMALL[0]}.logits"] - expected).max() > 0.1

    @ms.jit
    def tables():
        return [rotary_tables(LENGTH, config.head_dim, config.rope_theta, config.rope_scaling) for config in configs]

    for config, compiled in zip(configs, tables(), strict=True):
        for one, other in zip(compiled, rotary_tables(LENGTH, 8, 100.0, config.rope_scaling), strict=True):
            assert np.array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_all_versions_come_back(name):
    """`type` before transformers 4.45, `rope_parameters` since 5; what is written is read as the same."""
    found, config = CONFIGS[name], config_of(CONFIGS[name])
    rest = {key: value for key, value in found.items() if key not in ("rope_scaling", "rope_theta")}
    older = {key: value for key, value in found["rope_scaling"].items() if key != "rope_type"}
    older["type"] = found["rope_scaling"]["rope_type"]
    newer = rest | {"rope_parameters": found["rope_scaling"] | {"rope_theta": found["rope_theta"]}}
    assert config == config_of(found | {"rope_scaling": older}) == config_of(newer)
    longer = dataclasses.replace(config, max_position_embeddings=2 * config.max_position_embeddings)
    written = json.loads(json.dumps(config_document(LLAMA, "llama", longer)))
    check_config(LLAMA, "llama", config, written, "config.json")
    assert config_of(written).rope_scaling == config.rope_scaling
    theirs = {key: value for key, value in found["rope_scaling"].items() if key != "type"}
    known = config.rope_scaling.original_max_position_embeddings
    filled = {} if name in ("linear", "dynamic") else {"original_max_position_embeddings": known}
    assert written["rope_scaling"] == theirs | filled
    other = dataclasses.replace(config.rope_scaling, factor=16.0)
    with pytest.raises(ValueError, match="has rope_scaling {'rope_type': .*'factor': 16.0.* take the model"):
        check_config(LLAMA, "llama", config, written | {"rope_scaling": dataclasses.asdict(other)}, "config.json")


def test_dynamic_begins_at_the_length_of_the_file():
    """Longer sequences need the original length, which `transformers` calls `max_position_embeddings`."""
    found = CONFIGS["dynamic"]
    ignored = found | {"rope_scaling": found["rope_scaling"] | {"original_max_position_embeddings": 8}}
    assert config_of(ignored) == config_of(found) and config_of(found).max_position_embeddings == 64
    longer = LlamaConfig(**model_section(LLAMA, "llama", found, "") | {"max_position_embeddings": 512})
    with pytest.raises(ValueError, match="'original_max_position_embeddings': 64}, but .*: 512}: take the model"):
        check_config(LLAMA, "llama", longer, found, "config.json")
    for length, same in (64, True), (65, False):
        plain = rotary_frequencies(length, 8, 100.0)[0]
        assert np.array_equal(rotary_frequencies(length, 8, 100.0, config_of(found).rope_scaling)[0], plain) == same


def test_a_recipe_has_the_keys_of_a_scaling():
    given = [f"model.rope_scaling.{key}={value}" for key, value in CONFIGS["llama3"]["rope_scaling"].items()]
    recipe = load_recipe("configs/llama_tiny_cpu.yaml", given)
    assert recipe.model.rope_scaling == config_of(CONFIGS["llama3"]).rope_scaling
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe


def test_models_that_do_not_scale_say_so():
    plain = dataclasses.replace(LLAMA, hugging_face=HuggingFaceFormat("llama", "Llama", ("hidden_size",)))
    with pytest.raises(ValueError, match="config.json has rope_scaling {'rope_type': 'linear'.* doesn't scale"):
        model_section(plain, "mine", CONFIGS["linear"], "config.json")
