"""Fused attention, which has no kernel on CPU: cuts of batch and heads, dropped scores, lengths; by shapes alone."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.plan_checks import MESH, move_bytes, plan_of

from mindformers_core.algorithms.distributed_operators import ALGORITHMS
from mindformers_core.algorithms.shard_context import ShardContext
from mindformers_core.capture.algorithm_graph import algorithm_graph
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import signature_of, tensor_meta
from mindformers_core.program.graph import OperatorNode
from mindformers_core.program.structure import tree_leaves

HEADS = (("dp",), ("tp",), (), ())  # of BNSD
Q, KV = (2, 4, 16, 32), (2, 2, 24, 32)


def drops(q, k, v):
    return ops.flash_attention_score(q, k, v, 4, input_layout="BNSD", keep_prob=0.5)


CALLS = {  # function of query, key, value and other tensors, whose shapes and cuts follow; bytes sent, or None for any
    "dropout": (drops, (), 0),
    "mask of bits": (
        lambda q, k, v, m: ops.flash_attention_score(q, k, v, 4, drop_mask=m, input_layout="BNSD", keep_prob=0.5),
        [((2, 4, 16, 3), "uint8", HEADS)], 0,
    ),
    "prefix": (
        lambda q, k, v, m: ops.flash_attention_score(q, k, v, 4, input_layout="BNSD", prefix=[3, 5], attn_mask=m),
        [((2, 1, 16, 24), "uint8", ((), (), (), ()))], None,
    ),
    "speed": (lambda q, k, v: ops.speed_fusion_attention(q, k, v, 4, "BNSD")[0], (), 0),
    "speed, dropout": (lambda q, k, v: ops.speed_fusion_attention(q, k, v, 4, "BNSD", keep_prob=0.5)[0], (), None),
    "prompt": (
        lambda q, k, v, m: ops.prompt_flash_attention(
            q, k, v, m, num_heads=4, input_layout="BNSD", num_key_value_heads=2
        ),
        [((2, 16, 24), "bool", (("dp",), (), ()))], 0,
    ),
    "prompt, lengths": (
        lambda q, k, v: ops.prompt_flash_attention(
            q, k, v, None, [3, 4], num_heads=4, input_layout="BNSD", num_key_value_heads=2
        ),
        (), None,
    ),
    "infer": (
        lambda q, k, v: ops.fused_infer_attention_score(
            q, [k], [v], num_heads=4, input_layout="BNSD", num_key_value_heads=2, softmax_lse_flag=True
        ),
        (), 0,
    ),
    "increment": (
        lambda q, k, v: ops.incre_flash_attention(
            q[:, :, :1], [k], [v], num_heads=4, input_layout="BNSD", num_key_value_heads=2
        ),
        (), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_batch_and_heads_stay_cut(name):
    function, others, nbytes = CALLS[name]

    class Cell(nn.Cell):
        def construct(self, *tensors):
            return function(*tensors)

    given = [(Q, "float16", HEADS), (KV, "float16", HEADS), (KV, "float16", HEADS), *others]
    metas = [tensor_meta(shape, dtype) for shape, dtype, _ in given]
    arriving = {place: Layout.on(MESH, dims) for place, (_, _, dims) in enumerate(given)}
    plan = plan_of(Cell(), metas, {}, arriving=arriving)
    nodes = (each for each in plan.instructions if isinstance(getattr(each, "node", None), OperatorNode))
    (entry,) = (each for each in nodes if "Attention" in each.node.operator)
    sent, expected = move_bytes(plan)[0], (("dp",), ("tp",), (), ())
    if nbytes is None:
        assert sent > 0
        expected = ((), ()) if "dropout" in name else ((), ("tp",))
    else:
        assert sent == nbytes
    output = next(at for value, at in entry.produced if value.shape[-1:] == (32,))
    assert output.dims[:2] == expected[:2], (output, entry.inputs)


def mask_of(mesh, cut, rank):
    """The bits that a rank draws for its scores."""
    layouts = [Layout.on(mesh, cut)] * 3
    context = ShardContext(
        mesh, (), tuple(layouts), (Q, KV, KV), rank, output=(layouts[0], (2, 4, 16, 8)),
        next_random_state=lambda: (Tensor(3, ms.int64), Tensor(12, ms.int64)),
    )  # fmt: skip
    local = [Tensor(np.zeros(layouts[0].local_shape(shape), np.float16)) for shape in (Q, KV, KV)]
    args = (*local, *[None] * 7, 4, 0.75, 1.0, 2**31 - 1, 2**31 - 1, 0, 1, 0)
    return ALGORITHMS["attention_dropout"](lambda *given: given[4], args, context).asnumpy()


def test_dropped_scores_are_the_same_on_any_mesh():
    whole = mask_of(DeviceMesh((1,), ("dp",)), ((), (), (), ()), 0)
    assert whole.shape == (2, 4, 16, 3) and whole.dtype == np.uint8
    bits = np.unpackbits(whole, axis=-1)
    assert abs(bits.mean() - 0.75) < 0.02
    assert all(abs(np.unpackbits(whole)[bit::8].mean() - 0.75) < 0.06 for bit in range(8))
    assert (whole != 0).mean() > 0.99 and len(np.unique(whole)) > 100, "the bits of a byte are drawn apart"
    for rank in range(4):
        part = whole[Layout.on(MESH, HEADS).local_slices(whole.shape, rank)]
        np.testing.assert_array_equal(mask_of(MESH, HEADS, rank), part)


def test_the_program_hands_its_mask_to_the_operator():
    class Cell(nn.Cell):
        def construct(self, q, k, v):
            return drops(q, k, v)

    metas = [tensor_meta(shape, "float16") for shape in (Q, KV, KV)]
    plan = plan_of(Cell(), metas, {}, arriving={place: Layout.on(MESH, HEADS) for place in range(3)})
    (entry,) = (each for each in plan.instructions if isinstance(getattr(each, "node", None), OperatorNode))
    graph = algorithm_graph(entry, 0)
    node = graph.nodes[-1]
    assert node.operator == "FlashAttentionScore" and node.args[4].shape == (1, 2, 16, 3) and node.args[10] == 2
    assert [value.shape for value in tree_leaves(node.outputs)] == entry.local_shapes


def test_a_mask_needs_eight_keys_in_a_byte():
    metas = [tensor_meta((2, 4, 64), "float16")] * 3
    with pytest.raises(ValueError, match="keep_prob=0.5 needs a drop_mask where keys are of 4 tokens"):
        signature_of("FlashAttentionScore", [*metas, *[None] * 7, 4, 0.5])
