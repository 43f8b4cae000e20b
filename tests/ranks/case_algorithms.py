"""Distributed algorithms in generated programs, in PyNative and under jit, against one card: results and gradients.

All placements of each operator, operator by operator, are in `case_operators`, functions as authors write them, on
simulated ranks, in `test_operators_as_written`: so some families are compiled at night only.
"""

from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from one_card import part_of
from support.algorithm_calls import CASES, IMAGES, KERNELS, LABELS, LOSSES, NUMBERS, SOFTMAX, WINDOWS, Several
from support.joint_operators import few, many, pair_sum, register
from support.launch import on_ranks
from support.small_cells import cell_of

from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.sharding.compiling import jit
from mindformers_core.tensor_parallel import shard
from mindformers_core.tensor_parallel.attention import attention

COLUMNS, ROWS = layout(None, "tp"), layout("tp", None)


ENGINES, BOTH = ("eager", "generated"), ("generated", "jit")


def check(functions, arrays, layouts, modes=BOTH):
    """Compare a generated program, also under jit, with one card: every result, and the gradients of a weighted sum."""
    mesh = init_device_mesh((2,), ("tp",))
    bound = [given.bind(mesh, array.ndim) for given, array in zip(layouts, arrays)]
    expected = [result.asnumpy() for result in Several(functions)(*map(Tensor, arrays))]
    random = np.random.default_rng(1)
    weights = [random.normal(size=array.shape).astype(array.dtype) for array in expected]
    slopes = step_of(Several(functions), weights)(*map(Tensor, arrays))[1]
    parts = [Tensor(part_of(array, given)) for array, given in zip(arrays, bound)]
    plan = {"": {"input": dict(zip("xy", layouts))}}
    for mode in modes:
        if mode != "jit":  # which compiles the Cell of the mode before
            cell = shard(Several(functions), mesh, plan=plan, mode=mode)
        placed = [result.layout for result in cell(*parts)]
        step = step_of(cell, [part_of(weight, given) for weight, given in zip(weights, placed)])
        results, gradient = (jit(step) if mode == "jit" else step)(*parts)
        for name, given, one, other in zip(functions, placed, map(local, results), expected, strict=True):
            wrong = f"{name} of {layouts}, {mode}"
            np.testing.assert_allclose(one.asnumpy(), part_of(other, given), 1e-5, 1e-5, err_msg=wrong)
        if slopes is not None:
            part, wrong = part_of(slopes.asnumpy(), bound[0]), f"gradient of {list(functions)} of {layouts}, {mode}"
            np.testing.assert_allclose(gradient.asnumpy(), part, 1e-5, 1e-5, err_msg=wrong)


def step_of(cell, weights):
    """A function that gives the results, and the gradient of x of the weighted sum of float ones; None without any."""
    weights = {place: Tensor(weight) for place, weight in enumerate(weights) if weight.dtype == np.float32}

    def loss(x, y=None):
        results = cell(x) if y is None else cell(x, y)
        total = 0.0
        for place, weight in weights.items():
            total = total + (local(results[place]) * weight).sum()
        return total, results

    def forward(x, y=None):
        return loss(x, y)[1], None

    def step(x, y=None):
        (_, results), gradient = ms.value_and_grad(loss, 0, has_aux=True)(x, y)
        return results, gradient

    return step if weights else forward


def local(result):
    """This rank's part."""
    return result.to_local() if hasattr(result, "to_local") else result


@on_ranks(2)
def case_softmax_algorithms():
    check(*CASES["softmax"], [COLUMNS])
    masked = NUMBERS.copy()
    masked[0, :4], masked[1, 2:7], masked[2, 7] = -np.inf, -np.inf, -np.inf
    check({name: SOFTMAX[name] for name in ("softmax", "logsumexp")}, [masked], [COLUMNS], ["eager"])
    low = np.repeat(np.float32([[-1e9], [np.finfo(np.float32).min], [-1e5], [0]]), 8, 1)  # masked throughout
    low[3, :6] = np.finfo(np.float32).min
    entropy = {"entropy": lambda x: ops.SoftmaxCrossEntropyWithLogits()(x, ops.ones_like(x) / 8)[0]}
    scan = {"scan": lambda x: ops.logcumsumexp(ops.stop_gradient(x), 1)}  # on one card its gradient has no digits
    check({**SOFTMAX, **entropy, **scan}, [low], [COLUMNS], ["generated"])


@on_ranks(nightly=(2,))
def case_extreme_algorithms():
    check(*CASES["extremes"], [COLUMNS])


@on_ranks(nightly=(2,))
def case_position_algorithms():
    check(*CASES["positions"], [COLUMNS])
    check(*CASES["positions from below"], [ROWS], ENGINES)


@on_ranks(nightly=(2,))
def case_mean_algorithms():
    check(*CASES["means"], [COLUMNS])
    check(*CASES["means"], [ROWS], ENGINES)


@on_ranks(nightly=(2,))
def case_statistics_algorithms():
    check(*CASES["statistics"], [COLUMNS])
    check(*CASES["bands"], [ROWS])


@on_ranks(nightly=(2,))
def case_scan_algorithms():
    check(*CASES["scans"], [COLUMNS])


@on_ranks(2)
def case_lookup_algorithms():
    check(*CASES["lookups in rows"], [ROWS, layout()])


