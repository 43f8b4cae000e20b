"""`config.json` of a model, as `transformers` reads it, from the recipe's section `model`, and back. Pure Python."""

import dataclasses
from fnmatch import fnmatchcase

_DTYPE_KEYS = ("torch_dtype", "dtype")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of texts, which no model computes with
# what a checkpoint's tensors and their use don't depend on; dtypes are converted
_OF_TRAINING = (*_DTYPE_KEYS, "initializer_range", "max_position_embeddings")


def tensor_name(spec):
    """The function of a parameter's path that returns the name of its tensor in files; `spec` is a `ModelSpec`."""
    return spec.hugging_face.tensor_name if spec.hugging_face else lambda path: path


def ignored_tensors(spec, names, config=None):
    """Those of the names of tensors that aren't parameters of the model, of this config if it is known, nor needed."""
    patterns = spec.hugging_face.ignored if spec.hugging_face else ()
    if spec.hugging_face and config is not None and spec.tied(config):
        patterns += spec.hugging_face.tied_copies
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def config_document(spec, name, config, carried=None):
    """The contents of `config.json`, a dict.

    Args:
        spec: the `ModelSpec`.
        name: of the model in recipes.
        config: the model's config.
        carried: the contents of the `config.json` of the weights that were loaded, whose ids of special tokens are
            kept; None: there was none.
    """
    values, known = dataclasses.asdict(config), spec.hugging_face
    ids = {key: carried[key] for key in _TOKEN_IDS if key in (carried or {})}
    if known is None:
        return {"model_type": name, **ids, **values}
    given = {key: value for key, value in ((key, values[key]) for key in known.keys) if value is not None}
    fixed = {key: value for key, value in known.fixed.items() if value is not None}
    dtype = {"torch_dtype": values["dtype"]} if "dtype" in values else {}
    return {"architectures": [known.architecture], "model_type": known.model_type, **ids, **given, **fixed, **dtype}


def model_section(spec, name, found, where):
    """The section `model` of a recipe for the contents of a `config.json`, a dict; missing keys are at their defaults.

    Args:
        spec, name: as of `config_document`.
        found: the contents of `config.json`.
        where: its path, for errors.

    Raises:
        ValueError: no dict, of another kind of model, or with a key that our model doesn't compute with.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{where} should be a dict by key, not a {type(found).__name__}")
    known = spec.hugging_face
    expected = name if known is None else known.model_type
    if found.get("model_type") != expected:
        raise ValueError(f"{where} has model_type {found.get('model_type')!r}, but the model {name} is {expected!r}")
    if known is None:
        own = {entry.name for entry in dataclasses.fields(spec.config)}
        left_out = {"model_type", *(key for key in _TOKEN_IDS if key not in own)}
        return {key: value for key, value in found.items() if key not in left_out}
    for key in ("rope_scaling", "rope_parameters"):  # since transformers 5 the second one, with rope_theta in it
        rope = found.get(key) or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"{where} has {key} {rope!r}, but the model {name} only has rope_type 'default'")
        found = {**found, key: None, "rope_theta": rope.get("rope_theta", found.get("rope_theta"))}
    for key, value in known.fixed.items():
        if found.get(key, value) != value:
            raise ValueError(f"{where} has {key} {found[key]!r}, but the model {name} computes with {value!r}")
    section = {key: found[key] for key in known.keys if key in found}
    dtype = next((found[key] for key in _DTYPE_KEYS if found.get(key)), None)
    return section | ({} if dtype is None else {"dtype": dtype})


def check_config(spec, name, config, found, where):
    """Raise `ValueError` for the first key in which a `config.json` differs from the recipe's section `model`.

    Arguments as of `model_section`; `config` is the model's config. Dtypes and the longest sequence may differ; and all
    keys of a model without a `HuggingFaceFormat`, of which only the user knows what they change: tensors are compared.
    """
    section = model_section(spec, name, found, where)
    if spec.hugging_face is None:
        return
    try:
        theirs = spec.config(**section)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    for key in spec.hugging_face.keys:
        one, other = _plain(getattr(theirs, key)), _plain(getattr(config, key))
        if one != other and key not in _OF_TRAINING:
            raise ValueError(f"{where} has {key} {one}, but model.{key} is {other}: take the model that was saved")


def _plain(value):
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
