"""The experts of a layer: one card against a plain computation, and every cut against one card."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Normal
from mindspore.graph import api as graph_api
from support.nightly import daily
from support.recomputations import count_recomputations
from support.routed_layer import CASES, Case, Layer, check_here, train_alone, valued
from support.verified_calls import MESH, MESH_OF_4, Sample, check_of, eager, numbers

from mindformers_core import verify
from mindformers_core.algorithms import experts as parts
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.layout import layout
from mindformers_core.models.experts import MixtureOfExperts, RoutedExperts, Router, RouterConfig
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.tensor_parallel.experts import experts, within_capacity
from mindformers_core.zero import value_and_grad

EXPERTS, CHOICES = 4, 2
WEIGHTS = numbers(4, 2, 4, 4, low=-1), numbers(4, 4, 4, low=-1), numbers(4, 2, 4, low=-1), numbers(4, 4, low=-1)
TOKENS, SHARES = numbers(4, 4, 4, low=-1), numbers(4, 4, CHOICES)


def choices(kind, seed=1):
    """Ids (4, 4, 2): others for each token; some experts for none; one for all; none for some or all tokens."""
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((4, 4, EXPERTS)), -1)[..., :CHOICES]
    found = {
        "some": ids,
        "idle": ids % 2 * 3,
        "all": ids * 0 + 2,
        "none": np.where(random.random(ids.shape) < 0.3, -1, ids),
        "nothing": ids * 0 - 1,
    }
    return found[kind].astype(np.int32)


def plainly(x, ids, shares, gate_up, down, gate_up_bias, down_bias):
    """Every expert computes all tokens."""
    output = 0.0
    for number in range(EXPERTS):
        gate, up = (ops.dense(x, gate_up[number, place]) + gate_up_bias[number, place] for place in range(2))
        found = ops.dense(ops.silu(gate) * up, down[number]) + down_bias[number]
        share = ops.sum(ops.where(ops.equal(ids, number), shares, 0.0), -1, keepdim=True)
        output = output + found * share
    return output


class Total(nn.Cell):
    """A number, of which every expert's output has another gradient."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, *given):
        return ops.sum(ops.sin(self.function(*given) * 0.1))


@pytest.mark.parametrize("rows", ["_by_sizes", "_by_blocks"])  # as on CPU, and on other devices
def test_one_card(monkeypatch, rows):
    """All gradients, in PyNative and compiled once: also where an expert gets nothing, where one gets all, and none."""
    monkeypatch.setattr(parts, "_by_sizes", getattr(parts, rows))
    places = (0, *range(2, 7))
    compiled, compilations = ms.jit(ms.grad(Total(experts), places)), []
    check = graph_api._check_recompile
    monkeypatch.setattr(graph_api, "_check_recompile", lambda *args: (compilations.append(args), check(*args)))
    for kind in ("some", "idle", "all", "none", "nothing"):
        given = [Tensor(each) for each in (TOKENS, choices(kind), SHARES, *WEIGHTS)]
        expected = ms.grad(Total(plainly), places)(*given)
        for found in (ms.grad(Total(experts), places)(*given), compiled(*given)):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), 1e-4, 2e-5, err_msg=kind)
    for seed in range(20):
        compiled(given[0], Tensor(choices("some", seed)), *given[2:])
    assert len(compilations) == 1


@pytest.mark.nightly
def test_a_token_that_an_expert_did_not_choose_may_overflow_there():
    """In float16 the gradients of a compiled function are finite, as in PyNative."""
    x, ids = TOKENS.copy(), choices("some")
    x[-1, -1], ids[-1, -1] = 3000.0, -1
    x, *others = [Tensor(each, ms.float16) for each in (x, SHARES, *WEIGHTS)]
    given = x, Tensor(ids), *others
    for step in (ms.grad(Total(experts), (3, 4)), ms.jit(ms.grad(Total(experts), (3, 4)))):
        assert all(np.isfinite(each.asnumpy()).all() for each in step(*given))


def test_capacity():
    """First choices come before second ones, whatever the order of tokens."""
    ids = Tensor(np.array([[0, 1], [0, 1], [0, 2], [1, 0], [2, -1], [2, 1]], np.int32))
    assert within_capacity(ids, 3, (2, 6)).asnumpy().tolist() == [[0, 1], [0, -1], [-1, -1], [1, -1], [2, -1], [2, -1]]
    assert within_capacity(ids, 3, (1, 2)).asnumpy().tolist() == [[0, 1], [-1, -1], [0, 2], [1, -1], [2, -1], [-1, 1]]


