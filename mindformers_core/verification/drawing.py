"""The random states of a verification: those of a pass are the same on all ranks and on one card."""

from types import SimpleNamespace
from zlib import crc32

from mindspore import Tensor
from mindspore import dtype as mstype

from mindformers_core.communication.world import process_state
from mindformers_core.dtensor.dropout import counters, dropout_with_mask, functional_dropout

__all__ = ["DROPOUTS", "begin_draws", "next_random_state", "whole_context"]

DROPOUTS = {"Dropout": dropout_with_mask, "FuncDropoutExt": functional_dropout}  # operator -> what generated code runs


def begin_draws(label):
    """Begin the draws of a pass through a stage."""
    process_state().memo(__name__).update(seed=crc32(repr(label).encode()), count=0)


def next_random_state():
    """As `dropout.next_random_state`; MindSpore's generator is one for all simulated ranks."""
    state = process_state().memo(__name__)
    state["count"] += 1
    return Tensor(state["seed"], mstype.int64), Tensor(12 * state["count"], mstype.int64)


def whole_context(shape):
    """What a dropout of a whole tensor needs of a `ShardContext`."""
    places = counters(shape, [slice(0, size) for size in shape])
    return SimpleNamespace(next_random_state=next_random_state, random_counters=tuple(map(Tensor, places)))
