"""`config.json` of a model, as `transformers` reads it, from the recipe's section `model`, and back. Pure Python."""

import dataclasses
from fnmatch import fnmatchcase

from mindformers_core.hints import nearest

DTYPE_KEYS = ("torch_dtype", "dtype")
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of texts, which no model computes with
_TIED_COPIES = ("lm_head.weight",)  # that files may have beside the embedding; `transformers` ignores them, too
_NEWER = {"num_experts": "num_local_experts"}  # names of keys since `transformers` 5
_HEADS = "num_nextn_predict_layers"
# what a checkpoint's tensors and their use don't depend on; dtypes are converted, and tensors of heads compared
_OF_TRAINING = (*DTYPE_KEYS, "attention_dropout", "initializer_range", "max_position_embeddings", _HEADS)
_OF_TRAINING += ("output_router_logits", "router_aux_loss_coef")


def tensor_map(spec, config):
    """The tensor map, see `tensor_map.py`, of a `ModelSpec` and its config."""
    return tuple(spec.hugging_face.tensor_map(config)) if spec.hugging_face else ()


def ignored_tensors(spec, names, config=None):
    """Those of the names of tensors that aren't parameters of the model, of this config if it is known, nor needed."""
    patterns = spec.hugging_face.ignored if spec.hugging_face else ()
    if spec.hugging_face and getattr(config, "tie_word_embeddings", False):
        patterns += _TIED_COPIES
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def lack_of_heads(spec, config, names):
    """A clause for a config with prediction heads, of which there is no tensor with one of these names; or ""."""
    first = f"model.layers.{config.num_hidden_layers}." if spec.hugging_face and getattr(config, _HEADS, 0) else None
    if first is None or any(name.startswith(first) for name in names):
        return ""
    return f"; it has no tensor of prediction heads, which `transformers` doesn't save: give model.{_HEADS}=0"


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
    defaults = {entry.name: entry.default for entry in dataclasses.fields(config)}
    says_none = [key for key in known.keys if values[key] is None and defaults[key] is not None]
    given = {known.aliases.get(key, key): values[key] for key in known.keys}
    given = _given(given) | {known.aliases.get(key, key): None for key in says_none}
    scaling = given.get("rope_scaling", {})
    if scaling.get("rope_type") == "dynamic":  # in `transformers` it begins at the longest sequence
        given["max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    fixed = {key: value for key, value in (known.fixed | known.written).items() if value is not None}
    dtype = {"torch_dtype": values["dtype"]} if "dtype" in values else {}
    return {"architectures": [known.architecture], "model_type": known.model_type, **ids, **given, **fixed, **dtype}


def model_of(models, found, where):
    """The name of the model in `models`, a dict of `ModelSpec`s, that has the `model_type` of a `config.json`.

    Arguments and errors as of `model_section`.
    """
    kinds = {spec.hugging_face.model_type: name for name, spec in models.items()}
    kind = found.get("model_type") if isinstance(found, dict) else None
    if kind not in kinds:
        raise ValueError(
            f"{where} has model_type {kind!r}, which isn't one of {', '.join(kinds)}{nearest(kind, kinds)}"
        )
    return kinds[kind]


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
    found = {key: value for key, value in found.items() if key not in _ROPE_KEYS} | _rope_section(found, where)
    if "rope_scaling" in found and "rope_scaling" not in known.keys:
        raise ValueError(f"{where} has rope_scaling {found['rope_scaling']}, but the model {name} doesn't scale")
    for key, value in known.fixed.items():
        if found.get(key, value) != value and (value or found[key] is not None):  # null stands for false
            raise ValueError(f"{where} has {key} {found[key]!r}, but the model {name} computes with {value!r}")
    names = {key: known.aliases.get(key, key) for key in known.keys}
    section = {key: found[each] for key, name in names.items() for each in (name, _NEWER.get(name)) if each in found}
    dtype = next((found[key] for key in DTYPE_KEYS if found.get(key)), None)
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
        one, other = (_plain(getattr(each, key)) for each in (theirs, config))
        if one != other and key not in _OF_TRAINING:
            raise ValueError(f"{where} has {key} {one}, but model.{key} is {other}: take the model that was saved")


def _rope_section(found, where):
    """The keys `rope_theta` and `rope_scaling` of section `model`, those that are given.

    `transformers` 5 has both in `rope_parameters`; before 4.45, `rope_type` was called `type`.
    """
    theta, scaling = found.get("rope_theta"), None
    for key in _ROPE_KEYS[1:]:
        rope = found.get(key) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"{where} has {key} {rope!r}: it should be a dict by key")
        keys = _given(rope)
        theta, kind = keys.pop("rope_theta", theta), keys.pop("type", "default")
        kind = keys.pop("rope_type", kind)
        if kind == "dynamic":  # `transformers` reads its max_position_embeddings
            keys.pop("original_max_position_embeddings", None)
        if kind != "default":
            scaling = {"rope_type": kind} | keys
    return _given({"rope_theta": theta, "rope_scaling": scaling})


def _given(values):
    """A dict without the keys, nor those of dicts in it, that are None."""
    plain = {key: _given(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in plain.items() if value is not None}


def _plain(value):
    if dataclasses.is_dataclass(value):
        return _given(dataclasses.asdict(value))
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
