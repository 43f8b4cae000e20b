"""The rules of operators: shapes, every placement that they accept on simulated ranks, and what they call linear."""

import itertools
import math
import zlib

import mindspore as ms
import numpy as np
import pytest
from mindspore.ops.auto_generate import FlashAttentionScore
from operator_calls import ALL_CALLS, CALLS, is_many
from support import simulated_ranks as ranks

from mindformers_core.algorithms.distributed_operators import ALGORITHMS
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import (
    OperatorCall,
    TensorMeta,
    resolve,
    signature_of,
    tensor_meta,
)
from mindformers_core.operators.resolve import alternatives
from mindformers_core.redistribution import CPU, plan_redistribution

MESH = init_device_mesh((2, 2), ("a", "b"))
COMBINATIONS = 24  # of input layouts, a call; five times as many at night
ARRIVING = 3  # of these, with which every layout of an output is asked for


def all_cases(test):
    return pytest.mark.parametrize("call", CALLS, ids=str)(test)


def fill(value, kind, replacements):
    """`value` with the next replacement in the place of every instance of `kind`."""
    if isinstance(value, kind):
        return next(replacements)
    if isinstance(value, (tuple, list)):
        return type(value)(fill(entry, kind, replacements) for entry in value)
    return value


def tensors_of(call):
    arguments = [*call.args, *call.named.values()]
    flat = itertools.chain.from_iterable(value if is_many(value) else (value,) for value in arguments)
    return [value for value in flat if isinstance(value, np.ndarray)]


def meta_of(array, layout=None):
    return tensor_meta(array.shape, str(array.dtype), layout)


def ask(call, metas):
    """The signature, and the arguments with metas in them."""
    rest = iter(metas)
    args = fill(list(call.args), np.ndarray, rest)
    named = {name: fill(value, np.ndarray, rest) for name, value in call.named.items()}
    return signature_of(call.name, args, named), args, named


def compute(function, args, named, tensors):
    """All outputs of a call on these tensors."""
    rest = iter(tensors)
    args = fill(list(args), TensorMeta, rest)
    result = function(*args, **{name: fill(value, TensorMeta, rest) for name, value in named.items()})
    return result if isinstance(result, tuple) else (result,)


def shape_of(signature, dims):
    return tuple(math.prod(signature.sizes[factor] for factor in factors) for factors in dims)


@all_cases
def test_the_factors_give_the_shapes(call):
    tensors = tensors_of(call)
    metas = [meta_of(tensor) for tensor in tensors]
    signature, args, named = ask(call, metas)
    outputs = compute(call.function, args, named, tensors)
    assert [shape_of(signature, dims) for dims in signature.inputs] == [tensor.shape for tensor in tensors]
    assert [shape_of(signature, dims) for dims in signature.outputs] == [np.shape(output) for output in outputs]
    for factors in (signature.reduced, signature.whole, signature.distributed):
        assert set(factors) <= set(signature.sizes)
    assert set(signature.distributed.values()) <= set(ALGORITHMS)
    assert all(group <= set(range(len(tensors))) for group in signature.linear)
    for dims in (*signature.inputs, *signature.outputs):
        named_once = [factor for factors in dims for factor in factors]
        assert len(named_once) == len(set(named_once)), "a factor stands twice in one tensor"


def layouts_of(array):
    """All layouts on the mesh: each axis cuts a dim, carries terms of a sum, is marked varying, or does nothing."""
    choices = [None, *range(array.ndim), *(("partial", "varying") if array.dtype.kind == "f" else ())]
    for a, b in itertools.product(choices, repeat=2):
        for order in ("ab", "ba") if a == b and isinstance(a, int) else ("ab",):
            dims = [[axis for axis in order if {"a": a, "b": b}[axis] == dim] for dim in range(array.ndim)]
            marks = {"partial": [], "varying": []}
            for axis, choice in (("a", a), ("b", b)):
                if isinstance(choice, str):
                    marks[choice].append(axis)
            if all(size % 2 ** len(axes) == 0 for size, axes in zip(array.shape, dims)):
                yield Layout.on(MESH, dims, dict.fromkeys(marks["partial"], "sum"), marks["varying"])


def combinations(tensors, rng, most=COMBINATIONS):
    """Layouts for every tensor: all there are, or that many at random."""
    each = [list(layouts_of(tensor)) for tensor in tensors]
    if math.prod(map(len, each)) <= most:
        return list(itertools.product(*each))
    return [[options[rng.integers(len(options))] for options in each] for _ in range(most)]


def moved(local, source, target, array):
    """Local tensors after the redistribution from `source` to `target`."""
    for step in plan_redistribution(source, target, array.shape, str(array.dtype), CPU).steps:
        local = ranks.run_forward(step, local)
    return local


