"""`DTensor` in one process: as seen by rank 0 of a dry run on a 2x2 mesh."""

import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import elementwise, register_operator
from mindformers_core.operators.registry import _FACTS
from mindformers_core.tensor_parallel import DTensor, distribute_tensor, local_map

pytestmark = pytest.mark.usefixtures("rank_0_of_4")
MESH = init_device_mesh((2, 2), ("dp", "tp"))
ARRAY = np.arange(32, dtype=np.float32).reshape(4, 8)


def placed(*entries):
    return distribute_tensor(Tensor(ARRAY), layout(*entries), MESH)


def test_constructors_and_properties():
    x = placed("dp", "tp")
    assert x.shape == (4, 8) and x.ndim == x.dim() == 2 and x.size == x.numel() == 32 and len(x) == 4
    assert x.nbytes == 128 and x.dtype == ms.float32 and x.mesh == MESH
    assert x.layout == Layout.on(MESH, (("dp",), ("tp",)))
    assert type(x.to_local()) is Tensor and x.to_local().shape == (2, 4)
    np.testing.assert_array_equal(x.to_local().asnumpy(), ARRAY[:2, :4])
    again = DTensor.from_local(x.to_local(), layout("dp", "tp"), MESH)
    assert again.shape == (4, 8) and again.layout == x.layout
    assert DTensor.from_local(Tensor(ARRAY), Layout.on(MESH, ((), ()), {"tp": "sum"})).shape == (4, 8)
    assert placed(None, ("dp", "tp")).to_local().shape == (4, 2)
    assert distribute_tensor(x, layout("tp")).layout == layout("tp", None).bind(MESH)
    assert placed(None).redistribute(layout("dp")).to_local().shape == (2, 8)
    assert x.redistribute(layout("dp", "tp")) is x
    assert x.data is x, "what is read from a DTensor is global"


def test_whole_values_can_be_read():
    x = placed(None, None)
    np.testing.assert_array_equal(x.asnumpy(), ARRAY)
    np.testing.assert_array_equal(np.asarray(x), ARRAY)
    assert x.tolist() == ARRAY.tolist()
    total = x.sum()
    assert float(total) == int(total) == total.item() == ARRAY.sum() and bool(total)
    assert [row.shape for row in placed("dp")] == [(8,)] * 4


@ms.jit
def centred(x):
    return x - x.sum(0)


def test_a_copy_takes_the_whole_and_jit_runs_operator_by_operator():
    np.testing.assert_array_equal(Tensor(placed(None)).asnumpy(), ARRAY)
    with pytest.raises(ValueError, match=r"Tensor\(x\), where x or .* would do, of a DTensor .* only a part"):
        Tensor(placed("dp"))
    assert centred(placed("dp")).shape == (4, 8)
    np.testing.assert_array_equal(centred(Tensor(ARRAY)).asnumpy(), ARRAY - ARRAY.sum(0))


def test_repr_says_what_and_where():
    assert repr(placed("dp", "tp")).startswith(
        "DTensor(shape=(4, 8), dtype=float32, layout=[dp, tp] on (dp=2, tp=2), local="
    )


@pytest.mark.parametrize(
    "read",
    [
        *(np.asarray, float, int, bool, lambda x: x.asnumpy(), lambda x: x.tolist(), lambda x: x.item()),
        *(lambda x: x.strides, lambda x: x.stride(), lambda x: x.get_bytes(), lambda x: x.data_ptr()),
        *(lambda x: x.is_contiguous(), lambda x: x.storage(), lambda x: x.untyped_storage()),
    ],
)
@pytest.mark.parametrize("where", [Layout.on(MESH, (("dp",), ())), Layout.on(MESH, ((), ()), {"tp": "sum"})])
def test_reading_a_part_is_an_error(read, where):
    x = distribute_tensor(Tensor(ARRAY), where)
    with pytest.raises(ValueError, match=r"shape \(4, 8\).*holds only a part.*full_tensor\(\).*to_local\(\)") as caught:
        read(x)
    assert str(where) in str(caught.value)


def test_copies_stay_distributed():
    x = placed("dp")
    for other in (copy.copy(x), copy.deepcopy(x), x.copy(), x.value()):
        assert isinstance(other, DTensor) and other.layout == x.layout and other.shape == x.shape
    assert copy.deepcopy(x).to_local() is not x.to_local()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: distribute_tensor(ARRAY, layout("dp"), MESH), "takes a mindspore.Tensor, not ndarray"),
        (lambda: DTensor.from_local(ARRAY, layout("dp"), MESH), "takes a mindspore.Tensor, not ndarray"),
        (lambda: DTensor.from_local(placed("dp"), layout("dp"), MESH), "a DTensor already: use redistribute"),
        (lambda: distribute_tensor(Tensor(ARRAY[:3]), layout("dp"), MESH), "dim 0 has size 3.*dp.*2 parts"),
        (lambda: placed("dp", "tp", "dp"), "3 entries, but the tensor has 2 dims"),
        (lambda: placed("tq"), "unknown mesh axis 'tq'.*did you mean 'tp'"),
        (lambda: placed("dp", "dp"), "'dp' is used twice"),
        (lambda: distribute_tensor(Tensor(ARRAY), layout("dp")), "on no mesh yet"),
        (lambda: distribute_tensor(Tensor(ARRAY), 7, MESH), "7 is no layout"),
        (lambda: placed().redistribute(Layout((4,), ("dp",))("dp")), "on another mesh"),
        (
            lambda: placed() + distribute_tensor(Tensor(ARRAY), layout(), init_device_mesh((4,), ("tp",))),
            "operator 'Add.*different meshes",
        ),
        (lambda: len(placed().sum()), "without dims"),
        (lambda: placed() + ARRAY, "tensors, numbers.*ndarray"),
        (lambda: placed().redistribute(layout("tp")).add_(placed()), "another tensor in another layout"),
        (
            lambda: distribute_tensor(Parameter(Tensor(ARRAY), name="w"), Layout.on(MESH, ((), ()), {"tp": "sum"})),
            "parameter 'w'.*sharded or replicated",
        ),
        (lambda: placed()[4], "index 4 is out of range for dim 0 of size 4"),
        (lambda: placed()[0, 0, 0], "3 indices for a tensor of 2 dims"),
        (lambda: placed()[placed() > 0], "indexed by bools"),
        (lambda: placed().__setitem__(slice(None, None, -1), 0.0), "a slice with a negative step"),
        (lambda: placed()["a"], "not str"),
        (lambda: placed() @ distribute_tensor(Tensor(ARRAY), layout(), MESH), r"operator MatMul.*\(4, 8\), \(4, 8\)"),
        (lambda: local_map(ops.tanh, layout(), layout(), varying=("pt",))(placed()), "unknown mesh axis 'pt'"),
        (lambda: local_map(lambda x: 1.0, layout(), layout())(placed()), "takes a mindspore.Tensor, not float"),
    ],
)
def test_errors_name_what_is_wrong(make, message):
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        make()


