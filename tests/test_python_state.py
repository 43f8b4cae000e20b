"""What `construct` reads and leaves in Python: programs follow it, in PyNative and compiled; one card is the truth."""

import os
import random
from collections import UserDict, defaultdict
from contextvars import ContextVar
from functools import partial
from itertools import count
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops, value_and_grad

from mindformers_core import init_device_mesh, init_distributed, jit, programs, shard

SCALES, SETTINGS, OFFSET, CACHE, CALLS = [2.0], {"slope": 1.0}, 1.0, {}, []
TABLE = np.ones(4, np.float32)
BOX = SimpleNamespace(total=0.0)
LIMIT = ContextVar("LIMIT", default=1.0)
NUMBERS = count(1)
GENERATOR = np.random.default_rng(0)
X = np.arange(8, dtype=np.float32).reshape(2, 4) / 8


class Base:
    """What a config object inherits."""

    root = 1.0

    @classmethod
    def of_root(cls):
        return cls.root


class Config(Base):
    """A config object with a default of its class, and a property."""

    beta = 1.0

    def __init__(self):
        self._alpha, self.sizes, self.nested = 1.0, [1.0, 2.0], SimpleNamespace(gamma=1.0)

    @property
    def alpha(self):
        return self._alpha


def closure(factor):
    def scaled(x):
        return x * factor

    def change(value):
        nonlocal factor
        factor = value

    return scaled, change


def with_default(x, sizes=[1.0]):  # noqa: B006
    return x * sizes[0] * float(os.getenv("MINDFORMERS_CORE_TEST", "1"))


class Reader(nn.Cell):
    """Reads Python of all kinds."""

    kind, other = 1.0, 0.5

    def __init__(self):
        super().__init__()
        self.fc, self.config, self.scale, self.places = nn.Dense(4, 4), Config(), 1.0, {"a": [1.0]}
        self.scaled, self.change = closure(1.0)
        self.function, self.table = partial(ops.mul, 1.0), np.ones((2, 3))
        self.user, self.counts = UserDict(a=1.0), defaultdict(lambda: 1.0)

    @classmethod
    def of_class(cls):
        return cls.kind + cls.other

    def factor(self):
        return self.of_class() * self.config.of_root() * getattr(self.config, "late", 1.0) * LIMIT.get()

    def construct(self, x):
        y = self.scaled(self.fc(x)) * SCALES[0] + SETTINGS["slope"] * x + OFFSET * self.scale * self.kind
        y = y + self.config.alpha * self.config.sizes[1] * getattr(self.config, "be" + "ta") * self.config.nested.gamma
        y = self.function(y) * self.table.shape[0] * self.user["a"] * self.counts["a"] * self.factor()
        return with_default(y * self.places["a"][0] * float(TABLE.sum())).mean()


def pair(kind, *args):
    """A sharded Cell, and the same one on one card."""
    init_distributed()
    single, net = kind(*args), kind(*args)
    ms.load_param_into_net(net, single.parameters_dict())
    return shard(net, init_device_mesh((1,), ("dp",))), single


