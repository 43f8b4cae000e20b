"""The classifier of `examples/own_model.py` with batch norm, for recipes."""

import sys
from dataclasses import replace

from mindspore import Parameter, nn
from mindspore.common.initializer import initializer
from support.launch import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from own_model import (  # noqa: E402
    CLASSIFIER as PLAIN,  # noqa: E402
    Block,
    Classifier,
    open_samples,
)

__all__ = ["CLASSIFIER", "Normalised", "open_samples"]


class NormalisedBlock(Block):
    """Batch norm in the place of layer norm; and a weight that nothing uses."""

    def __init__(self, size):
        super().__init__(size)
        self.norm = nn.BatchNorm1d(size)
        self.idle = Parameter(initializer("ones", (size, size)), name="idle")


class Normalised(Classifier):
    """A classifier of such blocks."""

    def __init__(self, config, layers=None):
        super().__init__(config, layers)
        self.blocks = nn.CellDict([(name, NormalisedBlock(config.hidden_size)) for name, _ in self.blocks.items()])


CLASSIFIER = replace(PLAIN, cell=Normalised)