@all_cases
def test_shards_compute_what_one_card_does(call, most=COMBINATIONS):
    """For all layouts that may arrive: redistribute as resolved, compute on every rank locally, compare."""
    rng = np.random.default_rng(zlib.crc32(str(call).encode()))
    tensors, expected = tensors_of(call), None
    for layouts in combinations(tensors, rng, most):
        metas = [meta_of(tensor, layout) for tensor, layout in zip(tensors, layouts)]
        asked = ask(call, metas)
        expected = expected or compute(call.function, *asked[1:], tensors)
        resolution = resolve(OperatorCall(call.name, asked[0], tuple(metas), MESH, CPU))
        check_resolution(call, asked, tensors, layouts, resolution, expected, rng)


@pytest.mark.nightly
@all_cases
def test_more_layouts(call):
    test_shards_compute_what_one_card_does(call, 5 * COMBINATIONS)


@all_cases
def test_alternatives_compute_what_one_card_does(call):
    """Every choice that the layout wanted of an output, or that of an input, gives rise to: as the look-ahead asks."""
    rng = np.random.default_rng(zlib.crc32(str(call).encode()) + 1)
    tensors = tensors_of(call)
    signature, args, named = ask(call, list(map(meta_of, tensors)))
    expected = compute(call.function, args, named, tensors)
    outputs = [np.asarray(output, float) for output in expected]
    wanted = [(dims, layout) for dims, output in zip(signature.outputs, outputs) for layout in layouts_of(output)]
    wanted = [(dims, layout) for dims, layout in wanted if not layout.partial and not layout.varying]
    for layouts in combinations(tensors, rng)[-ARRIVING:]:
        metas = [meta_of(tensor, layout) for tensor, layout in zip(tensors, layouts)]
        ways = alternatives(OperatorCall(call.name, signature, tuple(metas), MESH, CPU), wanted)
        asked = ask(call, metas)
        for resolution in {(way.outputs, way.inputs): way for way in ways}.values():
            check_resolution(call, asked, tensors, layouts, resolution, expected, rng)


def check_resolution(call, asked, tensors, layouts, resolution, expected, rng):
    """Compute on every rank with the inputs moved as resolved; shapes and values are the parts of one card's."""
    signature, args, named = asked
    locals_ = []
    for tensor, arriving, needed in zip(tensors, layouts, resolution.inputs):
        local = ranks.distribute(tensor, arriving, rng) if tensor.dtype.kind == "f" else cut(tensor, arriving)
        arriving = arriving if tensor.dtype.kind == "f" else arriving.replace(varying=())
        locals_.append(moved(local, arriving, needed, tensor))
    results = on_ranks(call, signature, resolution, args, named, locals_, tensors)
    for number, (layout, whole) in enumerate(zip(resolution.outputs, expected)):
        local = {rank: np.asarray(outputs[number], float) for rank, outputs in results.items()}
        shapes = {part.shape for part in local.values()}
        assert shapes == {layout.local_shape(np.shape(whole))}, (layouts, resolution)
        try:
            ranks.assert_close(ranks.collect(local, layout, np.shape(whole)), whole, 1e-7, 1e-9)
        except AssertionError as error:
            raise AssertionError(f"{layouts} -> {resolution}: {error}") from error


def cut(tensor, layout):
    return {rank: tensor[layout.local_slices(tensor.shape, rank)] for rank in MESH.rank_list}


def on_ranks(call, signature, resolution, args, named, locals_, tensors):
    """Rank -> outputs of the local call; a stand-in for the algorithm where a distributed factor is cut."""
    if signature.local.localize is not None:
        outputs = zip(resolution.outputs, signature.outputs)
        shapes = [layout.local_shape(shape_of(signature, dims)) for layout, dims in outputs]
        args, named = signature.local.localize((*args, *named.values()), shapes), {}
    special = [factor for factor in signature.distributed if resolution.choice.axes_of.get(factor)]
    for factor in special:
        locals_ = [
            widened(local, tensor, layout, dims, factor, factor in signature.reduced)
            for local, tensor, layout, dims in zip(locals_, tensors, resolution.inputs, signature.inputs)
        ]
    results = {rank: compute(call.function, args, named, [local[rank] for local in locals_]) for rank in MESH.rank_list}
    for factor in special:
        results = {rank: narrowed(outputs, signature, resolution, factor, rank) for rank, outputs in results.items()}
    return results