def number(tensor):
    return float(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


CHANGES = [
    lambda net, value: setattr(net, "scale", value),
    lambda net, value: setattr(net.config, "_alpha", value),
    lambda net, value: setattr(net.config, "nested", SimpleNamespace(gamma=value)),
    lambda net, value: setattr(net.config.nested, "gamma", value),
    lambda net, value: net.config.sizes.__setitem__(1, value),
    lambda net, value: net.places["a"].__setitem__(0, value),
    lambda net, value: net.change(value),
    lambda net, value: setattr(Config, "beta", value),
    lambda net, value: setattr(Reader, "kind", value),
    lambda net, value: setattr(Reader, "other", value),
    lambda net, value: setattr(Base, "root", value),
    lambda net, value: setattr(net.config, "late", value),
    lambda net, value: setattr(net.config, "beta", value),  # in place of the class's
    lambda net, value: setattr(net, "function", partial(ops.mul, value)),
    lambda net, value: setattr(net, "table", np.ones((2, 3) if value == 1.5 else (3, 2))),  # noqa: PLR2004
    lambda net, value: net.user.update(a=value),
    lambda net, value: net.counts.update(a=value),
    lambda net, value: LIMIT.set(value),
    lambda net, value: SCALES.__setitem__(0, value),
    lambda net, value: SETTINGS.update(slope=value),
    lambda net, value: globals().update(OFFSET=value),
    lambda net, value: TABLE.__setitem__(0, value),
    lambda net, value: with_default.__defaults__[0].__setitem__(0, value),
    lambda net, value: os.environ.__setitem__("MINDFORMERS_CORE_TEST", str(value)),
]


def test_what_is_read_may_change():
    net, single = pair(Reader)

    @jit
    def compiled(x):
        return net(x)

    for place, change in enumerate(CHANGES):
        for value in (1.25, 1.5, 1.25):
            change(net, value), change(single, value)
            expected, before = number(single(Tensor(X))), len(programs(net))
            assert number(net(Tensor(X))) == pytest.approx(expected, rel=1e-6), (place, value)
        assert len(programs(net)) == before, "a value that was there before has its program"
        if place % 4 == 0:
            assert number(compiled(Tensor(X))) == pytest.approx(expected, rel=1e-6), place
    for value in (1.5, 1.25):
        net.kind = single.kind = value  # in place of the class's
        assert number(net(Tensor(X))) == pytest.approx(number(single(Tensor(X))), rel=1e-6)
        SCALES[0] = value
        assert number(compiled(Tensor(X))) == pytest.approx(number(single(Tensor(X))), rel=1e-6)


def test_what_is_not_read_makes_no_program():
    net, _ = pair(Reader)
    net(Tensor(X))
    net.config.unread = net.unread = 3
    SETTINGS["slope"] = float(repr(SETTINGS["slope"]))  # equal, another object
    net(Tensor(X))
    assert len(programs(net)) == 1


class Body(nn.Cell):
    """Runs a function of itself and the input."""

    def __init__(self, body):
        super().__init__()
        self.fc, self.step, self.seen, self.items, self.body = nn.Dense(4, 4), 0, None, [], body

    def construct(self, x):
        return self.body(self, x)


def counting(cell, x):
    cell.step += 1
    return cell.fc(x).mean() * min(3, cell.step)


def changing_length(cell, x):
    if cell.seen != x.shape[0]:  # a cache, as of rotary tables
        cell.seen, cell.table = x.shape[0], Tensor(np.full(4, x.shape[0], np.float32))
    return (cell.fc(x) * cell.table).mean()


def cached_in_a_dict(cell, x):
    if x.shape[0] not in CACHE:
        CACHE[x.shape[0]] = Tensor(np.full(4, x.shape[0], np.float32))
    return (cell.fc(x) * CACHE[x.shape[0]]).mean()


@pytest.mark.parametrize("body", [changing_length, cached_in_a_dict])
def test_caches(body):
    net, single = pair(Body, body)
    for rows in (1, 2, 2, 1):
        assert number(net(Tensor(X[:rows]))) == pytest.approx(number(single(Tensor(X[:rows]))), rel=1e-6)
        assert net.seen == single.seen


def test_counters_are_an_error_after_some_programs():
    net, single = pair(Body, counting)
    with pytest.raises(ValueError, match=r"the root Cell \(Body\), .*test_python_state.py:\d+: self.step has another"):
        for _ in range(9):
            assert number(net(Tensor(X))) == pytest.approx(number(single(Tensor(X))), rel=1e-6)
            assert net.step == single.step


def test_a_new_value_at_every_call_is_an_error():
    net, single = pair(Reader)
    with pytest.raises(ValueError, match="self.scale has another value at every call, before 7, now 8, .*argument"):
        for step in range(11):
            net.scale = single.scale = step
            assert number(net(Tensor(X))) == pytest.approx(number(single(Tensor(X))), rel=1e-6)


def appended(cell, x):
    CALLS.append(1)
    return cell.fc(x).mean() * len(CALLS)


def keeps_in_a_list(cell, x):
    cell.items.append(cell.fc(x))
    return x.mean()


def passes_on(cell, x):
    BOX.total = cell.fc(x).mean()
    return BOX.total * 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda cell, x: x.mean() * random.uniform(0, 1), r"Random.random\(\) gives something else"),
        (lambda cell, x: x.mean() * np.random.rand(), r"rand\(\) gives something else"),
        (lambda cell, x: x.mean() * GENERATOR.random(), r"random\(\) gives something else"),
        (appended, "construct changes CALLS at every call"),
        (lambda cell, x: x.mean() * next(NUMBERS), r"NUMBERS is count\(1\), which gives something else"),
        (keeps_in_a_list, "construct changes self.items at every call"),
    ],
)
def test_what_cannot_be_guarded(body, said):
    net, _ = pair(Body, body)
    with pytest.raises(ValueError, match=rf"the root Cell \(Body\), .*test_python_state.py:\d+: .*{said}|{said}"):
        net(Tensor(X))


