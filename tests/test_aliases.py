"""Two names of one tensor, or of its memory: a write through either does what it does on one card, or is an error."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops
from support.small_cells import cell_of

from mindformers_core import shard
from mindformers_core.mesh import init_device_mesh

pytestmark = pytest.mark.usefixtures("one_rank")
F = mint.nn.functional
X = np.arange(1, 33, dtype=np.float32).reshape(4, 8)
ITSELF = {
    "contiguous": lambda x: x.contiguous(),
    "its dtype": lambda x: ops.cast(x, ms.float32),
    "its dtype, uncopied": lambda x: x.astype(ms.float32, False),
    "no dropout": lambda x: ops.dropout(x, 0.5, False),
    "dots": lambda x: x[...],
    "plus": lambda x: +x,
}
SHARED = {
    "its dtype": lambda x: x.to(ms.float32),
    "as its dtype": lambda x: x.astype(ms.float32),
    "its shape": lambda x: x.reshape(4, 8),
    "another shape": lambda x: x.reshape(8, 4),
    "nothing dropped": lambda x: F.dropout(x, p=0.0),
    "no training": lambda x: F.dropout(x, 0.5, training=False),
    "no gradient": ops.stop_gradient,
    "a row": lambda x: x[0],
    "a slice": lambda x: ops.slice(x, (0, 2), (4, 4)),
    "narrow": lambda x: ops.narrow(x, 1, 2, 4),
    "meshgrid": lambda x: ops.meshgrid(x.reshape(-1), x[0])[0],
}
COPIES = {
    "nothing dropped": lambda x: ops.dropout(x, 0.0),
    "another dtype": lambda x: x.half().float(),
    "contiguous": lambda x: x.T.contiguous(),
    "times 1": lambda x: x * 1,
}


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def _both(alias, owner="made", mode="generated"):
    """A Cell of one rank that writes an alias, and returns a tensor of its own and the alias."""

    def construct(self, x):
        owned = {"made": x * 1.0, "argument": x, "table": self.table, "parameter": self.cache}[owner]
        again = alias(owned)
        again[:] = again + 100.0
        return (owned if owner == "made" else x) * 1.0, again * 1.0

    cell = cell_of(construct, cache=Parameter(Tensor(X), name="cache", requires_grad=False), table=Tensor(X))
    return shard(cell, init_device_mesh((1,), ("dp",)), mode=mode)


MODES = pytest.mark.parametrize("mode", ["generated", "eager"])


@MODES
@pytest.mark.parametrize("name", ITSELF)
def test_the_same_tensor_by_another_name(name, mode):
    x = Tensor(X)
    assert ITSELF[name](x) is x
    for found in _both(ITSELF[name], mode=mode)(x):
        np.testing.assert_array_equal(found.asnumpy(), X + 100)


@MODES
@pytest.mark.parametrize("name", SHARED)
def test_shared_memory(name, mode):
    x = Tensor(X)
    alias = SHARED[name](x)
    assert alias is not x and _memory(alias) == _memory(x)
    with pytest.raises(ValueError, match="in the root Cell .*used after one of the same memory"):
        _both(SHARED[name], mode=mode)(x)


@MODES
@pytest.mark.parametrize("name", COPIES)
def test_copies(name, mode):
    x = Tensor(X) * 1.0
    alias = COPIES[name](x)
    assert _memory(alias) != _memory(x)
    kept, written = _both(COPIES[name], mode=mode)(Tensor(X))
    np.testing.assert_array_equal(kept.asnumpy(), X)
    np.testing.assert_array_equal(written.asnumpy(), alias.asnumpy() + 100)


OWNERS = [(owner, mode) for mode in ("generated", "eager") for owner in ("argument", "parameter")]


@pytest.mark.parametrize("name", ["its dtype", "another shape", "nothing dropped", "a row"])
@pytest.mark.parametrize(("owner", "mode"), [*OWNERS, ("table", "generated")])
def test_what_outlives_the_call_is_not_written_through_a_view(owner, name, mode):
    said = {"argument": "argument of the root Cell", "parameter": "Parameter 'cache', or a view of it, .* self.cache"}
    with pytest.raises(ValueError, match=f"in the root Cell .*{said.get(owner, 'requires_grad=False')}"):
        _both(SHARED[name], owner, mode)(Tensor(X))


@MODES
def test_the_parameter_itself_is_written(mode):
    net = _both(ITSELF["contiguous"], "parameter", mode)
    net(Tensor(X))
    np.testing.assert_array_equal(net.cache.asnumpy(), X + 100)


def _sharded(construct, mode):
    return shard(cell_of(construct), init_device_mesh((1,), ("dp",)), mode=mode)


@MODES
@pytest.mark.parametrize("place", [0, 1])
def test_each_result_of_meshgrid_has_the_memory_of_its_vector(place, mode):
    def construct(self, x):
        vectors = x[0] * 1.0, x[1] * 1.0
        grids = ops.meshgrid(*vectors)
        vectors[1][:] = vectors[1] + 100.0
        return grids[place]

    net = _sharded(construct, mode)
    if place == 0:
        np.testing.assert_array_equal(net(Tensor(X)).asnumpy(), np.broadcast_to(X[0], (8, 8)))
        return
    with pytest.raises(ValueError, match="in the root Cell .*used after one of the same memory"):
        net(Tensor(X))


WRITES = {
    "all of it": lambda x: x[[0, 1]].__setitem__(slice(None), 5.0),
    "a part": lambda x: x[Tensor([0, 1])].__setitem__((slice(None), 0), 5.0),
    "a view": lambda x: x[:, [1, 2]][0].__setitem__(0, 5.0),
}


@MODES
@pytest.mark.parametrize("name", WRITES)
def test_an_assignment_to_a_lookup_is_refused(name, mode):
    """MindSpore writes it back into the tensor that was looked up."""
    x = Tensor(X) * 1.0
    WRITES[name](x)
    assert (x.asnumpy() != X).any()

    def construct(self, x):
        x = x * 1.0
        WRITES[name](x)
        return x

    with pytest.raises(ValueError, match=r"in the root Cell .*x\[indices\].* writes back into x"):
        _sharded(construct, mode)(Tensor(X))
