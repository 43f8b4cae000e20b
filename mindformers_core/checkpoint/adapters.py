"""Checkpoints of low-rank adapters, as Hugging Face's PEFT has them, and merged with their base. Pure Python.

`adapter_model.safetensors` has `lora_A` and `lora_B` of every layer, `adapter_config.json` their scale and the base.
"""

import os
from fnmatch import fnmatchcase

import numpy as np

from mindformers_core.checkpoint.convert import convert
from mindformers_core.checkpoint.folders import find_checkpoint
from mindformers_core.checkpoint.index import ADAPTER_CONFIG, CONFIG, encode_json
from mindformers_core.checkpoint.load import load, open_checkpoint, read_json
from mindformers_core.checkpoint.parts import Part
from mindformers_core.checkpoint.regions import whole
from mindformers_core.checkpoint.save import save
from mindformers_core.checkpoint.slices import FileLayer, read_file
from mindformers_core.scopes import errors_at

_START = "base_model.model."
_BESIDE = (CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt")


def adapter_tensor(path, file_name):
    """The name in files of an adapter's tensor at `path`, `….lora_A`; `file_name`: that of a weight's path."""
    layer, _, end = path.rpartition(".")
    return f"{_START}{file_name(f'{layer}.weight').removesuffix('.weight')}.{end}.weight"


def adapter_config(tensors, rank, alpha, dropout, base):
    """The contents of `adapter_config.json`, for the names of the tensors; `base` is the folder of the weights beneath,
    or None."""
    layers = sorted({name.removeprefix(_START).rpartition(".lora_")[0] for name in tensors})
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "lora_dropout": dropout, "target_modules": layers, "bias": "none", "fan_in_fan_out": False,
    }  # fmt: skip


def read_config(checkpoint):
    """The contents of `adapter_config.json` of a `Checkpoint`; None where it has no adapters.

    Raises:
        ValueError: it has adapters, and no such file, or one of another kind of them.
    """
    if not checkpoint.has_adapters:
        return None
    where, found = os.path.join(checkpoint.folder, ADAPTER_CONFIG), read_json(checkpoint.folder, ADAPTER_CONFIG,
                                                                              FileLayer())  # fmt: skip
    if not isinstance(found, dict) or not found.get("r") or found.get("lora_alpha") is None:
        raise ValueError(f"{where} should say rank and scale of the adapters, as r and lora_alpha")
    for key in ("use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if found.get(key):
            raise ValueError(f"{where} has {key} {found[key]!r}, but adapters here are B A alpha / rank, all alike")
    return found


def open_base(checkpoint):
    """The `Checkpoint` of the weights beneath the adapters of a `Checkpoint`; None where it has none, or no base.

    Raises:
        ValueError: see `read_config`. FileNotFoundError: there is none at the place that `adapter_config.json` names.
    """
    config = read_config(checkpoint)
    path = config and config.get("base_model_name_or_path")
    with errors_at(f"{checkpoint.folder}, base_model_name_or_path of {ADAPTER_CONFIG}: ", kinds=(OSError, ValueError)):
        return open_checkpoint(find_checkpoint(path)) if path else None


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
    adapters = open_checkpoint(find_checkpoint(source))
    base, config = open_base(adapters), read_config(adapters)
    if base is None:
        what = "adapters to merge (for another conversion, one of both is a .ckpt file)" if config is None else "base"
        raise ValueError(f"{adapters.folder} has no {what}")
    pairs, files = {}, FileLayer()
    for group, name in adapters.tensors:
        if group == "adapter":
            weight = f"{name.removeprefix(_START).rpartition('.lora_')[0]}.weight"
            if ("model", weight) not in base.tensors:
                raise ValueError(f"{adapters.folder}: '{name}' is of no tensor of the base {base.folder}")
            pairs.setdefault(weight, {})[name.rpartition(".lora_")[2][0]] = name

    def values(part):
        array = _read(base, "model", part.name, part.dtype)
        if part.name not in pairs:
            return array
        low, high = (_read(adapters, "adapter", pairs[part.name][end], "float32").view(np.float32) for end in "AB")
        weight = convert(array, part.dtype, "float32").view(np.float32)
        merged = weight + high @ low * np.float32(config["lora_alpha"] / config["r"])
        return convert(merged.view(np.uint32), "float32", part.dtype)

    names = [name for name in os.listdir(base.folder) if any(fnmatchcase(name, pattern) for pattern in _BESIDE)]
    documents = {} if adapters.config is None else {CONFIG: encode_json(adapters.config, indent=1)}
    documents |= {name: read_file(files, os.path.join(base.folder, name)) for name in names}
    parts = [_whole(group, name, each) for (group, name), each in base.tensors.items() if group == "model"]
    save(os.path.normpath(target), parts, values, documents)
    return f"{target}: {len(parts)} tensors of {base.folder}, {len(pairs)} of them with adapters"


def _read(checkpoint, group, name, dtype):
    """A whole tensor, verified, in a dtype."""
    found = []
    part = _whole(group, name, checkpoint.tensors[group, name], dtype)
    others = [each for _, each in checkpoint.tensors]
    load(checkpoint, [part], lambda _, array: found.append(array), converts=True, ignored=others)
    return found[0]


def _whole(group, name, placed, dtype=None):
    return Part(group, name, dtype or placed.dtype, placed.shape, whole(placed.shape))
