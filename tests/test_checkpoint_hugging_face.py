"""Folders of Hugging Face's Llama: loaded here, written back byte by byte; configs; names and dtypes that differ."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from support.hugging_face_llama import CONFIG, NEWER, weights, write_folder

from mindformers_core.checkpoint.hugging_face import check_config, config_document, model_section, tensor_map
from mindformers_core.checkpoint.index import place_tensors
from mindformers_core.checkpoint.regions import whole
from mindformers_core.checkpoint.tensor_map import boxes_in_files
from mindformers_core.commands.diffing import run_simulated
from mindformers_core.models.configuration import LlamaConfig
from mindformers_core.models.registry import MODELS
from mindformers_core.models.spec import FileTensor, HuggingFaceFormat, ModelSpec
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.trainer.checkpoints import open_source, save_job

RECIPE = str(Path(__file__).parent.parent / "configs" / "llama_tiny_pp.yaml")
LLAMA, KEYS = MODELS["llama"], MODELS["llama"].hugging_face.keys[:-1]
DP_AND_TP = ("parallelism.pipeline_parallel=1", "parallelism.data_parallel_shard=2", "parallelism.tensor_parallel=2")
PIPELINE = ("parallelism.pipeline_parallel=2", "parallelism.data_parallel_shard=1", "parallelism.zero_level=0")


def recipe_of(folder, config, *overrides):
    """The recipe of a model in `folder / "theirs"`."""
    section = {key: config[key] for key in KEYS if key in config}
    return load_recipe(
        RECIPE,
        [
            *(f"model.{key}={json.dumps(value)}" for key, value in section.items()), "training.local_batch_size=2",
            "training.global_batch_size=4", "train_dataset.seq_length=16", "train_dataset.max_bytes=20000",
            f"train_dataset.cache_dir={folder / 'cache'}", f"training.output_dir={folder / 'ours'}",
            f"checkpoint.load_path={folder / 'theirs'}", *overrides,
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tied", "overrides", "files"),
    [(False, DP_AND_TP, 1), (True, (*PIPELINE, "training.gradient_accumulation_steps=2"), 3)],
)
def test_their_model_is_written_back(tmp_path, tied, overrides, files):
    """On 4 ranks: the tensors come back byte by byte (of loss and gradients: test_hugging_face_golden.py)."""
    config = CONFIG | {"tie_word_embeddings": tied, "eos_token_id": 0}
    tensors = weights(config)
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"]} if tied else {}  # some writers keep it
    write_folder(tmp_path / "theirs", config, tensors | copy, files)
    run_simulated(recipe_of(tmp_path, config, *overrides), 0, save_job)
    saved = tmp_path / "ours/checkpoint/step_0"
    found = load_file(saved / "model-00001-of-00001.safetensors")
    assert found.keys() == tensors.keys()
    for name, array in found.items():
        assert array.dtype == np.float32
        assert array.tobytes() == tensors[name].tobytes(), name
    written = json.loads((saved / "config.json").read_text())
    assert written.items() <= (config | {"quantization_config": None}).items() and written["eos_token_id"] == 0
    with safe_open(saved / "model-00001-of-00001.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses others


def bfloat16_folder(folder, config, tensors):
    """A folder with weights in bfloat16, which NumPy doesn't have; returns their values."""
    bits = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    (file,) = place_tensors({name: ("bfloat16", array.shape) for name, array in tensors.items()}, "model")
    data = bytearray(file.header.ljust(file.nbytes))
    for name, placed in file.tensors.items():
        data[placed.offset : placed.offset + placed.nbytes] = bits[name].tobytes()
    (folder / "model.safetensors").write_bytes(data)
    return {name: (array.astype(np.uint32) << 16).view(np.float32) for name, array in bits.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_become_those_of_the_recipe(tmp_path, dtype):
    tensors = weights(CONFIG)
    if dtype == "bfloat16":
        expected = bfloat16_folder(tmp_path / "theirs", CONFIG, tensors)
    else:
        expected = {name: array.astype(np.float16).astype(np.float32) for name, array in tensors.items()}
        halves = {name: array.astype(np.float16) for name, array in tensors.items()}
        write_folder(tmp_path / "theirs", CONFIG, halves)

    def prepare(job):
        for parameter in job.optimizer.parameters:
            np.testing.assert_array_equal(parameter.asnumpy(), expected[parameter.name])

    one = ("parallelism.pipeline_parallel=1", "parallelism.data_parallel_shard=1", "parallelism.tensor_parallel=1")
    run_simulated(recipe_of(tmp_path, CONFIG, *one), 0, prepare)


def drop(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "tied", "message"),
    [
        (drop("model.norm.weight"), False, "has no model tensor 'model.norm.weight'"),
        (drop("model.norm.weight"), True, "has no model tensor 'model.norm.weight'"),  # 'lm_head.weight' is ignored
        (lambda tensors: tensors.update(cut=np.zeros(3, np.float32)), False, "'cut' isn't a tensor of this model"),
        (lambda found: found.update({"lm_head.weight": np.zeros((255, 16), np.float32)}), False, r"\(255, 16\), not"),
    ],
)  # fmt: skip
def test_other_tensors_are_errors(tmp_path, change, tied, message):
    tensors = weights(CONFIG)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)  # in old files
    change(tensors)
    config = CONFIG | {"tie_word_embeddings": tied}
    write_folder(tmp_path / "theirs", config, tensors)
    one = ("parallelism.pipeline_parallel=1", "parallelism.data_parallel_shard=1", "parallelism.tensor_parallel=1")
    with pytest.raises(ValueError, match=f"checkpoint.load_path: .*theirs.*{message}"):
        run_simulated(recipe_of(tmp_path, config, *one), 0)


