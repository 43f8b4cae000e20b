"""Converts a YAML file and `section.key=value` overrides into a checked `Recipe`, and a `Recipe` into YAML.

The conversion follows the type hints of the dataclasses: a new key needs a field and nothing else.
"""

import dataclasses
import os
import types
import typing
from functools import cache

import yaml

from mindformers_core.checkpoint.hugging_face import model_of, model_section
from mindformers_core.checkpoint.index import CONFIG
from mindformers_core.checkpoint.load import read_json
from mindformers_core.checkpoint.slices import FileLayer
from mindformers_core.components import named_section
from mindformers_core.hints import nearest
from mindformers_core.lazy_exports import import_object
from mindformers_core.models.registry import DEFAULT_MODEL, MODELS, model_spec
from mindformers_core.optimizers.settings import OPTIMIZERS, AdamWSettings, optimizer_base
from mindformers_core.ranges import check_range
from mindformers_core.recipe.checks import check_recipe
from mindformers_core.recipe.learning_rate import SCHEDULES, LrScheduler, ScheduleSettings
from mindformers_core.recipe.sections import Recipe
from mindformers_core.recipe.text import parse_overrides, parse_yaml
from mindformers_core.scopes import errors_at

_COMPONENTS = {  # section whose key `type` names a component -> arguments of `named_section`
    "optimizer": (OPTIMIZERS, optimizer_base, 2, ("learning_rate", "lr")),
    "lr_scheduler": (SCHEDULES, lambda names: ScheduleSettings, 1, ("steps", "tokens")),
}
_OF_A_MACHINE = ("train_dataset.cache_dir",)  # keys that ranks may have different values of


class RecipeError(ValueError):
    """What a recipe says is wrong: YAML, a key, a value, its type, or a combination."""


def load_recipe(path, overrides=()):
    """The `Recipe` of the YAML file at `path`.

    Args:
        path: the file.
        overrides: texts `section.key=value`, the value in YAML.

    Raises:
        FileNotFoundError: no such file.
        RecipeError: not YAML, an unknown or missing key, a value of another type than its key's or out of range, an
            impossible combination.
    """
    with errors_at("", kind=RecipeError):
        sections = _read_sections(path, overrides)
    with errors_at(f"{path}: ", kind=RecipeError):
        recipe = recipe_from_dict(sections)
    if recipe.training.output_dir:
        return recipe
    folder = os.path.join("output", os.path.splitext(os.path.basename(path))[0])
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, output_dir=folder))


def _read_sections(path, overrides):
    try:
        with open(path, encoding="utf-8") as file:
            sections = parse_yaml(file.read(), path)
    except (FileNotFoundError, IsADirectoryError):
        folder = os.path.dirname(path) or "."
        names = os.listdir(folder) if os.path.isdir(folder) else []
        known = sorted(name for name in names if name.endswith((".yaml", ".yml")))
        hint = nearest(os.path.basename(path), known) or (f"; recipes there: {', '.join(known)}" if known else "")
        raise FileNotFoundError(f"there is no recipe file '{path}'{hint}") from None
    if not isinstance(sections, dict):
        raise TypeError(f"{path}: a recipe is a mapping of sections, not {sections!r}")
    for keys, value in parse_overrides(overrides):
        if len(keys) > 1 and keys[0] in sections:  # further keys of a section that is true or false
            sections[keys[0]] = _spelled_out(sections[keys[0]], typing.get_type_hints(Recipe).get(keys[0]))
        _put(sections, keys, value)
    return sections


@errors_at("", kind=RecipeError)
def recipe_from_dict(sections):
    """The checked `Recipe` of nested dicts; errors as in `load_recipe`."""
    kind, sections = _recipe_class(sections)
    recipe = _convert(sections, kind, "")
    check_recipe(recipe)
    if recipe.evaluation.interval:
        held_out = evaluated(recipe)
        try:
            check_recipe(held_out)
        except (TypeError, ValueError) as error:  # checks name the section that the data are in the place of
            text = str(error).replace("train_dataset.", "evaluation.dataset.")
            raise type(error)(text).with_traceback(error.__traceback__) from None
    return recipe