@on_ranks(2)
def case_scatter_algorithms(modes=("generated",)):
    check(*CASES["scatters"], [ROWS, layout()], modes)


@on_ranks(2)
def case_lookups_of_which_a_rank_has_nothing():
    """They are alike on that rank, where a compiler that merges what is equal would send less than on the other one."""
    rows = [0], [1], [2], [3]
    check({f"rows {each}": lambda x, each=each: ops.tanh(x[Tensor(each)]) for each in rows}, [NUMBERS], [ROWS])


@on_ranks(2)
def case_loss_algorithms():
    check(*CASES["losses"], [COLUMNS, layout()], ["generated"])


@on_ranks(2)
def case_windows(modes=("generated",)):
    check(WINDOWS, [IMAGES, KERNELS], [layout(None, None, "tp"), layout()], modes)


@on_ranks(nightly=(2,))
def case_compiled_algorithms():
    """Of families that run in PyNative by day; other cuts of lookups and losses, by both engines."""
    case_scatter_algorithms(BOTH)
    check(*CASES["lookups in columns"], [COLUMNS, layout()], ENGINES)
    some = {name: LOSSES[name] for name in ("summed", "weighted")}
    check(some, [NUMBERS, LABELS], [ROWS, layout("tp")], ENGINES)
    check(*CASES["losses"], [COLUMNS, layout()])
    case_windows(BOTH)


@on_ranks(nightly=(2,))
def case_joint_and_offered_cuts():
    """Daily, on simulated ranks: `test_joint_cuts`."""
    register()
    rows, more = (np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32) for seed in (3, 4))
    check({"pairs": pair_sum, "turned": lambda x, y: pair_sum(y, x)}, [rows, more], [ROWS, ROWS])
    offered = {"many": lambda x: many(x * 2).sum(), "few": lambda x: few(x * 2).sum()}
    check(offered, [rows], [layout()])


def attentions(times, *algorithms):
    """By each algorithm causal attentions in a row, of tokens (batch, length, 16) in an order of balanced chunks."""
    order = 0, 3, 1, 2
    places = Tensor(np.arange(8, dtype=np.int32).reshape(4, 2)[list(order)].reshape(1, 8))

    def attend(algorithm, x):
        for _ in range(times):
            given = (ops.reshape(each, (2, 8, 4, 4)) for each in (x, ops.tanh(x), x * 2))
            known = places * 0, places + 1, places, 0.5, order, (None, 0), True, algorithm
            x = ops.reshape(attention(*given, *known)[0], (2, 8, 16))
        return x

    return {algorithm: partial(attend, algorithm) for algorithm in algorithms}


TOKENS = np.random.default_rng(5).normal(size=(2, 8, 16)).astype(np.float32)


@on_ranks(2)
def case_attention_in_a_ring():
    check(attentions(1, "ring"), [TOKENS], [layout(None, "tp", None)], ["generated"])


@on_ranks(nightly=(2,))
def case_attention_over_a_cut_sequence():
    check(attentions(2, "ring", "gather", "all_to_all"), [TOKENS], [layout(None, "tp", None)])


def dropping():
    """Dropout in a layer that is recomputed, and in a function."""

    def construct(self, x):
        return mint.nn.functional.dropout(ops.dropout(self.layer(x * 3), 0.25), 0.25, True)

    cell = cell_of(construct, layer=nn.Dropout(p=0.5))
    cell.layer.recompute()
    return cell.set_train()


@on_ranks(2)
def case_dropout_algorithm():
    """Both engines and jit drop the same; another mask at every call, but for one from the same generator state."""
    mesh = init_device_mesh((2,), ("tp",))
    x = np.random.default_rng(0).uniform(1, 2, (32, 16)).astype(np.float32)
    part, found = Tensor(part_of(x, COLUMNS.bind(mesh, 2))), {}
    for mode in ("eager", "generated", "jit"):
        cell = shard(dropping(), mesh, plan={"": {"input": COLUMNS}}, mode=mode.replace("jit", "generated"))
        step = value_and_slope(cell)
        if mode == "jit":
            step = jit(step)
        for seed in (3, 4):
            ms.manual_seed(seed)
            step(part)
            state = ms.get_rng_state()
            calls = [step(part) for _ in range(2)]
            ms.set_rng_state(state)
            found[mode, seed] = [*calls, step(part)]
    for (mode, seed), calls in found.items():
        (first, slope), (second, _), (again, _) = [[each.asnumpy() for each in call] for call in calls]
        np.testing.assert_array_equal(first, found["eager", seed][0][0].asnumpy(), err_msg=f"{mode}, seed {seed}")
        np.testing.assert_array_equal(first, again, err_msg=f"{mode}: the generator's state doesn't tell all")
        np.testing.assert_allclose(slope * part.asnumpy(), first, 1e-5, err_msg=f"gradient, {mode}")
        assert 0.03 < np.mean((first != 0) & (second != 0)) < 0.15, f"{mode}: two calls drew the same mask"
    assert np.any(found["jit", 3][0][0].asnumpy() != found["jit", 4][0][0].asnumpy()), "the seed has no effect"


def value_and_slope(cell):
    """A function that gives a result, and the gradient of its sum."""

    def loss(x):
        result = local(cell(x))
        return result.sum(), result

    def step(x):
        (_, result), slope = ms.value_and_grad(loss, 0, has_aux=True)(x)
        return result, slope

    return step
