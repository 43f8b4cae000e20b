"""What a budget chooses in a Llama: cheap operators first, and never more bytes for more work than a choice by hand."""

import pytest
from support.captured_models import small_llama
from support.planned_models import COUNTING, captured

from mindformers_core.analysis.forward_seconds import forward_seconds
from mindformers_core.analysis.prediction import Prediction
from mindformers_core.mesh import init_device_mesh
from mindformers_core.program.plan import operators_in_order
from mindformers_core.program.producers import links_of
from mindformers_core.propagation.propagate import propagate
from mindformers_core.recompute.budget import choice_within
from mindformers_core.recompute.selection import NamedProgram
from mindformers_core.recompute.settings import RecomputeSettings

LAYERS = ("model.layers.0", "model.layers.1")
SCORES = [f"*.core_attention.{name}" for name in ("MatMul[0]", "scores", "Add", "weights")]
WITHOUT_GAIN = ("softmax", "scores")  # softmax takes as many bytes as it gives; of 8 words there are few scores
BY_HAND = {
    "softmax": {"select": "*.softmax"},
    "scores": {"select": SCORES},
    "core attention": {"select": "*.core_attention"},
    "attention": {"select": "*.self_attn"},
    "norms": {"select": "*.*norm"},
    "mlp": {"select": "*.mlp"},
    "silu": {"select": "*.silu"},
    "full": {"full": True},
}


@pytest.fixture(scope="module")
def llama():
    """A plan, its `Prediction`, and what every instruction costs."""
    model, make = small_llama()
    args, named = make(1)
    found = captured(model.set_train(), init_device_mesh((1,), ("tp",)), args, named)
    plan = propagate(*found, COUNTING)  # by CPU the launch is nearly all that such small operators take
    return plan, Prediction(plan), {place.key: forward_seconds(place) for place in operators_in_order(plan)}


def test_cheap_operators_go_first(llama):
    """Products, what layers return and what gradients don't need stay."""
    plan, prediction, prices = llama
    places = {place.key: place for place in operators_in_order(plan)}
    choice = choice_within(RecomputeSettings(budget=0.5), NamedProgram(plan))
    assert choice.saved_bytes == prediction.saved_bytes(choice.dropped) <= choice.all_bytes / 2
    assert choice.seconds == sum(map(prices.get, prediction.recomputed(choice.dropped))) < 0.1 * choice.forward_seconds
    names = {f"{places[key].path}.{places[key].entry.node.operator}" for key in choice.dropped}
    assert {f"{layer}.mlp.{operator}" for layer in LAYERS for operator in ("SiLU", "Mul")} <= names
    assert not any(name.endswith("MatMulExt") or "mlp." in name and "Dense" in name for name in names)
    assert not choice.dropped & links_of(plan).results


@pytest.mark.parametrize("name", BY_HAND)
def test_no_worse_than_by_hand(llama, name):
    plan, prediction, prices = llama
    layers = {number: [path] for number, path in enumerate(LAYERS)}
    dropped = frozenset(NamedProgram(plan, layers=layers).recomputed(RecomputeSettings(**BY_HAND[name])))
    nbytes, seconds = prediction.saved_bytes(dropped), sum(map(prices.get, prediction.recomputed(dropped)))
    whole = prediction.saved_bytes()
    assert seconds > 0 and (nbytes < whole) == (name not in WITHOUT_GAIN)
    choice = choice_within(RecomputeSettings(budget=min(1, nbytes / whole)), NamedProgram(plan))
    assert choice.saved_bytes <= nbytes and choice.seconds <= seconds * (1 + 1e-6)
