"""What the rules of operators say of calls that don't fit, and how a user adds a rule."""

import pytest
from support.documents import code_blocks
from support.launch import ROOT

from mindformers_core.operators import Signature, elementwise, register_operator, registry, signature_of, tensor_meta

F32 = "float32"
ERRORS = [
    ("NoSuchThing", [], "no rule"),
    ("Softmaxx", [], "did you mean 'Softmax'"),
    ("STFT", [], r"layouts are unknown: with register"),  # nothing is near enough to be meant
    ("ConstantPadND", [(4, 8), (1, 2, 3)], "at most 2 pairs"),
    ("ConstantPadND", [(4, 8), (-5, -4)], "takes more from dim 1"),
    ("NLLLoss", [(4, 8), (3,), (8,), 1], "don't fit"),
    ("SoftmaxCrossEntropyWithLogits", [(4, 8), (4, 4)], "don't fit n c"),
    ("SparseSoftmaxCrossEntropyWithLogits", [(4, 8), (8,)], "dim 0 of input 1 has size 8, but 'n' is 4"),
    ("DiagExt", [(2, 4, 8)], "a vector or a matrix"),
    ("FlashAttentionScore", [(2, 4, 64), (2, 4, 48), (2, 4, 48), *[None] * 7, 4], "4 heads .* don't fit 3"),
    (
        "FlashAttentionScore",
        [(2, 4, 64), (3, 4, 32), (3, 4, 32), *[None] * 7, 4],
        "dim 0 of input 1 has size 3, but 'b' is 2",
    ),
    ("FlashAttentionScore", [(2, 4, 64)] * 3 + [None] * 7 + [4, 0.5], "keep_prob=0.5"),
    ("FlashAttentionScore", [(2, 4, 64)] * 3 + [None] * 7 + [4, 1.0, 1.0, 1, 1, 0, 5], "not one of BSH"),
    ("SumExt", [(4, 8), 2], "dim 2 is out of range"),
    ("SumExt", [(4, 8), (0, -2)], "twice"),
    ("SumExt", [(), 1], "out of range"),
    ("DeprecatedSum", [(4, 8), 0, None, False, 3], "initial=3"),
    ("Argmax", [(4, 8), 5, 34], "out of range"),
    ("Softmax", [(4, 8), 7], "out of range"),
    ("Reshape", [(4, 8), (3, -1)], r"\(4, 8\) of 32 elements can't become \(3, -1\)"),
    ("Reshape", [(4, 8), (4, 9)], "can't become"),
    ("Reshape", [(4, 8), (-1, -1)], "can't become"),
    ("Reshape", [(4, 8), ("4", 8)], "made of ints"),
    ("Transpose", [(4, 8), (0,)], "orders 1 dims"),
    ("Transpose", [(4, 8), (0, 0)], "twice"),
    ("TExt", [(2, 4, 8)], "up to 2 dims"),
    ("ExpandDims", [(4, 8), 4], "out of range"),
    ("BroadcastTo", [(4, 8), (3, 8)], "size 4 meets 3"),
    ("BroadcastTo", [(4, 8), (8,)], "fewer dims"),
    ("BroadcastTo", [(4, 8), (-1, 4, 8)], "needs its size"),
    ("Tile", [(4, 8), (0, 1)], "at least once"),
    ("SplitTensor", [(4, 8), 0, 0], "at least 1"),
    ("SplitWithSize", [(4, 8), (3, 6), 1], "don't make up dim 1"),
    ("Split", [(4, 8), 1, 3], "3 equal pieces"),
    ("Chunk", [(4, 8), 0, 1], "at least 1"),
    ("StridedSlice", [(4, 8), (0, 0), (1,), (1, 1)], "different lengths"),
    ("StridedSlice", [(4, 8), (9,), (10,), (1,), 0, 0, 0, 0, 1], "out of range"),
    ("Slice", [(4, 8), (0, 0), (5, 8)], "not all in dim 0"),
    ("Narrow", [(4, 8), 1, 6, 4], "not all in dim 1"),
    ("SelectExtView", [(4, 8), 0, 4], "out of range"),
    ("Gather", [(4, 8), (2,), 2, 0], "out of range"),
    ("Gather", [(4, 8), (2, 3), 1, 1], "batch_dims=1"),
    ("GatherD", [(4, 8), 1, (4,)], "as many dims"),
    ("GatherD", [(4, 8), 1, (5, 2)], "larger than"),
    ("Embedding", [(2,), (8, 4), None, 1.0], "max_norm"),
    ("OneHot", [(2,), -1], "number of classes"),
    ("TopK", [(4, 8), 9], "k=9"),
    ("Triu", [(4,)], "needs 2 dims"),
    ("LayerNormExt", [(4, 8), (4,)], "not the end"),
    ("LayerNorm", [(4, 8), (4,), (8,), -1, -1], "dim 0 of input 1 has size 4, but 'N1' is 8"),
    ("RmsNorm", [(4, 8), (4,)], "dim 0 of input 1 has size 4"),
    ("MatMul", [(4, 8), (4, 8)], "don't fit"),
    ("AddExt", [(4, 8), (3,)], "don't broadcast"),
    ("RepeatInterleaveInt", [(4, 8), [1, 2], 0], "one number of repetitions"),
]


@pytest.mark.parametrize(("name", "args", "message"), ERRORS, ids=lambda value: str(value))
def test_errors_say_what_is_wrong(name, args, message):
    """Here a tuple of ints in the first place, and in others where an operator has tensors, is a tensor's shape."""
    tensor_places = {"Gather": (0, 1), "GatherD": (0, 2), "Embedding": (0, 1), "LayerNorm": (0, 1, 2)}
    tensor_places |= {"RmsNorm": (0, 1), "MatMul": (0, 1), "AddExt": (0, 1)}
    tensor_places |= {"NLLLoss": (0, 1, 2), "FlashAttentionScore": (0, 1, 2)}
    tensor_places |= dict.fromkeys(("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"), (0, 1))
    places = tensor_places.get(name, (0,))
    args = [tensor_meta(value, F32) if place in places else value for place, value in enumerate(args)]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        signature_of(name, args)
    assert name in str(caught.value)


def test_a_user_registers_an_operator_of_his_own(monkeypatch):
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))  # other tests look at the real one

    @register_operator("OnlyInThisTest")
    def rule(x):
        return elementwise(x)

    assert isinstance(signature_of("OnlyInThisTest", [tensor_meta((4,), F32)]), Signature)
    with pytest.raises(ValueError, match="already has a rule"):
        register_operator("OnlyInThisTest")(rule)


def test_the_rule_of_the_page(monkeypatch):
    """docs/tensor_parallel.md: distances between rows; only their number may be cut."""
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    (block,) = [text for text in code_blocks(ROOT / "docs" / "tensor_parallel.md", "python") if "MyDistances" in text]
    exec(compile(block, "tensor_parallel.md", "exec"), {})
    found = signature_of("MyDistances", [tensor_meta((4, 8), F32), tensor_meta((6, 8), F32), 2.0])
    assert found.outputs == ((("n",), ("m",)),) and found.sizes == {"n": 4, "m": 6, "K": 8} and found.whole == {"K"}


def test_nested_lists_of_attributes_are_tuples():
    assert registry.rule_attributes("Pad", {"paddings": [[0, 1], [0, 0]]}) == {"paddings": ((0, 1), (0, 0))}
