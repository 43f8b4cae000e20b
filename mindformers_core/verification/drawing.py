"""The random draws of one card: what those of ranks, which ask MindSpore's generator, have to be."""

import mindspore as ms
from mindspore import Tensor, dtype as mstype

from mindformers_core.algorithms.draws import drawn_by, whole_context
from mindformers_core.communication.world import process_state
from mindformers_core.operators.registry import facts_of
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.operators import operator_signature

SEED = 77  # of MindSpore's generator when a step begins


def begin_draws(block):
    """Begin the draws of a pass for a block of rows; see `dropout`."""
    process_state().memo(__name__).update(offset=block << 40)


def next_random_state():
    """As `dropout.next_random_state`, whose steps are those of MindSpore's operators."""
    state = process_state().memo(__name__)
    state["offset"] += 12
    return Tensor(SEED, mstype.int64), Tensor(state["offset"] - 12, mstype.int64)


def draw_of(node, dtype):
    """The function of the arguments of an operator that draws; None for any other operator.

    Args:
        dtype: name of the dtype of all floating results.
    """
    signature = operator_signature(node) if facts_of(node.operator).draws else None
    if signature is None or signature.run is None:
        return None
    context = whole_context(tree_leaves(node.outputs)[0].shape, next_random_state, getattr(ms, dtype))

    return lambda args, kwargs: drawn_by(signature, (*args, *kwargs.values()), context)