def test_tensors_in_an_object_of_the_call():
    net, single = pair(Body, passes_on)
    expected = number(single(Tensor(X)))
    for _ in range(2):
        assert number(net(Tensor(X))) == pytest.approx(expected, rel=1e-6)
    assert len(programs(net)) == 1
    with pytest.raises(
        ValueError, match="a sharded Cell has put a tensor that it computes into a list, dict or object"
    ):
        float(BOX.total)


def test_methods_may_be_exchanged(monkeypatch):
    net, single = pair(Reader)
    for target in (Reader, net):
        for value in (2.0, 3.0):
            for each in (target, single if target is net else target):
                monkeypatch.setattr(each, "factor", lambda *_, value=value: value)
            assert number(net(Tensor(X))) == pytest.approx(number(single(Tensor(X))), rel=1e-6)


def test_a_generator_with_a_seed_may_draw():
    net, single = pair(Body, lambda cell, x: x.mean() * np.random.default_rng(1).random())
    assert number(net(Tensor(X))) == pytest.approx(number(single(Tensor(X))), rel=1e-6)


class Expert(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc, self.aux, self.losses = nn.Dense(4, 4), Tensor(0.0), []

    def construct(self, x):
        y = self.fc(x)
        self.aux, self.losses, self.length = ops.square(y).mean(), [y.mean(), (y.sum(), 2)], x.shape[0]
        return y


class Experts(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Expert(), Expert()])

    def construct(self, x):
        self.total = 0.0
        for layer in self.layers:
            x = layer(layer(x))
            self.total = self.total + layer.aux
        return x.mean()


def test_tensors_in_attributes():
    """Values, and gradients of all Parameters; of several calls of a Cell the last one's."""
    nets, found = pair(Experts), []
    for net in nets:
        weights = net.trainable_params()

        def loss(x, net=net):
            return net(x) + net.total + 2 * net.layers[0].aux + net.layers[1].losses[1][0]

        plain = value_and_grad(net, None, weights)(Tensor(X))
        for _ in range(2):
            value, gradients = value_and_grad(loss, None, weights)(Tensor(X))
        assert net.layers[0].length == 2 and net.layers[0].losses[1][1] == 2
        found.append([plain[0], value, net.layers[0].aux, net.layers[1].losses[0], *plain[1], *gradients])
    for ours, theirs in zip(*found, strict=True):
        ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        np.testing.assert_allclose(ours.asnumpy(), theirs.asnumpy(), 1e-5, 1e-6)
    net = nets[0]

    @jit
    def compiled(x):
        return net(x)

    with pytest.raises(RuntimeError, match=r"Cell 'layers.0' \(Expert\) keeps a tensor in .* 'aux', at .*py"):
        compiled(Tensor(X))
    again = shard(Experts(), init_device_mesh((1,), ("dp",)))
    again.layers[0].recompute()
    with pytest.raises(ValueError, match="'aux', at .* is recomputed, so that it would have no gradient"):
        again(Tensor(X))


def reads_what_was_left(cell, x):
    cell.total = (0.0 if cell.seen is None else cell.total) + cell.fc(x).mean()
    cell.seen = True
    return cell.total


def test_a_tensor_of_an_earlier_call_is_not_read():
    net, _ = pair(Body, reads_what_was_left)
    net(Tensor(X))
    with pytest.raises(ValueError, match=r"self.total is a tensor that an earlier call left .* Parameter"):
        net(Tensor(X))


def keeps_variables(cell, x):
    parts, numbers = [], iter((1.0, 2.0))
    scales = [parts.append(cell.fc(x)) or len(parts) * next(numbers) for _ in range(2)]
    return parts[0] * scales[1]


def test_variables_of_construct_are_none_of_it():
    net, one = pair(Body, keeps_variables)
    for _ in range(5):
        np.testing.assert_allclose(net(Tensor(X)).full_tensor().asnumpy(), one(Tensor(X)).asnumpy(), 1e-5)
    assert len(programs(net)) == 1
