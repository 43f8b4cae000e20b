"""A recipe that names a model of one's own: which configs it takes, and what it can't be."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_recipe import TINY

from mindformers_core.models import ModelSpec
from mindformers_core.recipe.loader import RecipeError, load_recipe, recipe_to_yaml


@dataclass(frozen=True)
class Config:
    """Fields of many types, and one that follows from the others."""

    sizes: tuple[int, ...] = (4, 8)
    rates: dict[str, float] = field(default_factory=dict)
    label: str = "mlp"
    count: int = field(default=0, init=False)

    def __post_init__(self):
        object.__setattr__(self, "count", len(self.sizes))


@dataclass(frozen=True)
class Named:
    """Its name would be the model's."""

    name: str = "mlp"


@dataclass(frozen=True)
class Odd:
    """A field that no YAML value is."""

    made: SimpleNamespace = None


class Net:
    config_class = Config


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """The module that the recipes name."""
    names = {"Net": Net, "NAMED": ModelSpec(Net, Named), "ODD": ModelSpec(Net, Odd)}
    names |= {"STAGED": ModelSpec(Net, Config, inputs=("x",), boundary=lambda *_: None)}
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(**names))


def own(tmp_path, name, *overrides):
    """The recipe of the tiny one with another model."""
    head = (tmp_path / "own.yaml", "train_dataset.factory=own:open", *overrides)
    text = Path(TINY).read_text(encoding="utf-8")
    head[0].write_text(text[: text.index("\nmodel:")] + f"\nmodel: {{name: '{name}'}}\n")
    return load_recipe(str(head[0]), head[1:])


def test_a_config_is_read_and_written(tmp_path):
    recipe = own(tmp_path, "own:Net", "model.sizes=[1,2,3]", "model.rates={a: 0.5}")
    assert (recipe.model.sizes, recipe.model.rates, recipe.model.count) == ((1, 2, 3), {"a": 0.5}, 3)
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(recipe))
    again = load_recipe(str(tmp_path / "again.yaml"))
    assert again.model == recipe.model and again.model_name == "own:Net"


@pytest.mark.parametrize(
    ("name", "overrides", "kind", "message"),
    [
        ("own:NAMED", (), ValueError, "own:NAMED: its config has a field 'name', which in a recipe is that of the"),
        ("own:Net", ("model.sizez=[1]",), ValueError, "model.sizez: unknown key (did you mean 'sizes'?)"),
        ("own:Net", ("model.sizes=[a]",), RecipeError, "model.sizes[0]: 'a' (str) should be a whole number"),
        ("own:ODD", ("model.made=3",), RecipeError, "model.made: 3 (int) should be a SimpleNamespace, which no YAML"),
        ("own:Net", ("parallelism.pipeline_parallel=2",), ValueError, "no boundary and no inputs and no config with"),
        ("own:STAGED", ("parallelism.pipeline_parallel=2",), ValueError, "has no config with num_hidden_layers"),
    ],
)
def test_what_cannot_be(tmp_path, name, overrides, kind, message):
    with pytest.raises(kind) as caught:
        own(tmp_path, name, *overrides)
    assert message in str(caught.value)