def widened(local, tensor, layout, dims, factor, pad):
    """Inputs whole along a factor: gathered, or with zeros where others have theirs, for results that are terms."""
    if (factor,) not in dims or layout.replace(partial=()).divisor(dims.index((factor,))) == 1:
        return local
    dim = dims.index((factor,))
    result = {}
    for rank in MESH.rank_list:
        group = MESH.group(rank, layout.dims[dim])
        parts = [local[other] if not pad or other == rank else np.zeros_like(local[other]) for other in group]
        result[rank] = np.concatenate(parts, dim)
    return result


def narrowed(outputs, signature, resolution, factor, rank):
    """Outputs that keep the factor, cut to this rank's part."""
    kept = []
    for output, dims in zip(outputs, signature.outputs):
        if (factor,) in dims:
            dim, axes = dims.index((factor,)), resolution.choice.axes_of[factor]
            output = np.split(output, MESH.axis_size(*axes), dim)[MESH.group_index(rank, axes)]
        kept.append(output)
    return tuple(kept)


@all_cases
def test_what_is_called_linear_is(call):
    """Additive and homogeneous in all inputs of a group together, the others fixed; in each group by itself."""
    tensors = tensors_of(call)
    signature, args, named = ask(call, [meta_of(tensor) for tensor in tensors])
    rng = np.random.default_rng(3)
    groups = [group for group in signature.linear if all(tensors[index].dtype.kind == "f" for index in group)]
    for group in groups:
        other = [rng.standard_normal(t.shape) if index in group else t for index, t in enumerate(tensors)]
        mixed = [2 * t - 3 * o if index in group else t for index, (t, o) in enumerate(zip(tensors, other))]
        results = [compute(call.function, args, named, given) for given in (tensors, other, mixed)]
        for first, second, both in zip(*results):
            np.testing.assert_allclose(2 * first - 3 * second, both, rtol=1e-9, atol=1e-9)


NONLINEAR = (
    "Exp", "ReLU", "SiLU", "GeLU", "Sigmoid", "Abs", "Square", "Sqrt", "Rsqrt", "Reciprocal", "OnesLike",
    "Softmax", "LogSoftmax", "CumProd", "Sort", "TopK", "ReduceMax", "LayerNorm", "ProdExt", "Std",
)  # fmt: skip


def test_nonlinear_operators_are_not_called_linear():
    calls = [call for call in ALL_CALLS if call.name in NONLINEAR]
    assert {call.name for call in calls} == set(NONLINEAR)
    assert not [call for call in calls if ask(call, list(map(meta_of, tensors_of(call))))[0].linear]


def test_a_partial_sum_passes_a_linear_operator_and_is_reduced_for_another():
    partial = Layout.on(MESH, ((), ()), {"a": "sum"})
    x = tensor_meta((4, 8), "float32", partial)
    assert resolve(OperatorCall("Neg", signature_of("Neg", [x]), (x,), MESH, CPU)).outputs == (partial,)
    assert not resolve(OperatorCall("Exp", signature_of("Exp", [x]), (x,), MESH, CPU)).outputs[0].partial


@pytest.mark.parametrize("number", [1, 0.5, True, np.float32(1), np.int64(-2), 1j, np.complex64(1j)], ids=repr)
@pytest.mark.parametrize("name", ["Add", "AddExt", "AddScalar", "Sub", "SubExt", "SubScalar"])
def test_a_sum_with_a_number_in_it_is_not_linear(name, number):
    """Every rank would add the number to its term."""
    x = tensor_meta((4, 8), "float32")
    assert signature_of(name, [x, number]).linear == signature_of(name, [number, x]).linear == ()
    assert signature_of(name, [x, type(number)(0)]).linear == ({0},)
    assert signature_of(name, [x, x, number]).linear == ({0, 1},)  # an alpha


FLASH = {  # layout -> (number of it, shapes of query, key and value for 4 heads in 2 groups of 2, mask)
    "BSH": (0, [(2, 6, 64), (2, 8, 32), (2, 8, 32)], (2, 1, 6, 8)),
    "BNSD": (1, [(2, 4, 6, 16), (2, 2, 8, 16), (2, 2, 8, 16)], (2, 4, 6, 8)),
    "SBH": (2, [(6, 2, 64), (8, 2, 32), (8, 2, 32)], (6, 8)),
    "BSND": (3, [(2, 6, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16)], (1, 1, 6, 8)),
    "TND": (4, [(6, 4, 16), (8, 2, 16), (8, 2, 16)], (6, 8)),
}


