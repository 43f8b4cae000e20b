"""Level 3 of `hsdp()`: weights that come and go; and what stands between steps: evaluation, errors."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.launch import on_ranks
from support.small_cells import cell_of
from zero_towers import SIZE, Tower, adam, assert_equal, check_tower, examples, train_alone, train_tower, values_of

from mindformers_core.communication import count_collectives, world
from mindformers_core.zero import gathered, hsdp, value_and_grad
from mindformers_core.zero.storage import storage_of


def tower(prefetch=1, **settings):
    """A tower at level 3; and what is gathered and dropped, with how many layers' weights are in place then."""
    net = hsdp(Tower(idle=False), 2, 0, "level3", prefetch=prefetch, gradients_mean=False, **settings)
    schedule, log = storage_of(net).schedule, []

    def logged(sign, change, unit_of):
        def run(what):
            changes = sign == "+" or what in schedule._held
            change(what)
            if changes:
                log.append((sign + unit_of(what)[-1:], in_place(net)))

        return run

    schedule.gather_bucket = logged("+", schedule.gather_bucket, lambda bucket: bucket.unit)
    schedule._free = logged("-", schedule._free, lambda unit: unit)
    return net, log


def in_place(net):
    """How many layers' weights have memory: what was given back is zeros, but for the rests of pages at both ends."""
    layers = [stored.unsharded for stored in storage_of(net).parameters if "layers" in stored.plan.path]
    filled = [np.count_nonzero(weight.asnumpy()) / SIZE**2 for weight in layers]
    assert all(share == 1 or share < 0.5 for share in filled), filled
    return filled.count(1)


@on_ranks(2)
def case_units_are_gathered_in_the_documented_order():
    """Each before its forward and before its backward pass, the next ones ahead; as many gathers, equal numbers."""
    whole, mine = examples()
    expected, _ = train_alone(whole, net=Tower(idle=False))
    # the root's own weight first; what comes ahead is known from the second step on
    orders = {
        0: "+ +0 -0 +1 -1 +2 -2 +2 -2 +1 -1 +0 -0",
        1: "+ +0 +1 -0 +2 -1 -2 +2 +1 -2 +0 -1 -0",
        2: "+ +0 +1 +2 -0 -1 -2 +2 +1 +0 -2 -1 -0",
    }
    for prefetch, order in orders.items():
        net, log = tower(prefetch)
        gradient_of = value_and_grad(net)
        gradient_of(mine)
        log.clear()
        gradient_of(mine)
        assert " ".join(what for what, _ in log) == order, (prefetch, log)
        found, _ = train_tower(net, gradient_of, mine, adam)
        assert_equal(net, found, expected, prefetch)


@on_ranks(2)
def case_a_cell_below_a_unit_is_called_by_itself():
    """Its weights are gathered with those of its unit."""
    weight = np.random.default_rng(2).normal(size=(SIZE, SIZE)).astype(np.float32)
    layers = [
        cell_of(lambda self, x: self.dense(x), dense=nn.Dense(SIZE, SIZE, Tensor(weight), has_bias=False))
        for _ in range(2)
    ]
    net = cell_of(lambda self, x: self.layers[1](self.layers[0](x)), layers=nn.CellList(layers))
    net = hsdp(net.set_train(False), 2, 0, "level3", reshard_after_forward=True)
    x = examples()[1]
    np.testing.assert_allclose(net.layers[0].dense(x).asnumpy(), x.asnumpy() @ weight.T, 1e-5, 1e-5)


@on_ranks(2)
def case_weights_are_gone_between_calls():
    """While the layers run, and around steps."""
    net, log = tower(prefetch=0)
    gradient_of = value_and_grad(net)
    assert in_place(net) == 0
    _, gradients = gradient_of(examples()[1])
    assert [count for _, count in log] == [0, *[1, 0] * 6], log
    assert in_place(net) == 0
    assert sum(gradient.nbytes for gradient in gradients) == (3 * SIZE**2 + 3 * SIZE) * 4 // 2
    log.clear()
    net(examples()[1])
    assert [count for _, count in log] == [0, *[1, 0] * 3], log


@on_ranks(2)
def case_weights_can_stay_after_forward():
    """All are gathered once, and nothing comes or goes until the step ends."""
    net, log = tower(reshard_after_forward=False, accumulate_grad_step=2)
    gradient_of = value_and_grad(net)
    for _ in range(2):
        gradient_of(examples()[1])
    assert sorted(what for what, _ in log) == ["+", "+0", "+1", "+2"], log
    check_tower(adam, "stay", shard_size=2, optimizer_level="level3", reshard_after_forward=False)


@on_ranks(2)
def case_ranks_that_use_nothing_that_is_trained():
    """Both ranks use the one weight, the first one does, none does: a gradient is that of the batches that use it."""
    whole, mine = examples()
    halves, alone = np.split(whole.asnumpy(), 2), frozen_but_one()
    terms = [ms.grad(alone, None, alone.trainable_params())(Tensor(half))[0].asnumpy() for half in halves]
    for level, stay, users in (("level2", None, (2, 1, 0)), ("level3", False, (2, 1, 0)), ("level3", None, (2, 0))):
        net = hsdp(frozen_but_one(), 2, 0, level, gradients_mean=False, reshard_after_forward=stay)
        gradient_of = value_and_grad(net)
        for count in users:
            _, gradients = gradient_of(mine, skipping=world().rank >= count)
            expected = sum(terms[:count], np.zeros((SIZE, SIZE), np.float32))
            found, expected = ({"layers.1.weight": value} for value in (gradients[0].asnumpy(), expected))
            assert_equal(net, found, expected, (level, count))