def test_an_operator_without_a_rule_says_how_to_register_one(monkeypatch):
    monkeypatch.delitem(_FACTS, "Erfinv")
    x = placed("dp")
    with pytest.raises(ValueError, match=r"'Erfinv' has no rule.*gather=True.*@register_operator\('Erfinv'\)"):
        ops.erfinv(x / 100)
    try:
        register_operator("Erfinv")(elementwise)
        result = ops.erfinv(x / 100)
        assert result.layout == x.layout
        np.testing.assert_allclose(result.to_local().asnumpy(), ops.erfinv(Tensor(ARRAY[:2] / 100)).asnumpy())
        with pytest.raises(ValueError, match="'Erfinv' already has a rule"):
            register_operator("Erfinv")(elementwise)
    finally:
        _FACTS.pop("Erfinv")  # and monkeypatch enters MindSpore's


def test_a_rule_that_foretells_another_shape_is_named(monkeypatch):
    monkeypatch.delitem(_FACTS, "BesselI0")
    try:
        register_operator("BesselI0")(lambda x: _FACTS["Transpose"].rule(x))
        with pytest.raises(ValueError, match="operator 'BesselI0' returned a local tensor.*the rule is wrong"):
            ops.bessel_i0(placed("dp"))
    finally:
        _FACTS.pop("BesselI0")


def test_numbers_in_arguments_are_told_apart():
    """`1`, `1.0` and `True` are equal, and yet other programs, as 0.0 and -0.0; so are attributes of primitives."""
    x = distribute_tensor(Tensor(ARRAY.astype(np.int32)), layout("dp"), MESH)
    for one, dtype in ((1, ms.int32), (1.0, ms.float32), (True, ms.int32)):
        assert (x * one).dtype == dtype and (x * one)._meta.dtype == str(dtype).lower()
    assert (x * 2).to_local()[0, 1] == 2 and (x * 3).to_local()[0, 1] == 3
    y = placed(None, "tp")
    zeros = [ops.masked_fill(y, y == y, zero).to_local().asnumpy() for zero in (0.0, -0.0)]
    assert [np.signbit(zero).all() for zero in zeros] == [False, True]
    assert [len(ops.Unstack(axis=axis)(y)) for axis in (0, 1)] == [4, 8]
    columns, rows = (ops.Sort(axis=axis, descending=True)(y)[0] for axis in (0, 1))
    assert columns.layout == y.layout and rows.layout != y.layout
    np.testing.assert_array_equal(columns.to_local().asnumpy(), ARRAY[::-1, :4])


def test_plain_tensors_are_whole_ones():
    x, row = placed("dp", "tp"), Tensor(ARRAY[0])
    for result in (x + row, row + x, ops.add(row, x)):
        assert result.layout == x.layout
        np.testing.assert_array_equal(result.to_local().asnumpy(), (ARRAY + ARRAY[0])[:2, :4])


def test_a_parameter_keeps_its_name_and_gets_smaller():
    parameter = Parameter(Tensor(ARRAY), name="weight")
    x = distribute_tensor(parameter, layout("tp"), MESH)
    mine = x.to_local()
    assert isinstance(mine, Parameter) and mine.name == "weight" and mine.shape == (2, 8)
    assert mine.global_shape == (4, 8) and mine.layout == layout("tp", None).bind(MESH) and x.shape == (4, 8)
    np.testing.assert_array_equal((placed() + mine).layout.dims[0], ("tp",))  # a placed Parameter is known as such


def test_kinds_of_indices():
    x = placed("dp", "tp")
    indices = [
        1,
        -1,
        slice(None),
        slice(1, 3),
        (slice(None), slice(0, 8, 2)),
        (..., 3),
        (None, 2),
        (0, slice(2, 4)),
        (..., None),
        (slice(None), [1, 2]),
    ]
    for index in indices:
        assert x[index].shape == ARRAY[index].shape, index
    assert x[:, Tensor(np.int32([[0, 1], [2, 3]]))].shape == (4, 2, 2)
    assert x[Tensor(np.int32(2))].shape == (8,)
    assert x[np.int64(1)].shape == (8,)


def test_zero_is_linear():
    """Python's `sum` begins with 0: partial sums pass through it."""
    x = distribute_tensor(Tensor(ARRAY), Layout.on(MESH, ((), ()), {"tp": "sum"}))
    assert (0 + x).layout == (x + 0.0).layout == (x - 0).layout == sum([x, x]).layout == x.layout
    assert not (x + 1).layout.partial and not (1 - x).layout.partial
