"""Writes docs/recipe.md, all keys of a recipe, from the typed sections of `recipe/sections.py`.

python docs/make_recipe.py
"""

import dataclasses
import inspect
import json
import re
import typing
from pathlib import Path

from mindformers_core.models.expert_placement import PlacementSettings
from mindformers_core.models.registry import DEFAULT_MODEL
from mindformers_core.models.rope_scaling import RopeScaling
from mindformers_core.optimizers.settings import OPTIMIZERS, DecaySettings, ParameterGroup
from mindformers_core.recipe.sections import Recipe

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).resolve().parent / "recipe.md"
HEAD = """# All keys of a recipe

Made by `python docs/make_recipe.py` from the typed sections in `recipe/sections.py`; a test holds it to them. A recipe
is a YAML file of these sections; any key can be given on the command line, too: `section.key=value`. Keys without a
default have to be given.
"""


def page():
    """The text of docs/recipe.md."""
    hints = typing.get_type_hints(Recipe)
    sections = [(entry.name, hints[entry.name]) for entry in dataclasses.fields(Recipe) if entry.init]
    sections[[name for name, _ in sections].index("moe")] = "moe.placement", PlacementSettings
    pages = {name: list(_section(name, section)) for name, section in sections}
    pages["model"] += _section("model.rope_scaling", RopeScaling)
    common, names = {entry.name for entry in dataclasses.fields(DecaySettings)}, ", ".join(OPTIMIZERS)
    pages["optimizer"] = [line.replace("| `AdamW` |", f"| {names}, module:Class |") for line in pages["optimizer"]]
    for name, section in [*OPTIMIZERS.items()][1:]:
        title = f"optimizer, type {name}, in the place of betas and eps"
        pages["optimizer"] += [line for line in _section(title, section, common)]
    pages["optimizer"] += _section("optimizer.groups, each entry", ParameterGroup)
    return "\n".join([HEAD, *(line for lines in pages.values() for line in lines)])


def _section(name, section, without=()):
    yield f"## {name}\n\n{(inspect.getdoc(section) or '').partition(chr(10))[0]}\n"
    yield "| key | type | default | range | |\n|---|---|---|---|---|"
    if name == "model":
        page = "see [models.md](models.md)"
        yield f'| `name` | `str` | `"{DEFAULT_MODEL}"` |  | the model: a name, or package.module:Class, {page} |'
    remarks, hints = _remarks(section), typing.get_type_hints(section)
    for entry in dataclasses.fields(section):
        if entry.init and entry.name not in without:
            code = entry.name, _type(hints[entry.name]), _default(entry)
            cells = [*(f"`{text}`" if text else "" for text in code), _range(entry.metadata), remarks[entry.name]]
            yield f"| {' | '.join(cells)} |"
    yield ""


def _remarks(section):
    """Name of a field -> the comment on its line, or else what the docstring's Attributes say of it."""
    classes = [kind for kind in section.__mro__ if dataclasses.is_dataclass(kind)]
    source, found = "\n".join(map(inspect.getsource, classes)), {}
    attributes = (inspect.getdoc(section) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"\n    (?=\S)", f"\n{attributes}"):
        names, _, text = " ".join(entry.split()).partition(": ")
        found |= dict.fromkeys(names.split(", "), text)
    for name in (entry.name for entry in dataclasses.fields(section)):
        comment = re.search(rf"^    {name}:[^#\n]*# (.*)$", source, re.M)
        found[name] = (comment[1] if comment else found.get(name, "")).replace("|", "\\|")
    return found


def _type(hint):
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    return (
        (hint.__name__ if isinstance(hint, type) else str(hint))
        .replace(f"{ParameterGroup.__module__}.", "")
        .replace(f"{RopeScaling.__module__}.", "")
        .replace("typing.", "")
        .replace(" | ", " or ")
    )


def _default(entry):
    if entry.default_factory is not dataclasses.MISSING:
        return json.dumps(entry.default_factory())
    return "" if entry.default is dataclasses.MISSING else json.dumps(entry.default)


def _range(metadata):
    words = {"at_least": "from", "above": "above", "at_most": "to", "below": "below"}
    given = {word: metadata[key] for key, word in words.items() if key in metadata}
    return " ".join(f"{word} {end:,}" if isinstance(end, int) else f"{word} {end:g}" for word, end in given.items())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
