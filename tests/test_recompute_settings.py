"""Settings of recompute and swap: every form that is taken, and an error that says what would be, for every other."""

import dataclasses

import pytest

from mindformers_core.recompute.settings import (
    DEFAULT_OP_SWAP,
    LayerSwap,
    OperatorSwap,
    RecomputeSettings,
    SwapSettings,
)


def test_defaults_ask_for_nothing():
    assert RecomputeSettings() == RecomputeSettings(None, (), (), True, None, None)
    assert SwapSettings() == SwapSettings(False, 1, (), ())
    assert not RecomputeSettings().is_on and not SwapSettings().is_on


@pytest.mark.parametrize(
    "given", [{"full": True}, {"full": [0]}, {"select": "a"}, {"budget": 1}, {"budget": 0.5, "exclude": "*.cast"}]
)
def test_any_choice_is_on(given):
    assert RecomputeSettings(**given).is_on
    off = RecomputeSettings(full=False, mp_comm_recompute=False, parallel_optimizer_comm_recompute=False)
    assert not off.is_on and dataclasses.replace(off, select=None) == off


@pytest.mark.parametrize(
    "flags",
    [
        {"exclude": ["a"]},
        {"mp_comm_recompute": False},
        *({"parallel_optimizer_comm_recompute": f} for f in (True, False)),
    ],
)
def test_switched_off_whatever_the_flags_say(flags):
    off = RecomputeSettings(full=False, **flags)
    assert not off.is_on and dataclasses.replace(off) == off


def test_one_form_of_recompute_settings():
    given = RecomputeSettings(full="0-2", select="layers.*.mlp", exclude=["*.cast", "x"], mp_comm_recompute=False)
    assert given == RecomputeSettings((0, 1, 2), ("layers.*.mlp",), ("*.cast", "x"), False)
    assert dataclasses.replace(given, select=None).select == ()
    hash(given)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        (None, None),
        (False, False),
        (True, True),
        ("0-7", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("0,3,5-7", (0, 3, 5, 6, 7)),
        ([0, 3], (0, 3)),
        (["5-7", 0], (0, 5, 6, 7)),
        (["0-3", "5"], (0, 1, 2, 3, 5)),
        ([9, "0-1,4"], (0, 1, 4, 9)),
    ],
)
def test_forms_of_layer_numbers(given, numbers):
    found = RecomputeSettings(full=given).full
    assert found == numbers and type(found) is type(numbers)


def test_layers_to_swap():
    given = [{"layers": "0-1", "backward_prefetch": 20}, {"layers": [3]}, {"layers": [5], "backward_prefetch": None}]
    settings = SwapSettings(layer_swap=given, default_prefetch=7)
    assert settings.layer_swap == (LayerSwap((0, 1), 20), LayerSwap((3,), 7), LayerSwap((5,), 7))
    assert settings.is_on and settings.swap is True and settings.op_swap == ()
    assert SwapSettings(layer_swap=[{"layers": True}]).layer_swap == (LayerSwap(True, 1),)


def test_operators_to_swap_in_both_forms():
    listed = [{"op_name": "attention", "backward_prefetch": 20, "layers": [0, 1]}, {"op_name": "*.cast"}]
    named = {"attention": {"backward_prefetch": 20, "layers": "0-1"}, "*.cast": True}
    expected = (OperatorSwap("attention", (0, 1), 20), OperatorSwap("*.cast", True, 4))
    for given in (listed, named, expected):
        settings = SwapSettings(op_swap=given, default_prefetch=4)
        assert settings.op_swap == expected and settings.is_on
        assert dataclasses.replace(settings) == settings
    assert SwapSettings(op_swap={"layers": True}).op_swap == (OperatorSwap("layers", True, 1),)  # named like a key


def test_swap_alone_is_attention_and_false_is_nothing():
    settings = SwapSettings(swap=True, default_prefetch=10)
    assert settings.op_swap == (OperatorSwap(DEFAULT_OP_SWAP, True, 10),) and settings.layer_swap == ()
    assert SwapSettings(swap=True, layer_swap=[{"layers": [0]}]).op_swap == ()
    assert not SwapSettings(swap=False, layer_swap=[{"layers": [0]}]).is_on
    assert not SwapSettings(swap=False, default_prefetch=10).is_on
    assert not SwapSettings(layer_swap=[], op_swap={}).is_on and not SwapSettings(None, 1, None, None).is_on
