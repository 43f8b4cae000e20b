"""Checkpoints of low-rank adapters, as Hugging Face's PEFT has them; weights alone, in a dtype. Pure Python.

`adapter_model.safetensors` has `lora_A` and `lora_B` of every layer, `adapter_config.json` their scale and the base.
"""

import os
from fnmatch import fnmatchcase

import numpy as np

from mindformers_core.checkpoint.folders import find_checkpoint
from mindformers_core.checkpoint.hugging_face import DTYPE_KEYS
from mindformers_core.checkpoint.index import CONFIG, encode_json
from mindformers_core.checkpoint.load import load, open_checkpoint
from mindformers_core.checkpoint.parts import Part
from mindformers_core.checkpoint.regions import whole
from mindformers_core.checkpoint.save import save
from mindformers_core.checkpoint.slices import FileLayer, read_file
from mindformers_core.dtypes import FLOATS, convert

_START = "base_model.model."
_BESIDE = (CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt")


def adapter_tensor(path):
    """The name in files of an adapter's tensor at `path`, `….lora_A`."""
    return f"{_START}{path}.weight"


def parameter_name(group, name):
    """The name of the parameter of a tensor in files, as the optimizer's states are called; `group`: see `GROUPS`."""
    return name.removeprefix(_START).removesuffix(".weight") if group == "adapter" else name


def adapter_config(tensors, rank, alpha, dropout, base):
    """The contents of `adapter_config.json`, for the names of the tensors; `base` is the folder of the weights beneath,
    or None."""
    layers = sorted({name.removeprefix(_START).rpartition(".lora_")[0] for name in tensors})
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "lora_dropout": dropout, "target_modules": layers, "bias": "none", "fan_in_fan_out": False,
    }  # fmt: skip


def export(source, target, dtype="source", kept=()):
    """Save the weights of a checkpoint, of one of adapters `W + B A alpha / rank`: a line about it.

    The new folder has names, configs and tokenizer of the weights beneath. Tensors are read and merged one by one.

    Args:
        source: as of `find_checkpoint`.
        target: the new folder.
        dtype: of floats in the new folder: float32, bfloat16, or "source": as they are. Default: that.
        kept: patterns of names of tensors that stay as they are. Default: none.

    Raises:
        ValueError: adapters without a base, or of another layer; damage. OSError: a file can't be read or written.
    """
    checkpoint = open_checkpoint(find_checkpoint(source))
    if checkpoint.adapters and checkpoint.base is None:
        raise ValueError(f"{checkpoint.folder} has no base")
    base, given = checkpoint.base or checkpoint.folder, checkpoint.adapters or {"lora_alpha": 0, "r": 1}
    lows, files = {name for group, name in checkpoint.tensors if group == "adapter"}, FileLayer()
    scale = np.float32(given["lora_alpha"] / given["r"])
    weights = {name for group, name in checkpoint.tensors if group == "model"}
    pairs = {f"{name.removeprefix(_START).rpartition('.lora_')[0]}.weight" for name in lows}
    for name in sorted(pairs - weights):
        raise ValueError(f"{checkpoint.folder} has an adapter of '{name}', which isn't in its base {base}")

    def read(group, name, dtype):
        found, placed = [], checkpoint.tensors[group, name]
        part = Part(group, name, dtype, placed.shape, whole(placed.shape))
        load(checkpoint, [part], lambda _, array: found.append(array), converts=True, ignored=weights | lows)
        return found[0]

    def values(part):
        if part.name not in pairs:
            return read("model", part.name, part.dtype)
        names = [f"{_START}{part.name.removesuffix('weight')}lora_{end}.weight" for end in "AB"]
        low, high = (read("adapter", name, "float32").view(np.float32) for name in names)
        merged = read("model", part.name, "float32").view(np.float32) + high @ low * scale
        return convert(merged.view(np.uint32), "float32", part.dtype)

    names = [name for name in os.listdir(base) if any(fnmatchcase(name, pattern) for pattern in _BESIDE)]
    documents = {name: read_file(files, os.path.join(base, name)) for name in names}
    if checkpoint.config:
        keys = {key: dtype for key in DTYPE_KEYS if dtype != "source" and key in checkpoint.config}
        documents[CONFIG] = encode_json(checkpoint.config | keys, indent=1)
    parts = []
    for name in weights:
        placed = checkpoint.tensors["model", name]
        converts = placed.dtype in FLOATS and not any(fnmatchcase(name, pattern) for pattern in kept)
        wanted = dtype if dtype != "source" and converts else placed.dtype
        parts.append(Part("model", name, wanted, placed.shape, whole(placed.shape)))
    save(os.path.normpath(target), parts, values, documents)
    return f"{target}: {len(parts)} tensors of {base}, {len(pairs)} of them with adapters"
