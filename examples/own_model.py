"""A model and a dataset of one's own that a recipe names, examples/own_model.yaml: docs/models.md explains them.

PYTHONPATH=examples bash scripts/msrun_launch.sh "-m mindformers_core train --config examples/own_model.yaml" 4 4
"""

from dataclasses import dataclass

import numpy as np
from mindspore import nn, ops

from mindformers_core.layout import layout
from mindformers_core.models import LayerRange, ModelSpec
from mindformers_core.operators import tensor_meta


@dataclass(frozen=True)
class ClassifierConfig:
    """The keys of section `model`."""

    features: int = 32
    hidden_size: int = 64
    num_hidden_layers: int = 4
    classes: int = 4
    dropout: float = 0.0


class Block(nn.Cell):
    """Two linear layers after a norm, around which the input goes; the wide side is cut over tp."""

    def __init__(self, size, dropout=0.0):
        super().__init__()
        self.drop = nn.Dropout(p=dropout)
        self.norm, self.up, self.down = nn.LayerNorm((size,)), nn.Dense(size, 4 * size), nn.Dense(4 * size, size)

    def shard(self, config):
        weights = {"up.weight": layout("tp", None), "up.bias": layout("tp"), "down.weight": layout(None, "tp")}
        return None, None, weights

    def construct(self, x):
        return x + self.drop(self.down(ops.gelu(self.up(self.norm(x)))))


class Classifier(nn.Cell):
    """Samples (rows, features) and labels (rows,) → the mean loss; or a stage, which takes and gives hidden states."""

    config_class = ClassifierConfig

    def __init__(self, config, layers=None):
        super().__init__()
        layers = LayerRange(0, config.num_hidden_layers) if layers is None else layers
        numbers = range(layers.offset, layers.offset + layers.count)
        self.enter = nn.Dense(config.features, config.hidden_size) if layers.is_first else None
        blocks = [(str(number), Block(config.hidden_size, config.dropout)) for number in numbers]
        self.blocks = nn.CellDict(blocks)
        self.head = nn.Dense(config.hidden_size, config.classes) if layers.is_last else None

    def shard(self, config):
        batch = layout(config.batch_axes, ...)
        return {"samples": batch, "labels": batch}, batch if self.head is None else None, None

    def construct(self, samples, labels):
        x = samples if self.enter is None else self.enter(samples)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else ops.cross_entropy(self.head(x), labels)


CLASSIFIER = ModelSpec(
    Classifier,
    ClassifierConfig,
    inputs=("samples", "labels"),
    boundary=lambda config, batch, length: tensor_meta((batch, config.hidden_size), "float32"),
    divided=lambda config: [("hidden_size", config.hidden_size)],
)


class Samples:
    """An endless stream of random samples; the label says in which quarter of the features the largest one is."""

    def __init__(self, features, classes, seed):
        self.features, self.classes, self.seed = features, classes, seed

    def batch(self, first, count):
        draws = (np.random.default_rng((self.seed, number)) for number in range(first, first + count))
        samples = np.stack([random.standard_normal(self.features) for random in draws]).astype(np.float32)
        return samples, (samples.argmax(1) * self.classes // self.features).astype(np.int32)


def open_samples(section, config, seed):
    """What `train_dataset.factory` names."""
    return Samples(config.features, config.classes, seed + section.options.get("offset", 0))
