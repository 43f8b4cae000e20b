"""`ModelSpec`s by name, and those of users. Pure Python."""

from dataclasses import fields, is_dataclass
from types import MappingProxyType

from mindformers_core.hints import nearest
from mindformers_core.lazy_exports import import_object
from mindformers_core.models.families import deepseek_v3, gpt2, llama, mixtral, qwen3, qwen3_moe
from mindformers_core.models.spec import ModelSpec

DEFAULT_MODEL = "llama"
_FAMILIES = llama, qwen3, qwen3_moe, mixtral, gpt2, deepseek_v3
MODELS = MappingProxyType({family.FORMAT.model_type: family.SPEC for family in _FAMILIES})


def model_spec(name):
    """The `ModelSpec` of a name.

    Args:
        name: a key of `MODELS`, or "package.module:NAME" of a `ModelSpec`, or of a Cell's class with the attribute
            `config_class`, the dataclass of its config.

    Raises:
        TypeError: not a text, or the import path of something else. ValueError: no such name, module or attribute.
    """
    if not isinstance(name, str):
        raise TypeError(f"{name!r} should be a text: {', '.join(MODELS)}, or package.module:Class")
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        known = ", ".join(MODELS)
        raise ValueError(f"no model is called {name!r}{nearest(name, MODELS)}: {known}, or package.module:Class")
    found = import_object(name, "model")
    if not isinstance(found, ModelSpec):
        if not isinstance(found, type) or not is_dataclass(getattr(found, "config_class", None)):
            raise TypeError(
                f"{name} is {found!r}: it should be a ModelSpec, or a class with config_class = a dataclass"
            )
        found = ModelSpec(found, found.config_class)
    if "name" in (entry.name for entry in fields(found.config)):
        raise ValueError(f"{name}: its config has a field 'name', which in a recipe is that of the model: rename it")
    return found
