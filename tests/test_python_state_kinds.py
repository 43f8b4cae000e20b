"""Kinds of Python state of which a change is seen; one card is the truth. See test_python_state.py."""

import sys
from dataclasses import astuple, dataclass
from types import ModuleType

import numpy as np
import pytest
from mindspore import Tensor
from test_python_state import Base, Body, X, number, pair


class Slotted:
    __slots__ = ("slot",)


class Inherits(Slotted):
    __slots__ = ("other",)


class Sizes(list):
    """A list with an attribute."""

    def __init__(self, value=1.0):
        super().__init__([1.0])
        self.extra = value


class Kinds(type):
    of_kinds = 1.0


class Deeper(Base, metaclass=Kinds):
    """Inherits all that it has."""


@dataclass
class Numbers:
    first: float = 1.0


def not_set_yet(is_set=False):
    if is_set:
        factor = 1.0

    def scale():
        try:
            return factor
        except NameError:
            return 1.0

    def change(value):
        nonlocal factor
        factor = value

    return scale, change


def imported():
    from of_the_user import factor  # noqa: PLC0415

    return factor


SLOTS, SIZES, NUMBERS_OF, BYTES, OBJECTS = Inherits(), Sizes(), Numbers(), bytearray(1), np.array([Numbers()], object)
SLOTS.slot = 1.0
VIEW, (SCALE, SET_FACTOR) = memoryview(BYTES), not_set_yet()
OTHERS = {
    "list's attribute": (lambda: SIZES.extra, lambda value: setattr(SIZES, "extra", value)),
    "equal list": (lambda: SIZES.extra, lambda value: globals().update(SIZES=Sizes(value))),
    "inherited slot": (lambda: SLOTS.slot, lambda value: setattr(SLOTS, "slot", value)),
    "class of a class": (lambda: Deeper.of_kinds, lambda value: setattr(Kinds, "of_kinds", value)),
    "in place of the base's": (lambda: Deeper.of_root(), lambda value: setattr(Deeper, "root", value)),
    "dataclass": (lambda: astuple(NUMBERS_OF)[0], lambda value: setattr(NUMBERS_OF, "first", value)),
    "memoryview": (lambda: VIEW[0], lambda value: BYTES.__setitem__(0, int(4 * value))),
    "object array": (lambda: OBJECTS[0].first, lambda value: setattr(OBJECTS[0], "first", value)),
    "set later": (lambda: SCALE(), lambda value: SET_FACTOR(value)),
    "own import": (imported, lambda value: setattr(sys.modules["of_the_user"], "factor", value)),
    "other code": (lambda: coded(), lambda value: setattr(coded, "__code__", compile(f"{value}", "<a>", "eval"))),
}


def coded():
    return 1.0


@pytest.mark.parametrize("place", OTHERS)
def test_what_else_may_change(place, monkeypatch):
    module = ModuleType("of_the_user")
    module.factor, module.__file__ = 1.0, __file__
    monkeypatch.setitem(sys.modules, "of_the_user", module)
    read, change = OTHERS[place]
    net, single = pair(Body, lambda cell, x: cell.fc(x).mean() * read())
    for value in (None, 1.25, 1.5):
        if value is not None:
            change(value)
        assert number(net(Tensor(X))) == pytest.approx(number(single(Tensor(X))), rel=1e-6)
