"""The table of what gradients keep says what MindSpore keeps, for every operator in it, and views are what it views."""

import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops
from operator_calls import ALL_CALLS, Call
from support.generated_modules import module_source, program_of, write

from mindformers_core.operators.registry import facts_of, registered_operators
from mindformers_core.operators.saved import UNMEASURED, Operand
from mindformers_core.operators.views import contiguous_strides, is_contiguous, reshaped

SINGLE = np.random.default_rng(4).uniform(1, 2, (4, 8)).astype(np.float32)
# Calls that make their inputs into other tensors before they save them.
FLATTENING = ("DeprecatedTake",)
# Calls that are several other operators on CPU.
AS_OTHERS = ("CumProd", "Mish")
MORE = [
    Call("Slice", [SINGLE, (0, 2), (4, 6)], None),
    Call("Outer", [SINGLE[0], SINGLE[1]], None),
    Call("Dense", [SINGLE, SINGLE, SINGLE[:, 0]], None),
]
BROKEN_IN_GRAPHS = {"ToDevice([4, 8], CPU)", "EmptyLike([4, 8])"}
NO_KERNEL_FOR_ARGUMENTS = ("Addcdiv", "Addcmul", "Copy")


def calls():
    for call in [*ALL_CALLS, *MORE]:
        left_out = (call.broken or call.gradient) and str(call) not in BROKEN_IN_GRAPHS
        if call.runs == "CPU" and not left_out and call.name not in (*FLATTENING, *AS_OTHERS, *NO_KERNEL_FOR_ARGUMENTS):
            yield call


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """The functions of all calls."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield write(folder, "calls_that_save", module_source([program_of(call)[0] for call in calls()]))
        sys.modules.pop("calls_that_save", None)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def kept(function, values, needing, view):
    """What is saved: `("input", number)`, `("output", number)` or `("own", bytes)`, sorted, and bytes of the results.

    Args:
        function: of the tensors.
        values: arrays.
        needing: numbers of those that need a gradient.
        view: number of the one that is a view, or None.
    """
    zero, packed, held = Parameter(Tensor(np.float32(0))), [], {}

    def forward(zero):
        inputs = []
        for number, value in enumerate(values):
            whole = Tensor(value.reshape(1, *value.shape)) if number == view else Tensor(value)
            made = ops.add(whole, zero) if number in needing else whole
            inputs.append(ops.reshape(made, value.shape) if number == view else made)
        with ms.saved_tensors_hooks(lambda tensor: (packed.append(tensor), tensor)[1], lambda tensor: tensor):
            results = function(*inputs)
        held["inputs"], held["results"] = inputs, results
        floats = [ops.cast(result, ms.float32).sum() for result in results if result.dtype.is_floating_point]
        return sum(floats) + zero

    ms.value_and_grad(forward, 0)(zero)
    known = {address(one): ("output", number) for number, one in reversed([*enumerate(held["results"])])}
    known |= {address(one): ("input", number) for number, one in enumerate(held["inputs"])}
    names = {address(one): known.get(address(one), ("own", one.untyped_storage().nbytes())) for one in packed}
    return sorted(names.values()), held["results"]


def expected(call, values, places, needing, view, results):
    """The same by the table."""
    row = facts_of(call.name).saves
    operands = [
        Operand(place, value.shape, str(value.dtype), value.itemsize, number in needing)
        for number, (place, value) in enumerate(zip(places, values))
    ]
    made = [
        Operand(number, tuple(one.shape), str(one.dtype).lower(), one.itemsize) for number, one in enumerate(results)
    ]
    found = []
    for operand in row.kept_inputs(operands):
        number = next(number for number, other in enumerate(operands) if other is operand)
        is_copied = number == view and not row.as_they_are
        found.append(("own", operand.nbytes) if is_copied else ("input", number))
    found += [("output", result.place) for result in row.kept_outputs(operands, made)]
    return sorted([*found, *(("own", nbytes) for nbytes in row.internal_sizes(operands, made))])


@pytest.mark.parametrize("number, call", list(enumerate(calls())), ids=str)
def test_a_row_is_what_is_kept(module, number, call):
    """Whichever of the inputs needs a gradient, and whichever of them is a view."""
    assert facts_of(call.name).saves is not UNMEASURED
    program, places = program_of(call)
    function, values = getattr(module, f"call_{number}"), program.values
    floats = [number for number, value in enumerate(values) if value.dtype == np.float32]
    cases = [({one}, None) for one in floats] + [(set(floats), None)] * (len(floats) > 1)
    twice = call.name == "FmodTensor"  # makes two copies of a view
    cases += [(set(floats), view) for view in range(len(values)) if values[view].ndim and floats and not twice]
    for needing, view in cases:
        found, results = kept(function, values, needing, view)
        assert found == expected(call, values, places, needing, view, results), (needing, view)


def test_every_record_is_whole_and_measured():
    """Of each operator it is said what its gradient keeps, and that was measured, or can't be on CPU."""
    measured = {call.name for call in calls()}
    assert all(facts_of(name).saves is not None for name in registered_operators())
    assert {name for name in registered_operators() if facts_of(name).saves is not UNMEASURED} == measured | {
        "Attention", "AttentionToChunks", "RMSNorm", "Rotary",
    }  # fmt: skip


def test_what_is_unmeasured_keeps_all_that_is_floating():
    operands = [Operand(0, (2,), "float32", 4), Operand(1, (2,), "int32", 4)]
    assert facts_of("NobodysOperator").saves is facts_of("Swiglu").saves is UNMEASURED
    assert UNMEASURED.kept_inputs(operands) == UNMEASURED.kept_outputs(operands, operands) == operands[:1]


@pytest.mark.parametrize("seed", range(200))
def test_reshapes_of_views(seed):
    """A reshape is a view where NumPy says so, with its strides."""
    random = np.random.default_rng(seed)
    array = np.zeros(random.integers(1, 5, random.integers(1, 5)))
    shape, strides = array.shape, tuple(stride // 8 for stride in array.strides)
    assert is_contiguous(shape, strides) and is_contiguous(shape, contiguous_strides(shape))
    for _ in range(2):
        array = array.transpose(random.permutation(array.ndim))
        array = array[tuple(slice(0, random.integers(1, size + 1)) for size in array.shape)]
    target = tuple(random.permutation([*array.shape, 1])) if random.integers(2) else _regrouped(random, array.size)
    assert np.prod(target) == array.size
    result = array.reshape(target)
    (found,) = reshaped(None, (), {}, array.shape, tuple(stride // 8 for stride in array.strides), [target])
    assert (found is not None) == np.shares_memory(result, array)
    assert is_contiguous(array.shape, tuple(stride // 8 for stride in array.strides)) == array.flags.c_contiguous
    if found is not None:
        same = [one * 8 == other for size, one, other in zip(target, found, result.strides) if size != 1]
        assert all(same)


def _regrouped(random, count):
    """A shape with so many elements, of random factors."""
    sizes = []
    while count > 1:
        factor = int(random.choice([one for one in range(2, count + 1) if count % one == 0]))
        sizes.append(factor)
        count //= factor
    return tuple(sizes)
