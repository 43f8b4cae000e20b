"""What is pasted in from recipes of MindSpore Transformers, or written too short: the error says what it is here."""

import pytest
from test_recipe import TINY

from mindformers_core.recompute.expression_dicts import patterns_of
from mindformers_core.trainer.recipe_loader import load_recipe


@pytest.mark.parametrize(
    ("given", "patterns"),
    [
        ({".*mlp": True, ".*mlp.*": True}, ["*.mlp"]),
        ({r".*\.norm": True}, ["*norm"]),
        ({".*norm": "0-1,3"}, ["layers.0-1,3.*norm"]),
        ({".*self_attn|.*mlp": [0]}, ["layers.0.self_attn", "layers.0.mlp"]),
        ({r"layers\.\d+\.mlp": [1], r"model\.layers\..*\.mlp": [1]}, ["layers.1.mlp"]),
        ({r"layers\.0\.mlp": True, ".model": True}, ["layers.0.mlp", ".model"]),
        ({r"layers\.0\.mlp": [0]}, None),
        ({"a": False, "b": None}, []),
        ({"a": "x"}, None),
        ({".*": True}, None),
        ({r"(a)?b": True}, None),
        ({3: True}, None),
    ],
)
def test_dicts_of_expressions_as_patterns(given, patterns):
    assert patterns_of(given) == patterns


ERRORS = [
    (["recompute.recompute=false"], ValueError, "recompute.recompute: unknown key (here it is called 'full', and a"),
    (["recompute.mode=null"], ValueError, "recompute.mode: unknown key (leave it out: null asks for nothing)"),
    (["recompute.select_comm_recompute=false"], ValueError, "unknown key (leave it out: false asks for nothing)"),
    (["recompute_comm=null"], ValueError, "recompute_comm: unknown section (leave it out: null asks for nothing)"),
    (
        ["swap.enable=false"],
        ValueError,
        "swap.enable: unknown key (here it is called 'swap'); known: swap, default_pre",
    ),
    (
        ["recompute.select_comm_recompute_exclude=a"],
        ValueError,
        "unknown key (here exclude names collectives, too, as '*.all_gather')",
    ),
    (["recompute=full"], TypeError, "select, exclude, mp_comm_recompute; write recompute: {full: true}"),
    (["recompute=0-3"], TypeError, "; write recompute: {full: 0-3}"),
    (["recompute='0,3'"], TypeError, "; write recompute: {full: '0,3'}"),
    (["recompute=[0, 1]"], TypeError, "; write recompute: {full: [0, 1]}"),
    (["recompute=3"], TypeError, "; write recompute: {full: [3]}"),
    (["recompute=0.5"], TypeError, "; write recompute: {budget: 0.5}"),
    (["recompute='true'"], TypeError, "; write recompute: true, without quotes"),
    (["recompute='off'"], TypeError, "; write recompute: false, without quotes"),
    (["swap='true'"], TypeError, "; write swap: true, without quotes"),
    (["swap=0-1"], TypeError, "; write swap: {layer_swap: [{layers: 0-1}]}"),
    (["swap=all"], TypeError, "; write swap: {layer_swap: [{layers: true}]}"),
]


@pytest.mark.parametrize(("overrides", "kind", "message"), ERRORS, ids=[error[0][0] for error in ERRORS])
def test_mistakes(overrides, kind, message):
    with pytest.raises(kind) as caught:
        load_recipe(TINY, overrides)
    assert message in str(caught.value)


WRITTEN = ["true", "false", "{full: true}", "{full: 0-3}", "{full: '0,3'}", "{full: [3]}", "{budget: 0.5}"]


@pytest.mark.parametrize("value", WRITTEN)
def test_what_is_to_be_written_can_be(value):
    load_recipe(TINY, [f"recompute={value}"])