@pytest.mark.parametrize("spec", [LLAMA, ModelSpec("package:Class", LlamaConfig)])
def test_configs_that_are_no_dicts_are_errors(spec):
    with pytest.raises(ValueError, match=r"^theirs/config.json should be a dict by key, not a list$"):
        check_config(spec, "llama", LlamaConfig(), [1], "theirs/config.json")


@dataclasses.dataclass(frozen=True)
class Padded:
    """A config with a special token of its own."""

    pad_token_id: int = 3


def test_ids_of_special_tokens_are_carried():
    """Of 0, None and lists, for every kind of model; nothing else is."""
    ids = {"bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": None}
    for spec in (LLAMA, ModelSpec("package:Class", LlamaConfig)):
        plain = config_document(spec, "llama", LlamaConfig())
        written = config_document(spec, "llama", LlamaConfig(), {"vocab_size": 1, "use_cache": True, **ids})
        assert written == plain | ids and not plain.keys() & ids.keys()
        assert config_document(spec, "llama", LlamaConfig(), {"eos_token_id": 0}) == plain | {"eos_token_id": 0}
        check_config(spec, "llama", LlamaConfig(), written, "config.json")
    spec = ModelSpec("package:Class", Padded)
    assert config_document(spec, "a", Padded(), ids) == {"model_type": "a", **ids, "pad_token_id": 3}


def test_configs_of_all_versions_are_the_models():
    config = LlamaConfig(**{key: CONFIG[key] for key in KEYS}, dtype="float16")
    newer = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    plain = {"rope_scaling": {"rope_type": "default"}, "max_position_embeddings": 32}
    for found in (CONFIG, newer | NEWER, CONFIG | {"initializer_range": 0.5, "head_dim": None}, CONFIG | plain):
        check_config(LLAMA, "llama", config, found, "config.json")
        section = model_section(LLAMA, "llama", found, "config.json")
        assert section["dtype"] == "float32"
        assert LlamaConfig(**section).rope_theta == 500000.0
    written = config_document(LLAMA, "llama", config)
    assert written["torch_dtype"] == "float16" and "quantization_config" not in written
    assert LlamaConfig(**model_section(LLAMA, "llama", written, "config.json")) == config
    blocks = dataclasses.replace(config, heterogeneous_block_specs=({}, {"intermediate_size": 8}))
    written = json.loads(json.dumps(config_document(LLAMA, "llama", blocks)))
    check_config(LLAMA, "llama", blocks, written, "config.json")
    with pytest.raises(
        ValueError, match="has heterogeneous_block_specs .* but model.heterogeneous_block_specs is None"
    ):
        check_config(LLAMA, "llama", config, written, "config.json")


def test_models_without_a_format_keep_their_names_and_keys():
    spec = ModelSpec("package:Class", LlamaConfig)
    config = LlamaConfig(hidden_size=64)
    found = json.loads(json.dumps(config_document(spec, "package:Class", config)))
    check_config(spec, "package:Class", config, found, "config.json")
    with pytest.raises(ValueError, match="has model_type 'package:Class', but the model other:Class is 'other:Class'"):
        check_config(spec, "other:Class", config, found, "config.json")
    assert tensor_map(spec, config) == ()
    named = HuggingFaceFormat("a", "A", (), tensor_map=lambda config: [("*", (FileTensor(f"{config.dtype}.*"),))])
    entries = tensor_map(dataclasses.replace(spec, hugging_face=named), config)
    assert boxes_in_files(entries, "a.weight", (2, 3), whole((2, 3)))[0][:2] == ("float32.a.weight", (2, 3))


def test_damaged_folders_are_errors(tmp_path):
    write_folder(tmp_path / "theirs", CONFIG, weights(CONFIG), files=2)
    folder, recipe = tmp_path / "theirs", recipe_of(tmp_path, CONFIG)
    assert open_source(recipe).state is None
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace("weight_map", "map"))
    with pytest.raises(ValueError, match="checkpoint.load_path: .*index.json has no weight_map"):
        open_source(recipe)
    index.write_text(text[:-1])
    with pytest.raises(ValueError, match="checkpoint.load_path: .*index.json isn't JSON"):
        open_source(recipe)
    index.write_text(text)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="checkpoint.load_path: .*model-00002-of-00002.safetensors"):
        open_source(recipe)
