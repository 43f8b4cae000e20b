"""Operator calls written as source give what the operators give: values and gradients, in PyNative and under jit."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore._c_expression.typing import type_id_to_type
from mindspore.ops import auto_generate
from operator_calls import ALL_CALLS
from support.generated_modules import float_places, gradients_of, module_source, program_of, record, run_jitted, write
from support.nightly import daily
from support.verified_calls import operators_of
from test_operators_as_written import SAMPLES, WITHOUT_KERNEL

from mindformers_core.lowering.operator_source import operator_source
from mindformers_core.operators import tensor_meta
from mindformers_core.operators.registry import registered_operators
from mindformers_core.operators.words import WORDS
from mindformers_core.program.structure import DType

sys.path.append(str(Path(__file__).parent / "ranks"))
from mindspore_calls import CALLS as AUTHORS_CALLS  # noqa: E402
from one_card import draw  # noqa: E402

# Operators that a traced tensor doesn't see (interception.py lets only DTensors through), or that write in place.
UNSEEN = ("stack", "addn", "full_like", "in_place_add")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that modules are imported from."""
    path = tmp_path_factory.mktemp("generated")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        patch.chdir(path)  # for what a failing compilation writes
        yield path


def differentiable(results):
    return [place for place, result in enumerate(results) if result.dtype.kind == "f"]


def compare(what, actual, expected, rtol=1e-5, atol=1e-5):
    assert len(actual) == len(expected), what
    for one, other in zip(actual, expected):
        assert one.dtype == other.dtype and one.shape == other.shape, (
            f"{what}: {one.dtype}{one.shape}, {other.dtype}{other.shape}"
        )
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=what)


@pytest.mark.parametrize("in_graph", daily([False], [False, True]), ids=["pynative", "jit"])
def test_what_authors_write(folder, in_graph):
    """Whole functions, recorded and written anew: as the function itself in PyNative. Their operators are compiled one
    by one below, the functions at night."""
    random, names, programs, expected, slopes = np.random.default_rng(3), [], [], [], []
    for name, (function, inputs) in AUTHORS_CALLS.items():
        if name in UNSEEN:
            continue
        values = [draw(random, shape, kind) for kind, shape in inputs]
        names.append(name)
        programs.append(record(function, values))
        expected.append([function(*values).asnumpy()])
        places = float_places(programs[-1], differentiable(expected[-1]))
        slopes.append(gradients_of(lambda *a, f=function: (f(*a),), values, places, [0]))
    file = f"authors_calls_{in_graph}"
    module = write(folder, file, module_source(programs))
    if in_graph:
        results, gradients = run_jitted(folder, file, programs, list(map(differentiable, expected)))
    for number, (name, program) in enumerate(zip(names, programs)):
        values = [Tensor(value) for value in program.values]
        call, places = getattr(module, f"call_{number}"), float_places(program, differentiable(expected[number]))
        compare(f"{name} in PyNative", [part.asnumpy() for part in call(*values)], expected[number])
        compare(f"gradient of {name} in PyNative", gradients_of(call, values, places, [0]), slopes[number])
        if in_graph:
            compare(f"{name} in jit", results[number], expected[number])
            compare(f"gradient of {name} in jit", gradients[number], slopes[number])


