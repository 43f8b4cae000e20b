"""`LossScale` and `all_finite` on one rank: the scale after every step, unscaled values, dtypes."""

import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp

from mindformers_core.mesh import init_device_mesh
from mindformers_core.zero import LossScale, MixedPrecision, all_finite
from mindformers_core.zero.loss_scale import is_finite

DTYPES = (ms.float16, ms.float32, ms.bfloat16)


def tensor(values, dtype=ms.float32):
    return Tensor(np.array(values, np.float32), ms.float32).astype(dtype)


def numbers(values):
    return values.astype(ms.float32).asnumpy().tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_that_is_not_finite_is_found(dtype):
    fine = tensor(np.full((3, 5), 60000.0), dtype)  # their sum is beyond float16, they aren't
    assert all_finite(None, (fine, tensor(1.0, dtype))) is is_finite(fine) is True
    for bad in (np.inf, -np.inf, np.nan):
        spoilt = np.ones((3, 5), np.float32)
        spoilt[2, 4] = bad
        assert all_finite(None, [fine, tensor(spoilt, dtype)]) is is_finite(tensor(spoilt, dtype)) is False
        assert all_finite(None, [tensor(bad, dtype), fine]) is False


def test_dtypes_may_be_mixed_and_nothing_is_finite(rank_0_of_4):
    assert all_finite(None, [tensor([1.0], dtype) for dtype in DTYPES])
    assert not all_finite(None, [*(tensor([1.0], dtype) for dtype in DTYPES), tensor([np.nan])])
    assert all_finite(None, ())
    assert all_finite(init_device_mesh((1,), ("dp",)), ())
    assert not all_finite(init_device_mesh((1,), ("dp",)), [tensor([np.inf])])


def test_the_scale_halves_at_a_skipped_step_and_doubles_after_a_window_of_finite_ones():
    scale = LossScale(amp.DynamicLossScaler(8, 2, 3))
    fine, bad = (tensor([1.0]),), (tensor([np.inf]),)
    seen = []
    for gradients in (fine, fine, bad, fine, fine, fine, fine, bad, bad, bad, bad, bad):
        assert (scale.unscale(gradients) is None) == (gradients is bad)
        seen.append((scale.value, scale.skipped))
    assert [value for value, _ in seen] == [8, 8, 4, 4, 4, 8, 8, 4, 2, 1, 1, 1]
    assert [skipped for _, skipped in seen] == [0, 0, 1, 1, 1, 1, 1, 2, 3, 4, 5, 6]
    assert isinstance(scale.value, float)


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_restored_scale_goes_on(steps):
    """After each number of steps, through JSON: the window of finite steps, too."""
    fine, bad = (tensor([1.0]),), (tensor([np.inf]),)
    course = (bad, fine, fine, fine, fine, bad, fine, fine, fine, fine)
    unbroken, resumed = (LossScale(amp.DynamicLossScaler(8, 2, 3)) for _ in range(2))
    for gradients in course[:steps]:
        unbroken.unscale(gradients)
    resumed.restore(json.loads(json.dumps(unbroken.state())))
    for gradients in course[steps:]:
        for scale in (unbroken, resumed):
            scale.unscale(gradients)
        assert unbroken.state() == resumed.state()
    assert (resumed.value, resumed.skipped) == (4.0 * 2, 2)
    static = LossScale(amp.StaticLossScaler(1000))
    static.restore(static.state() | {"skipped": 3})
    assert static.state() == {"scale": 1000.0, "counter": None, "skipped": 3}


def test_a_static_scale_stays_and_skips_too():
    scale = LossScale(amp.StaticLossScaler(1000))
    assert scale.unscale((tensor([np.nan]),)) is None
    assert (scale.value, scale.skipped) == (1000.0, 1)
    np.testing.assert_allclose(numbers(scale.unscale((tensor([500.0]),))[0]), [0.5], rtol=1e-6)


def test_the_default_scaler():
    scale = LossScale()
    assert (scale.value, scale.skipped) == (65536.0, 0)
    assert (scale.scaler.scale_window, scale.scaler.scale_factor) == (2000, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_divided_by_the_scale_in_their_dtype(dtype):
    scale = LossScale(amp.StaticLossScaler(2.0**26))  # its reciprocal is zero in float16
    values = [2.0**15, -(2.0**14), 0.0]
    unscaled = scale.unscale([tensor(values, dtype), tensor(2.0**15, dtype)])
    assert isinstance(unscaled, tuple) and [one.dtype for one in unscaled] == [dtype, dtype]
    assert numbers(unscaled[0]) == [2.0**-11, -(2.0**-12), 0.0] and numbers(unscaled[1]) == 2.0**-11


def test_the_scale_that_was_in_the_loss_is_the_one_that_is_taken_out():
    scale = LossScale(amp.DynamicLossScaler(8, 2, 1))  # doubles after each step
    for _ in range(3):
        scaled = tensor([3.0 * scale.value])
        assert numbers(scale.unscale((scaled,))[0]) == [3.0]
    assert scale.value == 64.0


@pytest.mark.parametrize("scaler", [2**16, amp.DynamicLossScaleManager()], ids=["number", "manager"])
def test_another_scaler_is_refused(scaler):
    with pytest.raises(TypeError, match="DynamicLossScaler or StaticLossScaler"):
        LossScale(scaler)


def test_names_and_dtypes_are_the_same_policy():
    names = MixedPrecision("float32", "float16", "bfloat16", "Float16", output="float32")
    dtypes = MixedPrecision(ms.float32, ms.float16, ms.bfloat16, ms.float16, ms.float32)
    assert names == dtypes and hash(names) == hash(dtypes)
    assert dtypes.parameter == "float32" and dtypes.reduce == "bfloat16" and dtypes.gradient == "float16"
    assert MixedPrecision() == MixedPrecision(None, None, None, None, None)


@pytest.mark.parametrize("own", ["float32", "float16", "bfloat16", "float64"])
def test_by_default_all_stays_as_the_cell_has_it_but_halves_are_summed_in_float32(own):
    policy = MixedPrecision()
    summed = "float32" if own in ("float16", "bfloat16") else own
    assert policy.reduce_dtype(own) == policy.gradient_dtype(own) == summed
    assert policy.parameter is policy.compute is policy.output is None


def test_what_is_given_counts():
    policy = MixedPrecision(parameter="float32", compute="float16")
    assert policy.reduce_dtype("float16") == "float32"
    assert MixedPrecision(reduce="float16").reduce_dtype("bfloat16") == "float16"
    assert MixedPrecision(reduce="bfloat16").gradient_dtype("float32") == "bfloat16"
    both = MixedPrecision(reduce="float32", gradient="float16")
    assert (both.reduce_dtype("float16"), both.gradient_dtype("float16")) == ("float32", "float16")


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [
        ("bf16", "bfloat16"),
        ("float61", "float16"),
        ("flaot32", "float32"),
        (ms.int32, "float32"),
        (ms.float64, "float"),
    ],
)
def test_another_dtype_is_named_with_the_nearest(dtype, hint):
    with pytest.raises(
        ValueError, match=rf"MixedPrecision\(compute=.*float32, float16, bfloat16.*did you mean '{hint}"
    ):
        MixedPrecision(compute=dtype)
    with pytest.raises(ValueError, match=r"MixedPrecision\(gradient=True\)"):
        MixedPrecision(gradient=True)
