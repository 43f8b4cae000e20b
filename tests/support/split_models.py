"""The small Llama of the tests of pipeline stages, and the ways of splitting it: `SPLITS`."""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.pipeline import split_layers
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
    "config_of",
    "parts_of",
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
BOTH_COUNTED = {"embedding_counts": True, "loss_counts": True}
BLOCKS = [
    {},
    {"intermediate_size": 16},
    {"num_key_value_heads": 4},
    {},
    {"num_attention_heads": 2},
    {"rms_norm_eps": 1e-3},
]
V = {"chunks": 2, "placement": "v"}
# name -> (how many ranks, changes of the config, of the split, layers of every stage, stages of every rank)
SPLITS = {
    "whole": (1, {}, {}, [6], [[0]]),
    "even": (3, {}, {}, [2, 2, 2], [[0], [1], [2]]),
    "uneven": (3, {}, {"layers_per_stage": [1, 3, 2]}, [1, 3, 2], [[0], [1], [2]]),
    "empty": (3, {}, {"layers_per_stage": [0, 6, 0]}, [0, 6, 0], [[0], [1], [2]]),
    "embedding": (7, {}, {"embedding_counts": True}, [0, *[1] * 6], [[s] for s in range(7)]),
    "both": (4, {}, BOTH_COUNTED, [1, 2, 2, 1], [[0], [1], [2], [3]]),
    "both, one": (1, {}, BOTH_COUNTED, [6], [[0]]),
    "loop": (3, {}, {"chunks": 2}, [1] * 6, [[0, 3], [1, 4], [2, 5]]),
    "loop, both": (2, {}, {"chunks": 2, **BOTH_COUNTED}, [1, 2, 2, 1], [[0, 2], [1, 3]]),
    "loop, uneven": (2, {}, {"chunks": 2, "layers_per_stage": (2, 1, 1, 2)}, [2, 1, 1, 2], [[0, 2], [1, 3]]),
    "v": (3, {}, V, [1] * 6, [[0, 5], [1, 4], [2, 3]]),
    "v, both": (2, {}, {**V, **BOTH_COUNTED}, [1, 2, 2, 1], [[0, 3], [1, 2]]),
    "heterogeneous": (2, {"heterogeneous_block_specs": BLOCKS}, {"layers_per_stage": [2, 4]}, [2, 4], [[0], [1]]),
}


def parts_of(name):
    """The `LayerRange` of every stage of a split."""
    ranks, _, split, _, _ = SPLITS[name]
    split = {key: value for key, value in split.items() if key != "placement"}
    return split_layers(SMALL["num_hidden_layers"], ranks * split.pop("chunks", 1), **split)


def config_of(name, **changes):
    return LlamaConfig(**{**SMALL, **SPLITS[name][1], **changes})


def build(config, layers=None):
    with ms.DeviceCtx("meta"):
        return LlamaForCausalLM(config, layers=layers)


def built(config, layers=None):
    model = build(config, layers)
    materialize(model, seed=1)
    return model


def whole_of(name, **changes):
    return built(config_of(name, **changes))


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
