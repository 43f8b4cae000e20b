"""Rules of losses: examples are parallel, classes are whole."""

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import dim_names, dim_sizes
from mindformers_core.operators.saved import INPUTS, SECOND_RESULT, SavedByOperator
from mindformers_core.operators.signature import Signature

_REDUCTIONS = ("sum", "mean", "none")  # by the number that MindSpore gives them


@register_operator("NLLLoss", saves=SavedByOperator("all", outputs=(1,)))
def negative_log_likelihood(logits, labels, weight, reduction="mean", ignore_index=-100):
    """The loss for log-probabilities (examples, classes), and the sum of the labels' weights.

    The mean is over these weights, so that each part of the examples contributes its sum over the total of all.
    """
    reduction = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    if logits.ndim not in (1, 2) or labels.shape != logits.shape[:-1] or weight.shape != logits.shape[-1:]:
        raise ValueError(f"labels {labels.shape} and weights {weight.shape} don't fit {logits.shape}")
    examples = (("n",),) * labels.ndim
    sizes = dict(zip("nc"[2 - logits.ndim :], logits.shape))
    inputs = ((*examples, ("c",)), examples, (("c",),))
    if reduction == "none" or not examples:
        whole = frozenset("nc" if examples else "c")  # the weights' sum is of all examples, the losses are not
        return Signature(inputs, (examples, ()), sizes, whole=whole)
    more = {"distributed": {"n": "weighted_mean"}} if reduction == "mean" else {}
    return Signature(inputs, ((), ()), sizes, {"n": "sum"}, whole=frozenset("c"), **more)


@register_operator("SmoothL1Loss", saves=INPUTS, operations=4)
def smooth_l1_loss(x, target, beta=1.0, reduction="none"):
    """Square near 0, absolute further off; of every element, or their sum or mean."""
    reduction = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    if x.shape != target.shape:
        raise ValueError(f"a target {target.shape} doesn't fit {x.shape}")
    names, sizes = dim_names(x), dim_sizes(x)
    if reduction == "none":
        return Signature((names, names), (names,), sizes)
    more = {"distributed": dict.fromkeys(sizes, "mean")} if reduction == "mean" else {}
    return Signature((names, names), ((),), sizes, dict.fromkeys(sizes, "sum"), **more)


@register_operator("SoftmaxCrossEntropyWithLogits", saves=SECOND_RESULT, operations=7, source="(logits, labels)")
def softmax_cross_entropy(logits, labels):
    """Of (examples, classes) with probabilities as labels: a loss for every example, and the gradient of logits."""
    if logits.ndim != 2 or labels.shape != logits.shape:
        raise ValueError(f"labels {labels.shape} don't fit logits {logits.shape}: both are (examples, classes)")
    names, sizes = dim_names(logits), dim_sizes(logits)
    return Signature((names, names), (names[:1], names), sizes, whole=frozenset({"d1"}))


@register_operator(
    "SparseSoftmaxCrossEntropyWithLogits", saves=SavedByOperator("all", outputs=(0,), as_they_are=True), operations=7
)
def sparse_softmax_cross_entropy(logits, labels):
    """Of (examples, classes) with positions as labels: the mean over examples."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"labels {labels.shape} don't fit logits {logits.shape}: (examples) and (examples, classes)")
    names, sizes = dim_names(logits), dim_sizes(logits)
    more = {"whole": frozenset({"d1"}), "distributed": {"d0": "mean"}}
    return Signature((names, names[:1]), ((),), sizes, {"d0": "sum"}, **more)