def test_groups_do_not_go_beyond_a_row():
    """On one card, where tokens of all rows would fit, it is the error of ranks, also of a compiled function."""
    given = [Tensor(each) for each in (TOKENS, choices("some"), SHARES, *WEIGHTS)]

    def called(*given):
        return experts(*given, "silu", (1, 8))

    for call in (called, ms.jit(called), lambda x, ids, *_: within_capacity(ids, EXPERTS, (1, 8))):
        with pytest.raises(ValueError, match=r"groups of 8 tokens don't divide x \(4, 4, .\), which has rows of 4"):
            call(*given)


def test_dropped_choices():
    """Counted by hand, of the tokens that count: an expert takes the first choices of four tokens before the second."""
    x, counted = Tensor(numbers(2, 8, 4, low=-1)), (numbers(2, 8) > 0.6).astype(np.float32)
    layer = MixtureOfExperts(Router(4, RouterConfig(2, 2), Normal(0.5)), RoutedExperts(2, 4, 4, capacity=(3, 4)))
    dropped = 0
    for ids, weights in zip(layer.gate(x)[0].asnumpy().reshape(4, 4, 2), counted.reshape(4, 4)):
        taken = [0, 0]
        for place in range(2):
            for token in range(4):
                taken[ids[token, place]] += 1
                dropped += weights[token] * (taken[ids[token, place]] > 3)
    *_, counts = layer(x, Tensor(counted))
    assert counts.asnumpy().tolist() == [counted.sum(), counted.sum(), dropped] and dropped


def planned_calls(check):
    """For every call of the operator its algorithm, and the axes over which the output is partial."""
    entries = [entry for _, plan in check.plans.values() for found in plan.walk() for entry in found[1].instructions]
    calls = [each for each in entries if isinstance(each, OperatorPlan) and each.node.operator == "Experts"]
    return [(each.algorithm, *dict(each.outputs[0].partial)) for each in calls]


def cut(rows, each, inner):
    """Layouts of all inputs, by the axes of batch and length, of the experts, and of their inner dim."""
    tokens = [layout(*rows, None)] * 3
    return [
        *tokens,
        layout(each, None, inner, None),
        layout(each, None, inner),
        layout(each, None, inner),
        layout(each, None),
    ]


CUTS = [  # axes of batch and length, of experts, of their inner dim; what is found
    (("a", None), None, None, (None,)),
    ((None, None), None, "a", (None, "a")),
    ((None, None), "a", None, ("experts", "a")),
    (("a", None), "a", None, ("experts",)),
    ((None, "a"), "a", None, ("experts",)),
]
CUTS_OF_4 = [
    (("a", None), "a", "b", ("experts", "b")),
    ((None, "b"), "a", None, ("experts", "a")),
    (("a", "b"), ("b", "a"), None, ("experts",)),
    (("a", None), ("b", "a"), None, ("experts", "b")),
]


LAID = [(MESH, CUTS, None), (MESH_OF_4, CUTS_OF_4, (1, 2)), (MESH, CUTS, (1, 2)), (MESH_OF_4, CUTS_OF_4, None)]


@pytest.mark.parametrize("mesh, cuts, capacity", daily(LAID[:2], LAID))  # each value of each once
def test_each_cut(mesh, cuts, capacity):
    """Forward and all gradients; all dims have one size, so that a wrong one would fit."""

    def called(*given):
        return experts(*given, "silu", capacity)

    given = TOKENS, choices("some"), SHARES, *WEIGHTS
    sample = Sample("", called, given, cuts=tuple(cut(*each[:3]) for each in cuts))
    assert planned_calls(check_of(sample, mesh)) == [found for *_, found in cuts]
    if capacity is None:
        eager(sample, mesh)


def test_errors():
    """What doesn't fit is said."""
    with pytest.raises(ValueError, match="n_group: 3 should divide num_experts 8"):
        RouterConfig(8, 2, n_group=3)
    with pytest.raises(ValueError, match="num_experts_per_tok: 5 should be at most 4"):
        RouterConfig(8, 5, n_group=4, topk_group=2)


