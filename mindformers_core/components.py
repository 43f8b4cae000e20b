"""What the parts of a job promise each other, and parts that a recipe names by import path. Pure Python."""

import copy
import dataclasses
import inspect
from typing import Any, Literal, Protocol, get_type_hints

from mindformers_core.hints import nearest
from mindformers_core.lazy_exports import import_object
from mindformers_core.scopes import errors_at

_PAGES = {"optimizer": "docs/optimizers.md", "lr_scheduler": "docs/optimizers.md"}


class Stateful(Protocol):
    """What goes on in a resumed run where it was: `restore(state())` of another object makes both equal."""

    def state(self):
        """All that changes from step to step, in a dict that JSON can hold, alike on all ranks."""

    def restore(self, state):
        """Take such a dict."""


class Optimizer(Protocol):
    """Updates parameters in place, in PyNative and compiled; a Cell, made by `Class(parameters, **settings)`.

    `parameters` are this rank's Parameters of one group: parts, with `layout` (a `Layout`) and `global_shape` where
    they are distributed. An update that isn't element by element has to ask the ranks that hold the other parts.
    Its Parameters besides these are its state, which checkpoints hold. One that lies as its parameter does is called as
    that with words before it, as "moment.layers.0.weight"; others are alike on all ranks.
    """

    def scalars(self, step, learning_rate):
        """What changes from step to step, a tuple of scalar tensors, for the step of this number, from 1 on.

        Without this method, the tuple is the learning rate alone.
        """

    def __call__(self, gradients, *scalars):
        """One step: a tuple of local gradients, final, in the order of the parameters."""


class LearningRate(Protocol):
    """The rate of every step; a function `f(step, **settings)`, or a class, `Class(**settings)(step)`.

    Its parameters `steps` and `tokens`, if it has them, get `training.steps`, and the tokens of a step of all ranks.
    """

    def __call__(self, step):
        """The rate, a float, of the step of this number, from 1 on: the same on all ranks and in a resumed run."""


class Stream(Protocol):
    """Samples by index; what `train_dataset.factory` returns."""

    def batch(self, first, count):
        """The samples from index `first` on: a tuple of arrays with `count` rows, the same at every call."""


class Metric(Protocol):
    """What `evaluation.metrics` names by import path: a class, one object of which is made for each evaluation."""

    def update(self, results, samples):
        """Add what forward passes gave together: a tuple of the model's scalar results, floats that are the same on all
        ranks, and the number of samples. Of a model whose loss is a sum, results are sums over these samples.
        """

    def compute(self):
        """The metrics: a dict, name -> number; "eval_" comes before each name."""


def named_section(name, key, known, base, first, given):
    """The dataclass of the section of a recipe whose key `key` names a component.

    Args:
        name: a key of `known`, or an import path, "package.module:Name".
        key: as "optimizer.type", for errors.
        known: name -> dataclass.
        base: function of the names of a component's settings: the dataclass of the keys that it has besides.
        first: the place of the first parameter that is a setting, 1 for a function of one argument; `self` counts.
        given: names of further parameters that aren't settings.

    Raises:
        TypeError, ValueError: not a text, no such component.
    """
    page = _PAGES[key.partition(".")[0]]
    if isinstance(name, str) and name in known:
        return known[name]
    if not isinstance(name, str) or ":" not in name:
        kind = ValueError if isinstance(name, str) else TypeError
        hint = nearest(name, known) if isinstance(name, str) else ""
        raise kind(f"{key}: {name!r} is not one of {', '.join(known)}, or package.module:Name{hint}: {page}")
    component = import_object(name, key)
    if not callable(component):
        raise TypeError(f"{key}: {name} is {component!r}: it should be a class or a function: {page}")
    with errors_at(f"{key}: {name}: ", kinds=(NameError, TypeError, ValueError)):  # annotations that nothing has
        own = _settings(component, first, given)
    kind = base([entry[0] for entry in own])
    entries = [("type", Literal[name], dataclasses.field(default=name)), *own]
    checked = getattr(component, "settings_class", None)
    namespace = {} if checked is None else {"__post_init__": lambda self: _checked(self, checked, kind)}
    return dataclasses.make_dataclass(
        kind.__name__, entries, bases=(kind,), namespace=namespace, frozen=True, kw_only=True
    )


def _checked(section, settings, kind):
    """The checks of a component's dataclass of settings, and those of the section."""
    settings(**{entry.name: getattr(section, entry.name) for entry in dataclasses.fields(settings)})
    if hasattr(kind, "__post_init__"):
        kind.__post_init__(section)


def _settings(component, first, given):
    """`(name, type, field)` of the settings of a component.

    They are the fields of its `settings_class`, a dataclass, or its parameters from place `first` on, without those
    `given`; a type is the annotation, or else that of the default.
    """
    settings = getattr(component, "settings_class", None)
    if settings is not None:
        hints = get_type_hints(settings)
        return [(each.name, hints[each.name], copy.copy(each)) for each in dataclasses.fields(settings) if each.init]
    function = _written(component.__init__ if isinstance(component, type) else component)
    hints, entries = get_type_hints(function), []
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.name not in given and place >= first:
            default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
            hint = hints.get(parameter.name) or _type_of(default)
            make = {"default": default} if default.__hash__ else {"default_factory": lambda value=default: value}
            entries.append((parameter.name, hint, dataclasses.field(hash=False, **make)))
    return entries


def _written(function):
    """The function behind a decorator that hides its parameters, as that of MindSpore's optimizers does."""
    parameters = inspect.signature(function).parameters.values()
    inner = [cell.cell_contents for cell in function.__closure__ or () if inspect.isfunction(cell.cell_contents)]
    hides = not any(each.kind is each.POSITIONAL_OR_KEYWORD for each in list(parameters)[1:])
    return _written(inner[0]) if hides and inner else function


def _type_of(default):
    """The type that a default has: any where there is none."""
    if default is None or default is dataclasses.MISSING:
        return Any
    if isinstance(default, tuple):
        return tuple[tuple(map(_type_of, default))] if default else tuple[Any, ...]
    return int | float if type(default) is int else type(default)