def evaluated(recipe):
    """The recipe with the data of its section `evaluation` in the place of `train_dataset`.

    Raises:
        TypeError, ValueError: a wrong key there; no key, so that it would be the training data; no such metric.
    """
    with errors_at("evaluation.metrics: "):
        for path in recipe.evaluation.metrics:
            import_object(path, "metric")
    if not recipe.evaluation.dataset:
        raise ValueError(
            "evaluation.dataset: missing: training data would be evaluated: give the keys of train_dataset that "
            "differ, as {data_path: [held_out.txt]}"
        )
    kept, origins = _plain(recipe.train_dataset), {"data_path", "sources", "factory"}
    if origins & recipe.evaluation.dataset.keys():
        kept = {key: value for key, value in kept.items() if key not in origins}
    keys = kept | recipe.evaluation.dataset
    section = _convert(keys, type(recipe.train_dataset), "evaluation.dataset")
    return dataclasses.replace(recipe, train_dataset=section)


def _recipe_class(sections):
    """`Recipe`, with the config of the model, the optimizer and the schedule that the sections name, and the sections.

    The model's have no key `name` there.
    """
    with errors_at("model.from: ", ": docs/models.md", (OSError, TypeError, ValueError)):
        sections = _with_model_of(sections)
    model, kinds, name = sections.get("model"), typing.get_type_hints(Recipe), DEFAULT_MODEL
    if isinstance(model, dict):
        name = model.get("name", DEFAULT_MODEL)
        sections = sections | {"model": {key: value for key, value in model.items() if key != "name"}}
    if name != DEFAULT_MODEL:
        with errors_at("model.name: ", ": docs/models.md"):
            kinds["model"] = model_spec(name).config
    chosen = {"model": kinds["model"]}
    for key, given in _COMPONENTS.items():
        value, chosen[key] = sections.get(key), kinds[key]
        if isinstance(value, dict) and "type" in value:
            chosen[key] = named_section(value["type"], f"{key}.type", *given)
    return _recipe_with(name, *chosen.values()), sections


def _with_model_of(sections):
    """The sections with what `model.from`, a folder of `transformers`, says: keys of `model` that aren't given, and
    `checkpoint.load_path`, unless that is given.

    Raises:
        TypeError: no text. FileNotFoundError: no folder, or none with a `config.json`. ValueError: of a kind of model
            that isn't one of `MODELS`, or that computes otherwise.
    """
    model = sections.get("model")
    if not isinstance(model, dict) or "from" not in model:
        return sections
    given, folder = {key: value for key, value in model.items() if key != "from"}, model["from"]
    if not isinstance(folder, str):
        raise TypeError(f"{folder!r} should be a text, the path of a folder with {CONFIG}")
    where = os.path.join(folder, CONFIG)
    if (found := read_json(folder, CONFIG, FileLayer())) is None:
        raise FileNotFoundError(f"there is no file '{where}': give a folder that transformers has saved")
    name = given.get("name") or model_of(MODELS, found, where)
    spec = model_spec(name)
    section = {"name": name} | model_section(spec, name, found, where) | given
    checkpoint = {"load_path": folder} | (sections.get("checkpoint") or {})
    return sections | {"model": section, "checkpoint": checkpoint}


@cache
def _recipe_with(name, model, optimizer, schedule):
    """`Recipe`, for a model of this name, with these dataclasses of sections."""
    if (name, optimizer, schedule) == (DEFAULT_MODEL, AdamWSettings, LrScheduler):
        return Recipe
    entries = [("model", model)]
    for key, section in ("optimizer", optimizer), ("lr_scheduler", schedule):
        entries.append((key, section, dataclasses.field(default_factory=section)))
    return dataclasses.make_dataclass("Recipe", entries, bases=(Recipe,), namespace={"model_name": name}, frozen=True)


def recipe_to_dict(recipe):
    """The whole recipe, defaults included: dicts, lists, texts and numbers."""
    sections = _plain(recipe)
    sections["model"] = {"name": recipe.model_name} | sections["model"]
    return sections


def recipe_to_yaml(recipe):
    """`recipe_to_dict` as YAML text that `load_recipe` reads back."""
    return yaml.safe_dump(recipe_to_dict(recipe), sort_keys=False, allow_unicode=True)


def recipe_keys(recipe):
    """The keys that all ranks have to have alike, with their values: `{"training.seed": 42, …}`."""
    return {key: value for key, value in _leaves("", recipe_to_dict(recipe)) if key not in _OF_A_MACHINE}


def _leaves(path, value):
    if not isinstance(value, dict) or not value:
        return [(path, value)]
    return [leaf for key, entry in value.items() for leaf in _leaves(f"{path}.{key}" if path else key, entry)]


