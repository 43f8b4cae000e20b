"""The random states of a verification: those of a pass are the same on all ranks and on one card."""

from zlib import crc32

import mindspore as ms
from mindspore import Tensor
from mindspore import dtype as mstype

from mindformers_core.communication.world import process_state
from mindformers_core.dtensor.draws import drawn_by, whole_context
from mindformers_core.operators.registry import facts_of
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.operators import operator_signature


def begin_draws(label):
    """Begin the draws of a pass through a stage."""
    process_state().memo(__name__).update(seed=crc32(repr(label).encode()), count=0)


def next_random_state():
    """As `dropout.next_random_state`; MindSpore's generator is one for all simulated ranks."""
    state = process_state().memo(__name__)
    state["count"] += 1
    return Tensor(state["seed"], mstype.int64), Tensor(12 * state["count"], mstype.int64)


def draw_of(node, dtype):
    """The function of the arguments of an operator that draws; None for any other operator.

    Args:
        node: the `OperatorNode`.
        dtype: name of the dtype of all floating results.
    """
    signature = operator_signature(node) if facts_of(node.operator).draws else None
    if signature is None or signature.run is None:
        return None
    context = whole_context(tree_leaves(node.outputs)[0].shape, next_random_state, getattr(ms, dtype))

    return lambda args, kwargs: drawn_by(signature, (*args, *kwargs.values()), context)