@pytest.mark.parametrize("counted", [np.ones((3, 4)), np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])])
def test_losses_of_a_router(counted):
    """Their formulas over the tokens that count: over all, over each row by its tokens, and of logits."""
    x, factors = numbers(3, 4, 8, low=-1), {"aux_loss_coef": 0.3, "seq_aux_loss_coef": 0.2, "z_loss_coef": 0.1}
    router = Router(8, RouterConfig(EXPERTS, CHOICES, **factors), Normal(0.5))
    ids, _, loss, counts = router(Tensor(x), Tensor(counted.astype(np.float32)))
    logits, counts_by_hand = x @ router.weight.asnumpy().T, np.eye(EXPERTS)[ids.asnumpy()].sum(-2)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    def balance(tokens):
        return EXPERTS / CHOICES * (counts_by_hand[tokens].mean(0) * shares[tokens].mean(0)).sum()

    taken = counted.astype(bool)
    rows = [(taken & (np.arange(3) == row)[:, None]) for row in range(3) if taken[row].any()]
    expected = 0.3 * balance(taken) + 0.1 * np.square(np.log(np.exp(logits).sum(-1)))[taken].mean()
    expected += 0.2 * sum(balance(row) * row.sum() for row in rows) / taken.sum()
    np.testing.assert_allclose(loss.asnumpy(), expected, 1e-5)
    np.testing.assert_array_equal(counts.asnumpy(), counts_by_hand[taken].sum(0))


NEAR = np.random.default_rng(2).normal(size=(8, 8)).astype(np.float32) * 1e-7  # what routers' rows differ by
TRAINED = [(case, 20) for case in CASES] + [(CASES[3], 3)]


@pytest.mark.long
@pytest.mark.parametrize("case", daily(CASES[5:6], CASES), ids=str)
def test_a_step(case):
    """Forward, all gradients, the norm while it is clipped, and a step of AdamW, also of losses and idle experts."""
    check = verify(lambda: case.build(case.mesh), case.mesh, Tensor(numbers(*case.shape, low=-1)))
    assert not check.faults, check.report()


@pytest.mark.long
@pytest.mark.parametrize("case, steps", daily(TRAINED[-1:], TRAINED), ids=str)
def test_training(case, steps):
    """Losses, norms that are clipped, and parameters, also where experts get nothing, a rank gets all; and ties."""
    expected = train_alone(case, steps)
    assert (expected[1][::3, 1] > 0.5).all()  # clipped
    with custom_gradients():
        SimulatedRanks(case.mesh.size).run(lambda rank: check_here(case, case.mesh, steps, expected))


@pytest.mark.nightly
@pytest.mark.usefixtures("one_rank")
def test_compiled_choices_that_are_made_again_are_the_same():
    """Of a router whose experts differ by units of rounding every bit of the loss and of all gradients is the same."""
    case = Case("dp1", (None, None), scores="sigmoid")
    x = np.random.default_rng(3).normal(size=(3, 64, 8)).astype(np.float32)

    def compiled(recomputed, *inputs):
        layer = valued(Layer(case.scores, case.capacity))
        weight = layer.moe.gate.weight
        weight.set_data(Tensor(weight.asnumpy()[:1] + NEAR))
        gradient_of = value_and_grad(case.build(case.mesh, layer, recomputed), compiled=True)
        found = [gradient_of(Tensor(each)) for each in inputs]
        return [[loss.asnumpy(), *(each.asnumpy() for each in gradients)] for loss, gradients in found]

    (found,), (expected, others) = compiled(True, x), compiled(False, x, x * np.float32(1 + 2**-20))
    assert all(map(np.array_equal, found, expected))
    changes = [abs(one - other).max() / abs(other).max() for one, other in zip(others, expected)]
    assert max(changes) > 1e-2  # other choices would be seen


def test_choices_are_not_made_again():
    """What is recomputed computes scores, weights and losses again, but not which experts tokens have chosen."""
    case = Case("dp2", ("dp", None), ("dp",), scores="sigmoid")  # in groups, with biases

    def recomputed(rank):
        net = case.build(case.mesh, valued(Layer(case.scores, case.capacity)), recomputed=True)
        x = Tensor(numbers(*layout(*case.rows, None).bind(case.mesh, 3).local_shape(case.shape), low=-1))
        with count_recomputations() as counted:
            value_and_grad(net)(x)
        return {name for code in counted for name in code.co_names}

    with custom_gradients():
        names = set().union(*SimulatedRanks(case.mesh.size).run(recomputed))
    assert any("sigmoid" in name for name in names) and not [name for name in names if "sort" in name or "topk" in name]
