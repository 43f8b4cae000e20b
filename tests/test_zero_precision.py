"""`MixedPrecision`: names for whatever is given, and what the defaults come to."""

import mindspore as ms
import pytest

from mindformers_core.zero import MixedPrecision


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
