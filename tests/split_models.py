"""The small Llama of the tests of pipeline stages, and the ways of splitting it: `SPLITS`."""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindformers_core.models import LlamaConfig, LlamaForCausalLM, stage_index
from mindformers_core.tensor_parallel import materialize

__all__ = [
    "BLOCKS",
    "BOTH_COUNTED",
    "SMALL",
    "SPLITS",
    "Sequence",
    "batch",
    "build",
    "built",
    "configs_of",
    "run",
    "whole_of",
]

SMALL = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
BOTH_COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
BLOCKS = [
    {},
    {"intermediate_size": 16},
    {"num_key_value_heads": 4},
    {},
    {"num_attention_heads": 2},
    {"rms_norm_eps": 1e-3},
]
# name -> (how many ranks, changes of the config, layers of every stage, stages of every rank)
SPLITS = {
    "whole": (1, {}, [6], [[0]]),
    "even": (3, {}, [2, 2, 2], [[0], [1], [2]]),
    "uneven": (3, {"layers_per_stage": [1, 3, 2]}, [1, 3, 2], [[0], [1], [2]]),
    "empty": (3, {"layers_per_stage": [0, 6, 0]}, [0, 6, 0], [[0], [1], [2]]),
    "embedding": (7, {"account_for_embedding_in_pipeline_split": True}, [0, *[1] * 6], [[s] for s in range(7)]),
    "both": (4, BOTH_COUNTED, [1, 2, 2, 1], [[0], [1], [2], [3]]),
    "both, one": (1, BOTH_COUNTED, [6], [[0]]),
    "loop": (3, {"virtual_pipeline": 2}, [1] * 6, [[0, 3], [1, 4], [2, 5]]),
    "loop, both": (2, {"virtual_pipeline": 2, **BOTH_COUNTED}, [1, 2, 2, 1], [[0, 2], [1, 3]]),
    "loop, uneven": (2, {"virtual_pipeline": 2, "layers_per_stage": (2, 1, 1, 2)}, [2, 1, 1, 2], [[0, 2], [1, 3]]),
    "v": (3, {"virtual_pipeline": 2, "pipeline_placement": "v"}, [1] * 6, [[0, 5], [1, 4], [2, 3]]),
    "v, both": (
        2,
        {"virtual_pipeline": 2, "pipeline_placement": "v", **BOTH_COUNTED},
        [1, 2, 2, 1],
        [[0, 3], [1, 2]],
    ),
    "heterogeneous": (2, {"heterogeneous_block_specs": BLOCKS, "layers_per_stage": [2, 4]}, [2, 4], [[0], [1]]),
}


def configs_of(name, **changes):
    """`{stage: (config, vp_stage)}` of a split, asked for rank by rank and chunk by chunk."""
    ranks, split, _, _ = SPLITS[name]
    found = {}
    for rank in range(ranks):
        config = LlamaConfig(**{**SMALL, **split, **changes, "pipeline_parallel": ranks, "pipeline_rank": rank})
        chunks = range(config.virtual_pipeline) if config.virtual_pipeline > 1 else [None]
        found |= {stage_index(config, chunk): (config, chunk) for chunk in chunks}
    return dict(sorted(found.items()))


def build(config, vp_stage=None):
    with ms.DeviceCtx("meta"):
        return LlamaForCausalLM(config, vp_stage=vp_stage)


def built(config, vp_stage=None):
    model = build(config, vp_stage)
    materialize(model, seed=1)
    return model


def whole_of(name, **changes):
    blocks = SPLITS[name][1].get("heterogeneous_block_specs")
    return built(LlamaConfig(**SMALL, heterogeneous_block_specs=blocks, **changes))


def batch():
    ids = np.random.default_rng(2).integers(0, 32, (2, 9)).astype(np.int32)
    labels = ids[:, 1:].copy()
    labels[0, 3] = -100
    return Tensor(ids[:, :-1]), Tensor(labels)


def run(stages, ids, labels):
    for stage in stages:
        ids = stage(ids, labels)
    return ids


class Sequence:
    """What hooks ask for: data and sequence parallelism."""

    batch_axes = ("dp",)
    sequence_parallel = True
