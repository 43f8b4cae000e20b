"""DeepSeek-V3's heads: labels shifted once more, within documents, wherever ranks have them; their names in files."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from support.nightly import daily

from mindformers_core.checkpoint.hugging_face import ignored_tensors, tensor_map
from mindformers_core.checkpoint.tensors import model_parts
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.models.prediction import labels_behind
from mindformers_core.models.registry import MODELS
from mindformers_core.recipe.loader import recipe_from_dict

SPEC, LENGTH, FACTOR = MODELS["deepseek_v3"], 16, 0.5
MODEL = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 8, "max_position_embeddings": LENGTH, "initializer_range": 0.3,
    "num_nextn_predict_layers": 2, "mtp_loss_factor": FACTOR, "aux_loss_alpha": 0.1,
}  # fmt: skip
DOCUMENTS = (6, 1, 2, 7)  # tokens of one row


def normed(x, norm):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * norm.weight.asnumpy()


def loss_behind(net, ids, depth):
    """The sum of the losses of the first `depth` heads of one document (tokens,), and the labels that count."""
    hidden = net.model(Tensor(ids[None])).asnumpy()[0]
    total, embedding = 0.0, net.model.embed_tokens.weight.asnumpy()
    for number, head in enumerate([*net.heads.values()][:depth], 1):
        following = np.append(ids[number:], [0] * number)[: len(ids)]  # of the last ones, what nothing looks at
        both = np.concatenate((normed(embedding[following], head.enorm), normed(hidden, head.hnorm)), -1)
        _, seen = net.model.seen(len(ids), None, None)
        hidden = head.layer(Tensor((both @ head.eh_proj.weight.asnumpy().T)[None].astype(np.float32)), *seen)
        hidden = normed(hidden.asnumpy()[0], head.norm)
        logits = hidden @ net.lm_head.weight.asnumpy().T
        for place in range(len(ids) - number - 1):
            total += np.log(np.exp(logits[place]).sum()) - logits[place, ids[place + number + 1]]
    return total


@pytest.mark.usefixtures("one_rank")
def test_the_loss_is_that_of_the_formulas():
    """Document by document, in NumPy, and of routers; and without heads where it doesn't train."""
    ms.manual_seed(1)
    net = SPEC.build(SPEC.config(**MODEL)).set_train()
    ids = np.random.default_rng(0).integers(1, 24, LENGTH).astype(np.int32)
    parts = np.split(ids, np.cumsum(DOCUMENTS)[:-1])
    labels = np.concatenate([np.append(part[1:], -100) for part in parts]).astype(np.int32)
    positions = np.concatenate([np.arange(len(part)) for part in parts]).astype(np.int32)
    given = [Tensor(each[None]) for each in (ids, labels, positions)]
    loss, count, of_routers, counts = net(*given)
    plain, same, *_ = net.set_train(False)(*given)
    assert int(count) == int(same) == LENGTH - len(DOCUMENTS)
    expected = FACTOR / 2 * sum(loss_behind(net, part, 2) for part in parts)
    assert expected > 1 and (of_routers.asnumpy()[0, 1:] > 0).all()
    assert float(loss - plain) == pytest.approx(expected + of_routers.asnumpy().sum(), rel=1e-5)
    pairs = [sum(max(tokens - depth, 0) for tokens in DOCUMENTS) for depth in (1, 2, 3)]  # labels of model and heads
    assert counts.asnumpy().sum(-1)[0].tolist() == [0, *(2 * each for each in pairs)]


def test_labels_are_shifted_once_more():
    labels = np.array([[1, 2, -100, 4, 5, 6, 7, 8]], np.int32)
    behind = np.array([[2, -100, -100, 5, 6, 7, 8, -100]], np.int32)
    for places in (np.arange(8), np.array([0, 1, 6, 7, 2, 3, 4, 5])):
        found = labels_behind(Tensor(labels[:, places]), Tensor(places[None].astype(np.int32)))
        np.testing.assert_array_equal(found.asnumpy(), behind[:, places])


MESHES = {
    "cp 2 x tp 2": {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    "cp 2, area": {"context_parallel": 2, "context_parallel_balance": "area"},
    "pp 2": {"pipeline_parallel": 2, "pipeline_parallel_microbatch_size": 2},
    "dp 2, level 3": {"data_parallel_shard": 2, "zero_level": 3, "zero_threshold_kb": 0, "expert_parallel": ["dp"]},
}


@pytest.mark.parametrize("mesh", daily([], MESHES))
def test_a_step_on_all_ranks(mesh):
    """Loss, all tensors, all gradients, the update."""
    sizes = {"data_parallel_shard": 1} | MESHES[mesh]
    recipe = recipe_from_dict({
        "model": MODEL | {"name": "deepseek_v3", "num_nextn_predict_layers": 1},
        "parallelism": sizes,
        "train_dataset": {"factory": "test_sequence_programs:packed_rows", "seq_length": LENGTH},
        "training": {"local_batch_size": 4 // sizes["data_parallel_shard"]},
        "context": {"device_model": "CPU"},
    })  # fmt: skip
    check = verify_recipe(recipe, full=True)
    assert not check.faults, check.report()
    assert check.compared > 50


def test_their_names_in_files():
    """Those of the layers behind the last one; copies of embedding and output layer are ignored."""
    config = SPEC.config(**MODEL)
    with ms.DeviceCtx("meta"):
        net = SPEC.build(config)
    names = {part.name for part in model_parts([net], 0, tensor_map(SPEC, config))}
    own = {name.removeprefix("model.layers.2.") for name in names if name.startswith("model.layers.2.")}
    beside = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert own - beside == {
        name.removeprefix("model.layers.1.") for name in names if name.startswith("model.layers.1.")
    }
    assert beside < own and "mlp.experts.3.down_proj.weight" in own
    copies = ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"]
    assert ignored_tensors(SPEC, [*copies, *names], config) == copies
