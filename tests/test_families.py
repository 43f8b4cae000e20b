"""The page that adds a family, followed: its toy trains, saves and takes up its fused files on another mesh."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.small_generation import SMALL, mesh

from mindformers_core.checkpoint.hugging_face import check_config, config_document, lack_of_heads, model_section
from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.commands.command_line import main
from mindformers_core.commands.diffing import run_simulated
from mindformers_core.models.registry import MODELS
from mindformers_core.recipe.loader import RecipeError, load_recipe
from mindformers_core.trainer.checkpoints import save_job

ROOT = Path(__file__).parent.parent
RECIPE = str(ROOT / "configs" / "llama_tiny_pp.yaml")


def test_the_toy_of_the_page(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(# toy_family.py\n.*?)```", (ROOT / "docs/families.md").read_text(), re.S)
    (tmp_path / "toy_family.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)

    def run(name, *overrides, steps=0):
        recipe = load_recipe(
            RECIPE, [*SMALL, "model.name=toy_family:SPEC", f"training.output_dir={tmp_path / name}", *overrides]
        )
        run_simulated(recipe, steps, save_job)
        return load_file(next((tmp_path / name).rglob("model-*.safetensors")))

    one = run("one", *mesh())
    assert one["model.layers.3.mlp.gate_up.weight"].shape == (48, 16) and not any("gate_proj" in name for name in one)
    other = run("other", *mesh(pp=2, tp=2), f"checkpoint.load_path={tmp_path / 'one'}", "checkpoint.no_load_optim=true")
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], name)


def test_experts_by_their_newer_name():
    found = {"model_type": "qwen3_moe", "num_local_experts": 4}
    assert model_section(MODELS["qwen3_moe"], "qwen3_moe", found, "config.json") == {"num_experts": 4}


def test_heads_that_transformers_leaves_out(tmp_path):
    """A folder whose config has them, and no tensor: the error says what takes it as it is."""
    theirs = Path(shutil.copytree(ROOT / "tests" / "golden" / "deepseek_v3", tmp_path / "theirs"))
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    given = [f"model={{from: {theirs}}}", "train_dataset.seq_length=16", f"training.output_dir={tmp_path / 'ours'}"]
    given += mesh()
    recipe, behind = load_recipe(RECIPE, given), "give model.num_nextn_predict_layers=0"
    with pytest.raises(ValueError, match=f"checkpoint.load_path: .*theirs has no model tensor .*no tensor.*{behind}$"):
        run_simulated(recipe, 0, save_job)
    run_simulated(load_recipe(RECIPE, [*given, "model.num_nextn_predict_layers=0"]), 0, save_job)
    layer = f"model.layers.{recipe.model.num_hidden_layers}.enorm.weight"
    assert not lack_of_heads(recipe.spec, recipe.model, [layer])  # of one that has others, nothing is said of heads


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "model.from: there is no file '.*config.json': give a folder that transformers has saved: docs"),
        ('{"model_type": "qwen_3"}', r"model_type 'qwen_3', which isn't one of llama, .*\(did you mean 'qwen3'"),
        ('{"model_type": "gpt2", "activation_function": "relu"}', "model.from: .* computes with 'gelu_new'"),
    ],
)  # fmt: skip
def test_folders_that_are_no_model_of_ours(tmp_path, contents, message):
    if contents is not None:
        (tmp_path / "config.json").write_text(contents)
    with pytest.raises((RecipeError, FileNotFoundError), match=message):
        load_recipe(RECIPE, [f"model={{from: {tmp_path}}}"])


def document_of(name, **given):
    """The config of a family, of a few layers, and its `config.json`."""
    config = MODELS[name].config(num_hidden_layers=3, **given)
    return config, config_document(MODELS[name], name, config)


def test_null_that_is_no_default_is_written():
    """Without the key `transformers` would take its own default, and other tensors."""
    config, found = document_of("deepseek_v3", q_lora_rank=None)
    assert found["q_lora_rank"] is None and "rope_scaling" not in found
    check_config(MODELS["deepseek_v3"], "deepseek_v3", config, found, "here")
    with pytest.raises(ValueError, match="q_lora_rank 1536"):
        found.pop("q_lora_rank")
        check_config(MODELS["deepseek_v3"], "deepseek_v3", config, found, "here")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_losses_of_routers_are_a_setting_of_training(name):
    """Of `config.json`, and of a run that goes on from weights without them."""
    config, found = document_of(name, output_router_logits=True, router_aux_loss_coef=0.3, num_experts_per_tok=2)
    assert found["output_router_logits"] and model_section(MODELS[name], name, found, "here")["router_aux_loss_coef"]
    assert config.layer_spec(1).router["aux_loss_coef"] == pytest.approx(0.3 * 2 / 3)
    _, without = document_of(name, num_experts_per_tok=2)
    check_config(MODELS[name], name, config, without, "here")


def test_keys_of_numbers_that_are_not_ours():
    _, found = document_of("mixtral")
    with pytest.raises(ValueError, match="here has router_jitter_noise 0.1, but the model mixtral computes with 0.0"):
        model_section(MODELS["mixtral"], "mixtral", found | {"router_jitter_noise": 0.1}, "here")
    assert model_section(MODELS["mixtral"], "mixtral", found | {"router_jitter_noise": None}, "here")


def test_biases_of_routers_stay_in_float32(tmp_path):
    """Their steps of 0.001 would be lost in bfloat16."""
    given = "--config", RECIPE, "checkpoint.export_dtype=bfloat16"
    assert main(["convert", str(ROOT / "tests/golden/deepseek_v3"), str(tmp_path / "new"), *given]) == 0
    dtypes = {name: each.dtype for (_, name), each in open_checkpoint(str(tmp_path / "new")).tensors.items()}
    biases = [name for name in dtypes if name.endswith("e_score_correction_bias")]
    assert biases and {dtypes.pop(name) for name in biases} == {"float32"} and set(dtypes.values()) == {"bfloat16"}