def computed(call):
    """What NumPy gives for a call."""
    result = call.function(
        *[np.asarray(arg) if isinstance(arg, np.ndarray) else arg for arg in call.args], **call.named
    )
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("sixth", daily([3], range(6)))  # with DeprecatedTranspose of no order
def test_calls_of_every_operator(folder, sixth):
    """As NumPy in PyNative, and as PyNative in jit."""
    calls = [call for call in ALL_CALLS if call.runs == "CPU" and not call.broken][sixth::6]
    programs = [program_of(call)[0] for call in calls]
    name = f"operator_calls_as_source_{sixth}"
    module = write(folder, name, module_source(programs))
    expected, flowing = [], []
    for number, (call, program) in enumerate(zip(calls, programs)):
        results = [part.asnumpy() for part in getattr(module, f"call_{number}")(*map(Tensor, program.values))]
        for result, wanted in zip(results, computed(call)):
            tolerance = 2e-3 if np.float16 in (result.dtype, np.asarray(wanted).dtype) or "42" in str(call) else 1e-4
            np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance, err_msg=str(call))
        expected.append(results)
        flowing.append([] if call.gradient else differentiable(results))
    results, gradients = run_jitted(folder, name, programs, flowing)
    for number, (call, program) in enumerate(zip(calls, programs)):
        compare(f"{call} in jit", results[number], expected[number])
        values, places = list(map(Tensor, program.values)), float_places(program, flowing[number])
        slopes = gradients_of(getattr(module, f"call_{number}"), values, places, flowing[number])
        compare(f"gradient of {call} in jit", gradients[number], slopes)


def test_calls_without_a_kernel_infer_on_the_meta_device(folder):
    calls = [call for call in ALL_CALLS if call.runs == "meta"]
    programs = [program_of(call)[0] for call in calls]
    module = write(folder, "calls_without_kernel", module_source(programs))
    for number, (call, program) in enumerate(zip(calls, programs)):
        with ms.DeviceCtx("meta"):
            results = getattr(module, f"call_{number}")(*map(Tensor, program.values))
            shapes = [tuple(result.shape) for result in results if isinstance(result, Tensor)]
        assert shapes[0] == computed(call)[0].shape, str(call)


def test_every_rule_has_a_call():
    """And so an operator of MindSpore 2.10 that it is the rule of: a call whose source isn't known fails above."""
    met = {call.name for call in ALL_CALLS} | operators_of([*SAMPLES, *WITHOUT_KERNEL])
    missing = set(registered_operators()) - met
    assert missing == {  # Einsum is tested by its texts, of each of the others there is a test of its own
        *("Assign", "DeformableOffsets", "Einsum", "RandExt", "RandInt", "RandIntLike", "RandLikeExt", "Randn"),
        *("RandnLike", "RandpermExt", "Attention", "AttentionPart", "AttentionPartGradient", "AttentionToChunks"),
        *("RMSNorm", "Rotary"),
        *("Experts", "ExpertPlaces", "ExpertSizes", "ExpertRows", "ExpertSum", "ExpertCapacity", "ChannelFactors"),
        "TrainedBatchNorm",
    }


def test_an_unknown_operator_says_what_to_do():
    with pytest.raises(ValueError, match=r"operator 'MyScale' has no source.*source='my_package.my_function'"):
        operator_source("MyScale", ())