def frozen_but_one():
    net = Tower(frozen=(0, 2), idle=False)
    net.scale.requires_grad = False
    return net


@on_ranks(2)
def case_recomputed_layers_gather_their_weights_again():
    """`recompute()` on layers, at every level; at level 3 with the weights gone in between."""
    whole, mine = examples()
    expected, first = train_alone(whole)
    for level, compiled in (("level2", False), ("level3", True)):
        net = Tower()
        for layer in net.layers:
            layer.recompute()
        hsdp(net, 2, 0, level, gradients_mean=False)
        found, gradients = train_tower(net, value_and_grad(net, compiled), mine, adam)
        assert_equal(net, gradients, first, (level, compiled))
        assert_equal(net, found, expected, (level, compiled))


# Between steps


@on_ranks(2)
def case_evaluation_gathers_for_a_call_or_for_many():
    """A call leaves parts; `gathered()` keeps whole weights, and gives parts back."""
    whole, mine = examples()
    for level in ("level1", "level2", "level3"):
        net = hsdp(Tower(), 2, 0, level, gradients_mean=False, reshard_after_forward=False)
        before, alone = values_of(net), Tower()
        calls = len(storage_of(net).gathers)
        for inside, expected in ((False, [calls, calls]), (True, [0, 0])):
            with gathered(net) if inside else count_collectives():
                for count in expected:
                    with count_collectives() as counts:
                        result = net(mine)
                    np.testing.assert_allclose(result.asnumpy(), alone(mine).asnumpy(), 1e-5)
                    assert counts.get(("all_gather", ("dp",)), (0, 0))[0] == count, (level, counts)
        with (
            gathered(net),
            pytest.raises(ValueError, match=r"in the middle of a step or of gathered\(\)"),
            gathered(net),
        ):
            pass
        assert_unchanged(net, before)
        with pytest.raises(ValueError, match="take it with mindformers_core.zero.value_and_grad"):
            ms.value_and_grad(net, None, net.trainable_params())(mine)
        expected, _ = train_alone(whole)
        found, _ = train_tower(net, value_and_grad(net), mine, adam)
        assert_equal(net, found, expected, level)


def assert_unchanged(net, before):
    for path, value in values_of(net).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)


@on_ranks(2)
def case_a_failing_step_leaves_parts_and_the_next_one_is_right():
    """It fails in a first micro-step, or in a second one, whose sum is forgotten."""
    whole, mine = examples()
    expected, _ = train_alone(whole)
    bad = Tensor(np.zeros((4, SIZE + 1), np.float32))
    for level in ("level1", "level2", "level3"):
        net = hsdp(Tower(), 2, 0, level, 2, gradients_mean=False)
        gradient_of, before, storage = value_and_grad(net), values_of(net), storage_of(net)
        for good in (0, 1):
            for _ in range(good):
                gradient_of(mine)
            with pytest.raises(ValueError):
                gradient_of(bad)
            assert not storage.is_open
            assert_unchanged(net, before)
        found, _ = train_tower(net, in_halves(gradient_of), mine, adam)
        assert_equal(net, found, expected, level)


@on_ranks(2)
def case_compiled_accumulated_steps_of_a_tower_equal_one_card():
    """Gradients come at the end of the second micro-step."""
    whole, mine = examples()
    net = hsdp(Tower(), 2, 0, "level2", 2, gradients_mean=False)
    found, gradients = train_tower(net, in_halves(value_and_grad(net, compiled=True)), mine, adam)
    expected, first = train_alone(whole)
    assert_equal(net, gradients, first, "gradients")
    assert_equal(net, found, expected, "parameters")


def in_halves(gradient_of):
    """`gradient_of` in two micro-steps, of the sum of their losses."""

    def step(x):
        first, second = (Tensor(half) for half in np.split(x.asnumpy(), 2))
        assert gradient_of(first)[1] is None
        loss, gradients = gradient_of(second)
        return loss, tuple(2 * gradient for gradient in gradients)

    return step


@on_ranks(2)
def case_a_forward_pass_that_fails_with_weights_in_place_drops_them():
    """An exception of the user's own, in the second layer."""
    whole, mine = examples()
    for level in ("level2", "level3"):
        net = hsdp(Tower(), 2, 0, level, gradients_mean=False)
        layer, before, gradient_of = net.layers[1], values_of(net), value_and_grad(net)
        gradient_of(mine)
        handle = layer.register_forward_pre_hook(_fail)
        with pytest.raises(KeyError, match="mine"):
            gradient_of(mine)
        handle.remove()
        assert not storage_of(net).is_open
        assert_unchanged(net, before)
        expected, _ = train_alone(whole)
        found, _ = train_tower(net, gradient_of, mine, adam)
        assert_equal(net, found, expected, level)


def _fail(cell, inputs):
    raise KeyError("mine")