@pytest.mark.parametrize("layout", FLASH)
def test_fused_attention_is_cut_along_batch_and_heads(layout):
    """The local call's shapes are what MindSpore infers on the meta device: no kernel is on CPU."""
    number, shapes, mask = FLASH[layout]
    dims = [[{"B": ["a"], "N": ["b"], "H": ["b"]}.get(letter, []) for letter in layout]] * 3
    dims.append([["a"] * (mask[0] == 2), ["b"] * (mask[1] == 4), [], []] if len(mask) == 4 else [[], []])
    metas = [tensor_meta(shape, "float16", Layout.on(MESH, cut)) for shape, cut in zip((*shapes, mask), dims)]
    args = [*metas[:3], None, None, None, metas[3], None, None, None, 4, 1.0, 0.25, 2**31 - 1, 2**31 - 1, 0, number, 0]
    signature = signature_of("FlashAttentionScore", args)
    resolution = resolve(OperatorCall("FlashAttentionScore", signature, tuple(metas), MESH, CPU))
    assert not resolution.price.communication and [r.dims for r in resolution.inputs] == [m.layout.dims for m in metas]
    outputs = zip(resolution.outputs, signature.output_shapes)
    local_shapes = [given.local_shape(shape) for given, shape in outputs]
    local_args = signature.local.localize(args, local_shapes)
    assert local_args[10] == 2
    with ms.DeviceCtx("meta"):
        tensors = [ms.Tensor(np.zeros(meta.local_shape, np.float16)) for meta in metas]
        attention = FlashAttentionScore(local_args[10], 1.0, 0.25, input_layout=layout)
        lengths = ((6,), (8,)) if layout == "TND" else (None, None)
        results = attention(*tensors[:3], None, None, None, tensors[3].astype(ms.uint8), None, *lengths)
    assert [tuple(result.shape) for result in results] == local_shapes


def test_heads_of_one_group_are_cut_only_where_the_groups_are_apart():
    """A second cut of 2 groups of 2 heads: queries go on to be cut, keys and values are in whole groups."""
    query, key = Layout.on(MESH, ((), (), ("a", "b"))), Layout.on(MESH, ((), (), ("a",)))
    metas = [tensor_meta((2, 6, 64), "float16", query), *[tensor_meta((2, 6, 32), "float16", key)] * 2]
    asked = signature_of("FlashAttentionScore", [*metas, *[None] * 7, 4]), tuple(metas)
    resolution = resolve(OperatorCall("FlashAttentionScore", *asked, MESH, CPU))
    assert (resolution.inputs[0].dims, resolution.inputs[1].dims) == (query.dims, key.dims)
    assert resolution.outputs[3].dims == query.dims


TERMS = Layout.on(MESH, ((),), {"a": "sum"})
CUT_ALONG_THEIR_OWN_DIM = [
    ("SumExt", [(4, 8), 0], TERMS),
    ("MeanExt", [(4, 8), 0], TERMS),
    ("ReduceMax", [(4, 8), 0, False], Layout.on(MESH, ((),))),
    ("Argmax", [(4, 8), 0, 34], Layout.on(MESH, ((),))),
    ("Softmax", [(4, 8), 0], Layout.on(MESH, (("a",), ()))),
    ("Gather", [(4, 8), "indices", 0, 0], TERMS.replace(dims=((), ()))),
    ("IndexSelect", [(4, 8), 0, "indices"], TERMS.replace(dims=((), ()))),
    ("Embedding", ["indices", (4, 8)], TERMS.replace(dims=((), ()))),
]


@pytest.mark.parametrize(("name", "args", "expected"), CUT_ALONG_THEIR_OWN_DIM, ids=str)
def test_what_is_reduced_or_looked_up_need_not_be_gathered(name, args, expected):
    """The tensor is cut along the dim that the operator works on, and stays so."""
    table = tensor_meta((4, 8), "float32", Layout.on(MESH, (("a",), ())))
    indices = tensor_meta((8,), "int64", Layout.on(MESH, ((),)))
    args = [table if value == (4, 8) else indices if value == "indices" else value for value in args]
    metas = [value for value in args if isinstance(value, TensorMeta)]
    resolution = resolve(OperatorCall(name, signature_of(name, args), tuple(metas), MESH, CPU))
    assert resolution.inputs == tuple(meta.layout for meta in metas) and not resolution.price.communication
    assert resolution.outputs == (expected,)


def test_dropout_always_runs_its_algorithm():
    x, scalar = tensor_meta((4, 8), "float32"), tensor_meta((), "int64")
    plain = signature_of("Dropout", [x, 0.5, 0, 0])
    assert (plain.run, len(plain.outputs), plain.linear) == ("dropout", 2, ())
    mint = signature_of("FuncDropoutExt", [x, 0.5, True, False, scalar, scalar])
    assert (mint.run, len(mint.outputs), len(mint.inputs)) == ("func_dropout", 1, 3)
    still = signature_of("FuncDropoutExt", [x, 0.5, False, False, scalar, scalar])
    assert (still.run, still.linear) == (None, ({0},))
