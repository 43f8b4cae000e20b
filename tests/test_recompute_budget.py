"""What is computed again within a budget: close to the best of all subsets, alike in all layers, and well explained."""

import random
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from support.captured_models import small_llama
from support.nightly import daily
from support.planned_models import COUNTING, captured

from mindformers_core.analysis.forward_seconds import forward_seconds
from mindformers_core.analysis.prediction import Prediction
from mindformers_core.layout import bind_layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.program.graph import CallNode, CellGraph, OperatorNode
from mindformers_core.program.plan import CallPlan, CellPlan, OperatorPlan, operators_in_order
from mindformers_core.program.producers import links_of
from mindformers_core.program.structure import Value
from mindformers_core.propagation.propagate import propagate
from mindformers_core.recompute.budget import choice_within, choose, described
from mindformers_core.recompute.curve import curve_picture
from mindformers_core.recompute.minimum_cut import minimum_cost_closure
from mindformers_core.recompute.selection import NamedProgram
from mindformers_core.recompute.settings import RecomputeSettings

MESH = init_device_mesh((1,), ("tp",))
ROW = bind_layout(layout(), MESH, 1)
SVG = "{http://www.w3.org/2000/svg}"


def plan_of(steps, sizes, path=""):
    """A `CellPlan`.

    Args:
        steps: for every instruction the numbers of those whose results it takes (-1: the argument), or the `CellPlan`
            of a layer, which takes the result before.
        sizes: for every instruction the bytes of its result.
        path: of the Cell.
    """
    values = [Value(number, (size // 4,), "float32", "") for number, size in enumerate((4, *sizes))]
    plans = []
    for number, step in enumerate(steps):
        made = values[number + 1]
        if isinstance(step, CellPlan):
            node = CallNode(f"layers.{number}", (values[number],), {}, made, step.graph, "here:1")
            plans.append(CallPlan(node, (ROW,), (ROW,), step))
        else:
            taken = tuple(values[maker + 1] for maker in step)
            node = OperatorNode("Any", "function", taken, {}, made, None, None, "here:1")
            plans.append(OperatorPlan(node, None, (ROW,) * len(taken), (ROW,), {}))
    graph = CellGraph(path, "Any", 0, True, False, {"x": values[0]}, tuple(plan.node for plan in plans), values[-1])
    return CellPlan(graph, MESH, dict.fromkeys(range(len(values)), ROW), tuple(plans), (ROW,))


class Model:
    """What a program saves and computes again, told by tables: key -> producers, bytes, seconds; needed; views."""

    def __init__(self, producers, sizes, prices, needed, views=()):
        self.producers, self.sizes, self.prices, self.needed = producers, sizes, prices, frozenset(needed)
        self.memory = {}
        for key in producers:
            self.memory[key] = self.memory[producers[key][0]] if key in views else key

    def recomputed(self, dropped):
        found, waiting = set(), [key for key in dropped if key in self.needed]
        while waiting:
            key = waiting.pop()
            if key not in found:
                found.add(key)
                waiting += [maker for maker in self.producers[key] if maker in dropped]
        return found

    def saved_bytes(self, dropped):
        return sum(map(self.sizes.get, self.kept(dropped)))

    def kept(self, dropped):
        taken = {maker for key in self.recomputed(dropped) for maker in self.producers[key]}
        return {self.memory[key] for key in (self.needed | taken) - dropped}

    def not_kept(self, dropped):
        before, after = self.kept(frozenset()), self.kept(dropped)
        return {key: size * ((key in before) - (key in after)) for key, size in self.sizes.items()}

    def seconds(self, dropped):
        return sum(self.prices[key] for key in self.recomputed(dropped))

    def choose(self, plan, budget, **more):
        return choose(plan, budget, self.saved_bytes, self.recomputed, self.not_kept, self.prices.get, **more)


def random_program(seed, count):
    """`(plan, Model)`: mostly chains, some with several inputs, views, and results that no gradient needs."""
    chance = random.Random(seed)
    steps, sizes, prices, views = [], {}, {}, set()
    for number in range(count):
        producers = [
            max(-1, number - 1 - int(chance.expovariate(0.7))) for _ in range(chance.choice((1, 1, 1, 2, 2, 3)))
        ]
        if producers[0] >= 0 and chance.random() < 0.15:
            views.add((number,))
            producers = producers[:1]
        steps.append(tuple(dict.fromkeys(producers)))
        sizes[number,] = 16 * chance.choice((1, 2, 4, 4, 8, 16, 32))
        prices[number,] = 0 if (number,) in views else 10 * chance.choice((1, 2, 4, 8, 16, 64, 256, 1000))
    needed = [key for key in sizes if chance.random() < 0.6] or [(0,)]
    producers = {(number,): tuple((maker,) for maker in step if maker >= 0) for number, step in enumerate(steps)}
    return plan_of(steps, sizes.values()), Model(producers, sizes, prices, needed, views)


def subsets(keys):
    return (frozenset(some) for count in range(len(keys) + 1) for some in combinations(keys, count))


def test_close_to_the_best_of_all_subsets():
    """The gap to the optimum: at least 97 of 100 searches are within 10 % of its seconds, none beyond 50 %."""
    gaps = []
    for seed in range(40):
        plan, model = random_program(seed, 11)
        known = [(model.saved_bytes(some), model.seconds(some)) for some in subsets(list(model.producers))]
        for budget in (0.8, 0.6, 0.5, 0.4, 0.25):
            limit = budget * model.saved_bytes(frozenset())
            best = min(seconds for nbytes, seconds in known if nbytes <= limit)
            choice = model.choose(plan, budget)
            assert choice.saved_bytes == model.saved_bytes(choice.dropped) <= limit
            assert choice.seconds == model.seconds(choice.dropped) >= best
            assert model.recomputed(choice.dropped) == choice.dropped
            gaps.append(choice.seconds / best if best else 1.0)
    assert sum(gap <= 1 for gap in gaps) >= 0.95 * len(gaps)
    assert sum(gap <= 1.1 for gap in gaps) >= 0.97 * len(gaps)
    assert max(gaps) < 1.5


def test_what_must_be_kept_is_never_computed_again():
    """Neither do the corners drop it, nor is anything exchanged for it."""
    for seed in range(10):
        plan, model = random_program(seed, 11)
        for key in model.producers:
            for budget in (0.8, 0.5):
                assert key not in model.choose(plan, budget, keep={key}, is_part=True).dropped


def test_the_curve():
    """From nothing computed again to the least memory, both known; in between never more of both."""
    for seed in range(20):
        plan, model = random_program(seed, 8)
        curve = model.choose(plan, 0.5).curve
        assert curve[0] == (model.saved_bytes(frozenset()), 0)
        known = [(model.saved_bytes(some), model.seconds(some)) for some in subsets(list(model.producers))]
        assert curve[-1] == min(known)
        assert all(left[0] > right[0] and left[1] < right[1] for left, right in zip(curve, curve[1:]))
        assert set(curve) <= set(known)


def test_what_costs_nothing():
    """A free copy of the argument need not be kept: the curve still begins where it is."""
    plan = plan_of([(-1,), (0,)], (400, 400))
    model = Model({(0,): (), (1,): ((0,),)}, {(0,): 400, (1,): 400}, {(0,): 0, (1,): 10}, [(0,), (1,)])
    choice = model.choose(plan, 0.5)
    assert choice.curve == ((800, 0), (400, 0), (0, 10))
    assert (choice.all_bytes, choice.saved_bytes, choice.seconds) == (800, 400, 0)
    assert choice.dropped == {(0,)}
    assert model.choose(plan, 1).dropped == set()


def test_cheapest_closure():
    for seed in range(500):
        chance = random.Random(seed)
        count = chance.randint(1, 7)
        costs = {node: chance.randint(-6, 6) for node in range(count)}
        pairs = [(chance.randrange(count), chance.randrange(count)) for _ in range(chance.randint(0, 10))]
        pairs = [pair for pair in pairs if pair[0] != pair[1]]
        closed = [some for some in subsets(range(count)) if all(v in some for u, v in pairs if u in some)]
        best = min((sum(map(costs.get, some)), len(some)) for some in closed)
        found = minimum_cost_closure(costs, pairs)
        assert found in closed and (sum(map(costs.get, found)), len(found)) == best


# A layer: a product, two cheap ones behind it, and a product; all are needed by gradients.
LAYER_PRICES, LAYER_SIZES = (1000, 1, 1, 1000), (8, 40, 40, 8)


def deep(count):
    """`(plan, Model)` of equal layers."""
    layer = plan_of([(-1,), (0,), (1,), (2,)], LAYER_SIZES, "layers.0")
    plan = plan_of([layer] * count, LAYER_SIZES[-1:] * count)
    links = links_of(plan)
    prices = {key: LAYER_PRICES[key[1]] for key in links.producers}
    return plan, Model(links.producers, {key: LAYER_SIZES[key[1]] for key in prices}, prices, prices)


def of_layers(numbers, layers=30):
    """The keys of these instructions in the first layers."""
    return {(layer, number) for layer in range(layers) for number in numbers}


@pytest.mark.parametrize(
    ("budget", "keep", "dropped"),
    [
        (16 / 96, (), of_layers((1, 2))),
        (0.5, (), of_layers((1, 2), 18)),  # the first layers, where all would be too many
        (0.084, (), of_layers((0, 1, 2))),  # what layers return is kept
        (56 / 96, of_layers((1,)), of_layers((2,))),
    ],
)
def test_equal_layers_are_treated_alike(budget, keep, dropped):
    plan, model = deep(30)
    assert links_of(plan).results == of_layers((3,))
    choice = model.choose(plan, budget, keep=keep)
    assert choice.dropped == dropped and choice.forward_seconds == 30 * 2002
    assert choice.seconds == sum(LAYER_PRICES[number] for _, number in dropped)
    assert choice.saved_bytes == 30 * 96 - sum(LAYER_SIZES[number] for _, number in dropped) <= budget * 30 * 96


def test_budgets_out_of_reach():
    """As what layers return is kept; and what must be."""
    plan, model = deep(30)
    with pytest.raises(ValueError, match=r"^recompute.budget: 0.05 is out of reach: .*240 B of 2.8 KiB stay.* 0.084$"):
        model.choose(plan, 0.05)
    with pytest.raises(ValueError, match="recompute.budget: 0.1 is out of reach"):
        model.choose(plan, 0.1, keep=of_layers((1,)))


def test_what_must_be_kept_in_one_layer():
    """The other layers aren't kept because of it."""
    plan, model = deep(30)
    everything = of_layers((0, 1, 2))
    choice = model.choose(plan, 0.112, keep={(7, 1), (7, 2)})
    assert everything - {(7, number) for number in range(3)} <= choice.dropped <= everything - {(7, 1), (7, 2)}


def test_the_whole_budget_computes_nothing_again():
    plan, model = deep(3)
    choice = model.choose(plan, 1)
    assert (choice.dropped, choice.seconds, choice.parts) == (frozenset(), 0, {})
    assert choice.saved_bytes == choice.all_bytes == 3 * 96


def test_described():
    plan, model = deep(30)
    choice = model.choose(plan, 0.5)
    lines = described(choice, {key: f"layers.{key[0]}.{'abcd'[key[1]]}" for key in choice.parts})
    stays, again = "1.4 KiB of 2.8 KiB of saved activations stay (50.0 %)", "what is computed again takes 36 s"
    assert lines[0] == f"{stays}; {again}, 0.1 % of the forward pass"
    assert [line.split() for line in lines[2:]] == [
        ["layers.0-17.b", "720", "B", "18", "s"],
        ["layers.0-17.c", "720", "B", "18", "s"],
        ["together", "1.4", "KiB", "36", "s"],
    ]


def test_described_sums_up():
    """What is kept in the place of what is computed from it has a line of its own."""
    plan = plan_of([(-1,), (0,), (1,)], (8, 32, 48))
    model = Model({(0,): (), (1,): ((0,),), (2,): ((1,),)}, {(0,): 8, (1,): 32, (2,): 48}, {(0,): 9, (1,): 1, (2,): 1},
                  [(1,), (2,)])  # fmt: skip
    lines = described(model.choose(plan, 0.2), {(number,): f"mlp.{number}.x" for number in range(3)})
    assert [line.split() for line in lines[2:]] == [
        ["mlp.1-2.x", "80", "B", "2", "s"],
        ["kept", "in", "their", "place,", "to", "compute", "from", "-8", "B", "0"],
        ["together", "72", "B", "2", "s"],
    ]


def test_the_picture():
    """Points are where their figures say, between the ticks of both axes."""
    plan, model = deep(30)
    choice = model.choose(plan, 0.3)
    root = ElementTree.fromstring(curve_picture(choice))

    def marks(kind, place):
        texts = [one for one in root.iter(f"{SVG}text") if one.get("class") == kind]
        numbers = [float(re.match(r"[\d.]+", text.text)[0]) for text in texts]
        places = [float(text.get(place)) - (4 if place == "y" else 0) for text in texts]
        assert numbers[0] == 0 and len(numbers) > 3
        return lambda number: places[0] + number / numbers[-1] * (places[-1] - places[0])

    x_of, y_of = marks("column", "x"), marks("row", "y")
    circles = [one for one in root.iter(f"{SVG}circle")]
    found = [(float(circle.get("cx")), float(circle.get("cy"))) for circle in circles]
    wanted = [*choice.curve, (choice.saved_bytes, choice.seconds)]
    for (x, y), (nbytes, seconds) in zip(found, wanted, strict=True):
        assert abs(x - x_of(nbytes / 1024)) < 0.5 and abs(y - y_of(100 * seconds / choice.forward_seconds)) < 0.5
        assert 72 <= x <= 690 and 78 <= y <= 382
    assert circles[-1].get("class") == "chosen"
    texts = ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]
    assert "saved activations, KiB" in texts and "computed again, of the forward pass" in texts


LAYERS = ("model.layers.0", "model.layers.1")
BY_HAND = {
    "attention": {"select": "*.self_attn"},
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


@pytest.mark.parametrize("name", daily(("full",), BY_HAND))
def test_no_worse_than_by_hand(llama, name):
    plan, prediction, prices = llama
    layers = {number: [path] for number, path in enumerate(LAYERS)}
    dropped = frozenset(NamedProgram(plan, layers=layers).recomputed(RecomputeSettings(**BY_HAND[name])))
    nbytes, seconds = prediction.saved_bytes(dropped), sum(map(prices.get, prediction.recomputed(dropped)))
    whole = prediction.saved_bytes()
    assert seconds > 0 and nbytes < whole
    choice = choice_within(RecomputeSettings(budget=min(1, nbytes / whole)), NamedProgram(plan))
    assert choice.saved_bytes <= nbytes and choice.seconds <= seconds * (1 + 1e-6)