def _put(sections, keys, value):
    for depth, key in enumerate(keys[:-1]):
        if sections.get(key) is None:
            sections[key] = {}
        sections = sections[key]
        if not isinstance(sections, dict):
            raise ValueError(f"'{'.'.join(keys)}': {'.'.join(keys[: depth + 1])} is a value, not a section with keys")
    sections[keys[-1]] = value


def _plain(value):
    if dataclasses.is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value) if entry.init}
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def _convert(value, hint, path):
    """`value` as an instance of `hint`; errors begin with `path`."""
    if dataclasses.is_dataclass(hint):
        return _convert_section(value, hint, path)
    if hint is typing.Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        hints = [argument for argument in arguments if argument is not type(None)]
        return _convert(value, hints[0], path) if len(hints) == 1 else _check_plain(value, hints, path)
    if origin is typing.Literal:
        if any(value == allowed and type(value) is type(allowed) for allowed in arguments):
            return value
        raise ValueError(f"{path}: {value!r} is not one of {', '.join(map(str, arguments))}{nearest(value, arguments)}")
    if origin in (tuple, list):
        return _convert_sequence(value, origin, arguments, path)
    return _check_plain(value, [origin or hint], path)


def _check_plain(value, hints, path):
    """`value` if its type is one of these plain types; a whole number becomes a float for `[float]`."""
    if type(value) in hints:
        return value
    if hints == [float] and type(value) is int:
        return float(value) if abs(value) < 2**1023 else value  # the range refuses what is no float
    *others, last = map(_kind, hints)
    kinds = f"{', '.join(others)} or {last}" if others else last
    raise TypeError(f"{path}: {value!r} ({_show(type(value))}) should be {kinds}")


def _spelled_out(value, section):
    """A dict with the key `switch` of a section for true and false, the short form of the section; others as given."""
    switch = getattr(section, "switch", None)
    return {switch: value} if switch and isinstance(value, bool) else value


def _convert_section(value, section, path):
    value = _spelled_out({} if value is None else value, section)
    page = f": {section.page}" if hasattr(section, "page") else ""
    if not isinstance(value, dict):
        short = "true, false or " if hasattr(section, "switch") else ""
        keys = ", ".join(entry.name for entry in dataclasses.fields(section)[:4])
        raise TypeError(f"{path}: {value!r} should be {short}a section with keys, as {keys}{page}")
    hints = typing.get_type_hints(section)
    fields = {entry.name: entry for entry in dataclasses.fields(section) if entry.init}
    prefix, parts = f"{path}." if path else "", {}
    for key in value:
        if key not in fields:
            kind, hint = ("key", nearest(key, fields)) if path else ("section", _section_hint(key, fields))
            raise ValueError(f"{prefix}{key}: unknown {kind}{hint}; known: {', '.join(fields)}{page}")
    for name, entry in fields.items():
        if name in value:
            as_given = entry.metadata.get("as_given")  # the section checks its forms itself
            with errors_at("", entry.metadata.get("remark", "")):
                parts[name] = value[name] if as_given else _convert(value[name], hints[name], prefix + name)
            check_range(parts[name], entry.metadata, prefix + name)
        elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            raise ValueError(f"{prefix}{name}: missing; it is a {_show(hints[name])} and has no default")
    with errors_at(prefix):  # a section's own check: its message begins with the key
        return section(**parts)


def _section_hint(name, known):
    """The hint for an unknown section: one or two sections with a key of its name, or else the nearest section."""
    hints = typing.get_type_hints(Recipe)
    paths = [f"'{each}.{name}'" for each in hints if name in getattr(hints[each], "__dataclass_fields__", ())]
    return f" (did you mean {' or '.join(paths)}?)" if 0 < len(paths) <= 2 else nearest(name, known)


def _convert_sequence(value, origin, arguments, path):
    several = origin is list or arguments[-1] is ...
    if several and arguments[0] is str and isinstance(value, str):
        value = [value]  # one path or pattern needs no brackets
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{path}: {value!r} should be a list of {_show(arguments[0])}")
    if not several and len(value) != len(arguments):
        raise ValueError(f"{path}: {value!r} should have {len(arguments)} entries, not {len(value)}")
    hints = [arguments[0]] * len(value) if several else arguments
    return origin(_convert(entry, hint, f"{path}[{index}]") for index, (entry, hint) in enumerate(zip(value, hints)))


def _kind(hint):
    """A plain type in words."""
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    kinds |= {dict: "a mapping", list: "a list"}
    return kinds.get(hint) or f"a {_show(hint)}, which no YAML value is: declare the field as a plain type"


def _show(hint):
    return getattr(hint, "__name__", None) or str(hint)
