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


RECOMPUTE_ERRORS = [
    ({"full": 3}, TypeError, "full: 3 should be true for all layers, a list of layer numbers, as [0, 3], or ranges of"),
    ({"full": [True]}, TypeError, "full: [True] should be true for all layers, a list of"),
    ({"full": [-1]}, ValueError, "full: '-1' is neither a number from 0 to 99999 nor a range: give true for all"),
    ({"full": []}, ValueError, "full: [] has no layer in it: give true for all layers"),
    ({"full": "0-"}, ValueError, "full: '0-' is neither"),
    ({"full": "true"}, ValueError, "full: 'true' is neither a number from 0 to 99999 nor a range: give true for all"),
    ({"full": "0-1000000"}, ValueError, "full: '0-1000000' is neither"),
    ({"full": "1, 7-5"}, ValueError, "full: the range '7-5' ends before it begins: write 5-7"),
    ({"full": [3, 4, 4]}, ValueError, "full: [3, 4, 4] gives a layer twice"),
    ({"select": 3}, TypeError, "select: 3 should be a pattern, or a list of patterns, as ['layers.0-7.mlp']"),
    ({"exclude": False}, TypeError, "exclude: False should be a pattern, or a list of patterns, as"),
    ({"full": (2, 1)}, ValueError, "full: (2, 1) should be in ascending order, [1, 2]"),
    ({"select": ["a", 3]}, TypeError, "select[1]: 3 should be a pattern, a text as 'layers.0-7.mlp'"),
    ({"select": ["a", " "]}, ValueError, "select[1]: ' ' is an empty pattern: it should name a Cell or an operator"),
    ({"exclude": "*.cast"}, ValueError,
        "exclude: ['*.cast'] is about what is recomputed, but nothing is: give fu"),
    ({"mp_comm_recompute": False}, ValueError,
        "mp_comm_recompute: False is about what is recomputed, but nothing is: give full, select or budget, or leave"),
    ({"parallel_optimizer_comm_recompute": False}, ValueError,
        "parallel_optimizer_comm_recompute: False is about what is recomputed, but nothing is"),
    ({"full": True, "mp_comm_recompute": None}, TypeError,
        "mp_comm_recompute: None (NoneType) should be true or false"),
    ({"parallel_optimizer_comm_recompute": 1}, TypeError,
        "parallel_optimizer_comm_recompute: 1 (int) should be true or false"),
    ({"budget": "0.5"}, TypeError, "budget: '0.5' (str) has to be a number above 0 and at most 1: the part of"),
    ({"budget": 0}, ValueError, "budget: 0 has to be a number above 0 and at most 1: the part"),
    ({"budget": 1.01}, ValueError, "budget: 1.01 has to be a number above 0 and at most 1"),
    ({"budget": float("nan")}, ValueError, "budget: nan has to be a number above 0"),
    ({"budget": 0.5, "full": [0, 1]}, ValueError,
        "budget: 0.5 chooses what is recomputed, but full says it, too ([0, 1]): give one of the two; exclude"),
    ({"budget": 0.5, "select": "a"}, ValueError,
        "budget: 0.5 chooses what is recomputed, but select says it, too (['a'])"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "message"), RECOMPUTE_ERRORS, ids=[str(e[0]) for e in RECOMPUTE_ERRORS])
def test_wrong_recompute_settings(given, kind, message):
    with pytest.raises(kind) as caught:
        RecomputeSettings(**given)
    assert message in str(caught.value)


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


SWAP_ERRORS = [
    ({"swap": 1}, TypeError, "swap: 1 (int) should be true or false"),
    ({"default_prefetch": 0}, ValueError, "default_prefetch: 0 should be at least 1 and at most 1000000"),
    ({"default_prefetch": 1.0}, TypeError, "default_prefetch: 1.0 (float) should be a whole number of tensors"),
    ({"default_prefetch": True}, TypeError, "default_prefetch: True (bool) should be a whole number"),
    ({"default_prefetch": 4}, ValueError,
        "default_prefetch: 4 is given, but nothing to swap: give swap=true, layer_swap or op_swap"),
    ({"layer_swap": "0-3"}, TypeError, "layer_swap: '0-3' should be given as [{layers: 0-3, backward_prefetch: 2}]"),
    ({"layer_swap": {"layers": True}}, TypeError, "layer_swap: {'layers': True} should be given as [{layers: 0-3, "),
    ({"layer_swap": [3]}, TypeError, "layer_swap[0]: 3 should be a mapping with layers, backward_prefetch; layer_swap"),
    ({"layer_swap": [{}]}, ValueError, "layer_swap[0].layers: missing; layer_swap is given as"),
    ({"layer_swap": [{"layer": [0]}]}, ValueError,
        "layer_swap[0].layer: unknown key (did you mean 'layers'?); layer_swap is given as"),
    ({"layer_swap": [{"layers": None}]}, ValueError, "layer_swap[0].layers: None means no layer: leave the entry out"),
    ({"layer_swap": [{"layers": [0]}, {"layers": "1-x"}]}, ValueError, "layer_swap[1].layers: '1-x' is neither"),
    ({"layer_swap": [{"layers": [2, 0]}]}, ValueError, "layer_swap[0].layers: [2, 0] should be in ascending order, [0"),
    ({"layer_swap": [{"layers": [0], "backward_prefetch": 0}]}, ValueError,
        "layer_swap[0].backward_prefetch: 0 should"),
    ({"layer_swap": [{"layers": [0], "backward_prefetch": "2"}]}, TypeError,
        "layer_swap[0].backward_prefetch: '2' (str) should"),
    ({"op_swap": "*.cast"}, TypeError, "op_swap: '*.cast' should be given as {'*.mlp': true, '*.cast': {layers: 0-3"),
    ({"op_swap": ["*.cast"]}, TypeError, "op_swap[0]: '*.cast' should be a mapping with op_name, layers, backward"),
    ({"op_swap": [{"*.mlp": True}]}, ValueError, "op_swap[0].*.mlp: unknown key; op_swap is given as"),
    ({"op_swap": [{"layers": [0]}]}, ValueError, "op_swap[0].op_name: missing; op_swap is given as"),
    ({"op_swap": [{"op_nam": "a"}]}, ValueError, "op_swap[0].op_nam: unknown key (did you mean 'op_name'?)"),
    ({"op_swap": [{"op_name": ""}]}, ValueError, "op_swap[0].op_name: '' is an empty pattern"),
    ({"op_swap": {"layers": "0-1"}}, TypeError, "op_swap['layers']: '0-1' should be a mapping with layers, backward"),
    ({"op_swap": {"a": {"layers": [2, 0]}}}, ValueError, "op_swap['a'].layers: [2, 0] should be in ascending order, "),
    ({"op_swap": {3: True}}, TypeError, "op_swap[3].op_name: 3 should be a pattern"),
    ({"op_swap": {"a": False}}, TypeError, "op_swap['a']: False should be a mapping with layers, backward_prefetch"),
    ({"op_swap": {"a": {"op_name": "b"}}}, ValueError,
        "op_swap['a'].op_name: unknown key; op_swap is given as"),
    ({"op_swap": {"a": {"layers": False}}}, ValueError,
        "op_swap['a'].layers: False means no layer: leave the entry out"),
    ({"op_swap": {"a": {"backward_prefetch": -1}}}, ValueError,
        "op_swap['a'].backward_prefetch: -1 should be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "message"), SWAP_ERRORS, ids=[str(error[0]) for error in SWAP_ERRORS])
def test_wrong_swap_settings(given, kind, message):
    with pytest.raises(kind) as caught:
        SwapSettings(**given)
    assert message in str(caught.value)
