"""Checkpoints of low-rank adapters, as Hugging Face's PEFT has them, and merged with their base. Pure Python.

`adapter_model.safetensors` has `lora_A` and `lora_B` of every layer, `adapter_config.json` their scale and the base.
"""

import os
from fnmatch import fnmatchcase

import numpy as np

from mindformers_core.checkpoint.folders import find_checkpoint
from mindformers_core.checkpoint.index import CONFIG, encode_json
from mindformers_core.checkpoint.load import load, open_checkpoint
from mindformers_core.checkpoint.parts import Part
from mindformers_core.checkpoint.regions import whole
from mindformers_core.checkpoint.save import save
from mindformers_core.checkpoint.slices import FileLayer, read_file
from mindformers_core.dtypes import convert

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


def merge(source, target):
    """Save the weights `W + B A alpha / rank` of a checkpoint of adapters and its base: a line about it.

    The new folder has the base's names, dtypes, configs and tokenizer. Tensors are read and merged one by one.

    Args:
        source: as of `find_checkpoint`.
        target: the new folder.

    Raises:
        ValueError: no adapters, no base, or an adapter of another layer; damage. OSError: a file can't be read or
            written.
    """
    checkpoint = open_checkpoint(find_checkpoint(source))
    if checkpoint.base is None:
        what = (
            "base" if checkpoint.adapters else "adapters to merge (for another conversion, one of both is a .ckpt file)"
        )
        raise ValueError(f"{checkpoint.folder} has no {what}")
    lows, files = {name for group, name in checkpoint.tensors if group == "adapter"}, FileLayer()
    scale = np.float32(checkpoint.adapters["lora_alpha"] / checkpoint.adapters["r"])
    weights = {name for group, name in checkpoint.tensors if group == "model"}
    pairs = {f"{name.removeprefix(_START).rpartition('.lora_')[0]}.weight" for name in lows}
    for name in sorted(pairs - weights):
        raise ValueError(f"{checkpoint.folder} has an adapter of '{name}', which isn't in its base {checkpoint.base}")

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

    names = [name for name in os.listdir(checkpoint.base) if any(fnmatchcase(name, pattern) for pattern in _BESIDE)]
    documents = {CONFIG: encode_json(checkpoint.config, indent=1)} if checkpoint.config else {}
    documents |= {name: read_file(files, os.path.join(checkpoint.base, name)) for name in names}
    described = ((name, checkpoint.tensors["model", name]) for name in weights)
    parts = [Part("model", name, each.dtype, each.shape, whole(each.shape)) for name, each in described]
    save(os.path.normpath(target), parts, values, documents)
    return f"{target}: {len(parts)} tensors of {checkpoint.base}, {len(pairs)} of them with adapters"
