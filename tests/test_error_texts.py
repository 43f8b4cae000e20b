"""Calls that can't be are errors that say why: those of `error_texts.yaml`."""

import re
from pathlib import Path

import pytest
import yaml
from support.launch import ROOT
from support.split_models import SMALL
from test_checkpoint_hugging_face import CONFIG, KEYS, LLAMA
from test_device_models import LARGE

from mindformers_core.checkpoint.hugging_face import check_config
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models import LlamaConfig
from mindformers_core.operators import signature_of, tensor_meta
from mindformers_core.pipeline import split_layers
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings
from mindformers_core.redistribution.quantities import device_model_of
from mindformers_core.serving.sampling import Sampling
from mindformers_core.tensor_parallel.splitting import split_layer
from mindformers_core.zero.buckets import parse_comm_fusion

GROUPS = yaml.safe_load((Path(__file__).parent / "error_texts.yaml").read_text("utf-8"))
THEIRS = LlamaConfig(**{key: CONFIG[key] for key in KEYS})
TENSOR = re.compile(r"([fi]) (scalar|\d+(?:x\d+)*)$")


def tensors(value):
    """`value` with metas in the place of texts that are tensors, and tuples for lists without any."""
    if isinstance(value, list):
        found = [tensors(each) for each in value]
        return tuple(found) if found == value else found
    if isinstance(value, str) and (match := TENSOR.match(value)):
        shape = () if match[2] == "scalar" else tuple(map(int, match[2].split("x")))
        return tensor_meta(shape, "float32" if match[1] == "f" else "int64")
    return value


def operator(name, *args):
    """The signature of a call, whose named arguments are a dict at its end."""
    named = args[-1] if args and isinstance(args[-1], dict) else {}
    return signature_of(name, list(map(tensors, args[: len(args) - bool(named)])), named)


def recipe(name):
    return lambda *overrides: load_recipe(str(ROOT / "configs" / f"{name}.yaml"), overrides)


FUNCTIONS = {
    "DeviceMesh": DeviceMesh,
    "LlamaConfig": lambda **changes: LlamaConfig(**SMALL | changes),
    "RecomputeSettings": RecomputeSettings,
    "SwapSettings": SwapSettings,
    "device_model_of": lambda **changes: device_model_of(LARGE | changes),
    "Sampling": Sampling,
    "check_config": lambda **changes: check_config(LLAMA, "llama", THEIRS, CONFIG | changes, "config.json"),
    "comm_fusion": parse_comm_fusion,
    "operator": operator,
    "split_layer": lambda **given: split_layer(**{"size": (6, 4), "operation": "linear"} | given),
    "split_layers": lambda num_layers, stages, **split: split_layers(num_layers, stages, **split),
    **{f"recipe {name}": recipe(name) for name in ("llama_tiny_cpu", "llama_tiny_pp", "llama_tiny_zero")},
}
CALLS = [pytest.param(group, *call, id=f"{group} {call[0]}") for group, calls in GROUPS.items() for call in calls]


@pytest.mark.parametrize(("group", "given", "kind", "text"), CALLS)
def test_what_can_not_be(group, given, kind, text):
    with pytest.raises((ValueError, TypeError)) as caught:
        FUNCTIONS[group](**given) if isinstance(given, dict) else FUNCTIONS[group](*given)
    said, kind = str(caught.value), "RecipeError" if group.startswith("recipe ") else kind
    assert (text in said or re.search(text, said)) and type(caught.value).__name__ == kind, said
    assert group != "operator" or given[0] in said


def test_every_group_has_calls():
    assert GROUPS.keys() == FUNCTIONS.keys() and all(GROUPS.values())