X, MASK = tensor_meta((4, 8), "float32"), tensor_meta((4, 8), "bool")
WRITTEN = [
    ("MatMul", (X, X, False, True), {}, None, "matmul_impl(x, x, False, True)"),
    ("MatMulExt", (X, X), {}, None, "matmul_ext_op(x, x)"),
    ("MatMulExt", (tensor_meta((1, 1, 8), "float32"), X), {}, None, "ops.tensor_dot(x, x, 1)"),
    ("MatMulExt", (tensor_meta((4, 1), "float32"), X), {}, None, "mul_op(x, x)"),
    ("SplitWithSizeView", (X, (2, 6), 1), {}, None, "x.split((2, 6), 1)"),
    ("SplitTensorView", (X, 4, 1), {}, None, "x.split(4, 1)"),
    ("SplitTensorView", (X, 3, -1), {}, None, "x.split((3, 3, 2), -1)"),
    ("AddExt", (X, X), {}, None, "add_op(x, x)"),
    ("AddScalar", (X, 1.5, 2), {}, None, "add_ext_op(x, 1.5, 2)"),
    ("Concat", ([X, X], 1), {}, None, "concat_impl((x, x), 1)"),
    ("AddN", ([X],), {}, None, "addn_op((x,))"),
    ("Cast", (X, 43), {}, None, "ops.cast(x, ms.float32)"),
    ("ToDtype", (X, ms.bool_), {}, None, "ops.cast(x, ms.bool_)"),
    ("Cast", (X, DType("bfloat16")), {}, None, "ops.cast(x, ms.bfloat16)"),
    ("Muls", (X, np.float32(0.5)), {}, None, "muls_op(x, 0.5)"),
    ("SumExt", (X, -1, True, 42), {}, None, "sum_ext_op(x, -1, True, ms.float16)"),
    ("SumExt", (X, -1, False, None), {}, None, "sum_ext_op(x, -1)"),
    ("SumExt", (X,), {"keepdims": True}, None, "sum_ext_op(x, None, True)"),
    ("MaskedFillScalar", (X, MASK, float("-inf")), {}, None, 'masked_fill_op(x, mask, float("-inf"))'),
    ("MaskedFillScalar", (MASK, MASK, True), {}, None, "mask.masked_fill(mask, True)"),
    ("ReduceMean", (X, (), True), {}, None, "mean_ext_op(x, None, True)"),
    ("ReduceSum", (X, -1, False, True), {}, None, "ops.ReduceSum(False, True) reduce_sum_op(x, -1)"),
    ("DeprecatedSum", (X, 1), {"keepdims": True}, None, "x.sum(1, keepdims=True)"),
    ("Std", (X,), {}, None, "x.std()"),
    ("Std", (X, 1, 1), {}, None, "x.std(1, 1)"),
    ("Std", (X,), {"keepdim": True}, None, "x.std(None, 1, True)"),
    ("Baddbmm", (X, X, X, 2, 1), {}, None, "x.baddbmm(x, x, beta=2)"),
    ("Select", (X, MASK, X), {}, None, "select_op(mask, x, x)"),
    ("Reshape", (X, 2, -1), {}, None, "reshape_op(x, (2, -1))"),
    ("LayerNorm", (X, X, X, -1, -1, 1e-5), {}, None, "ops.LayerNorm(-1, -1, 1e-05) layer_norm_op(x, x, x)"),
    ("Argmax", (X, -1, 35), {}, None, "ops.Argmax(-1, ms.int64) argmax_op(x)"),
    ("BiasAdd", (X, X, 1), {}, None, "ops.BiasAdd('NHWC') bias_add_op(x, x)"),
    ("Sort", (X,), {}, {"axis": 1, "descending": True}, "ops.Sort(1, True) sort_op(x)"),
]


@pytest.mark.parametrize(
    "name, args, kwargs, attributes, wanted", WRITTEN, ids=lambda value: value if type(value) is str else ""
)
def test_how_calls_are_written(name, args, kwargs, attributes, wanted):
    call = operator_source(name, args, kwargs, attributes)
    expression = call.expression(lambda tensor: "mask" if tensor is MASK else "x")
    assert " ".join([*(call.instance or ("", ""))[1:], expression]).strip() == wanted
    assert ("import mindspore as ms" in call.imports) == ("ms." in wanted)


def test_an_instance_is_called_by_the_name_it_got():
    assert operator_source("Gather", (X, X, 0, 0)).expression(lambda _: "x", "gather_op_2") == "gather_op_2(x, x, 0)"


def test_arguments_that_do_not_fit():
    with pytest.raises(TypeError, match=r"operator 'Exp' takes \(input\) and got 2 besides"):
        operator_source("Exp", (X, 2))
    with pytest.raises(TypeError, match=r"operator 'SumExt' takes .* and got 'over' besides"):
        operator_source("SumExt", (X,), {"over": 1})
    with pytest.raises(TypeError, match="operator 'MatMulExt' needs its argument other"):
        operator_source("MatMulExt", (X,))


def test_words_have_the_numbers_that_mindspore_gives_them():
    for parameter, words in WORDS.items():
        for number, word in words.items():
            if parameter == "dtype":
                assert str(type_id_to_type(number)).lower() == word
            elif word != "r":  # which MindSpore reads by itself
                assert auto_generate.str_to_enum("", parameter.partition(" ")[0], word) == number
