"""Rules of losses: examples are parallel; classes too, where a label is looked up in the part that has it."""

import math
from dataclasses import replace
from functools import partial

from mindformers_core.operators import saved
from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import bound, equation, parameters
from mindformers_core.operators.rules.elementwise import elementwise
from mindformers_core.operators.rules.indexing import check_indices, positional
from mindformers_core.operators.saved import INPUTS_AS_THEY_ARE, SECOND_RESULT, SavedByOperator
from mindformers_core.operators.signature import tensors_in, whole_signature
from mindformers_core.operators.words import word


def _reduced(plain, reduction):
    """`plain`, of a loss for each element, with it reduced: a mean is the sum of equal parts' means over their number.

    Of a batch the mean is over dim 0 alone.
    """
    reduction = word("reduction", reduction)
    if reduction == "none":
        return plain
    factors = dict.fromkeys((name for (name,) in plain.outputs[0]), "sum")
    means = {"mean": dict.fromkeys(factors, "mean"), "batchmean": {"d0": "mean"}, "sum": {}}[reduction]
    return replace(plain, outputs=((), *plain.outputs[1:]), reduced=factors, distributed=means)


def _elementwise_loss(order, broadcasts, x, *args, **named):
    """The loss of every element: `order` names the arguments after the first, of which tensors may be broadcast."""
    given, _ = bound(parameters(order), args, named)
    tensors = [x, *tensors_in([*given.values()])]
    if not broadcasts and given["target"].shape != x.shape:
        raise ValueError(f"a target {given['target'].shape} doesn't fit {x.shape}")
    return _reduced(elementwise(*tensors), given["reduction"])


_BY_PLACE = "target reduction='mean'"
_LOGITS = {"saves": saved.INPUTS, "operations": 9}
_WORD = {"attributes": ("reduction",), "source": "(logits, labels)", "saves": INPUTS_AS_THEY_ARE, "operations": 4}
# Names of operators, the arguments after the first, whether target and input are broadcast, and their other facts
_ELEMENTWISE = (
    ("SmoothL1Loss", "target beta reduction='mean'", False, {"saves": saved.INPUTS, "operations": 4}),
    ("BCEWithLogitsLoss", "target weight pos_weight reduction='mean'", False, _LOGITS),
    ("BinaryCrossEntropy", "target weight reduction='mean'", False, {"saves": saved.INPUTS, "operations": 6}),
    ("MSELossExt L1LossExt SoftMarginLoss", _BY_PLACE, True, {"operations": 3}),
    ("KLDiv", "target reduction='mean' log_target", True, {"operations": 4}),
    ("KLDivLoss", _BY_PLACE, False, _WORD),
    ("SigmoidCrossEntropyWithLogits", "target reduction='none'", False, {"saves": INPUTS_AS_THEY_ARE, "operations": 7}),
)
_MEAN = ("mean",)
for _names, _order, _broadcasts, _facts in _ELEMENTWISE:
    register_operator(*_names.split(), algorithms=_MEAN, **_facts)(partial(_elementwise_loss, _order, _broadcasts))


@register_operator("MultiMarginLoss", attributes=("reduction",), source="(x, target, weight=None)", algorithms=_MEAN)
@register_operator("MultilabelMarginLoss", attributes=("reduction",), source="(x, target)", algorithms=_MEAN)
def margin_loss(x, target, weight=None, reduction="mean"):
    """Of (examples, classes) with one position, or several in a row, as labels; then with which were meant, besides."""
    check_indices(target)
    if x.ndim != 2 or target.shape not in (x.shape, x.shape[:1]):
        raise ValueError(f"labels {target.shape} don't fit {x.shape}: (examples, classes) are needed")
    text = "n C, n C -> n, n C" if target.ndim == 2 else f"n C, n{', C' * (weight is not None)} -> n"
    text = text.upper() if target.ndim == 2 and reduction != "none" else text
    return _reduced(equation(text, *tensors_in([x, target, weight])), reduction)


@register_operator("TripletMarginLoss", attributes=("reduction",), algorithms=_MEAN)
def triplet_margin_loss(x, positive, negative, margin, reduction="mean"):
    """Distances over dim 1 of three tensors that are alike."""
    tensors = tensors_in([x, positive, negative, margin])
    text = f"n D ..., n D ..., n D ... {', ' * (len(tensors) - 3)} -> n ..."
    return _reduced(equation(text, *tensors), reduction)


@register_operator("CosineEmbeddingLoss", algorithms=_MEAN)
def cosine_embedding_loss(x, other, target, margin=0.0, reduction="mean"):
    """Of two tensors (examples, features), or (features,), and a target for each example."""
    return _reduced(equation("... D, ... D, ... -> ...", x, other, target), reduction)


@register_operator("CTCLossV2")
def ctc_loss(log_probs, targets, input_lengths, target_lengths):
    """For each sequence of (time, sequences, classes) a loss, and logarithms of all its alignments' probabilities."""
    tensors, states = (log_probs, targets, input_lengths, target_lengths), 2 * targets.shape[-1] + 1
    return equation("T n C, n S, n, n -> n, n T P", *tensors, sizes={"P": states})


@register_operator("CTCLoss")
def ctc_loss_of_sparse_labels(x, labels_indices, labels_values, sequence_length):
    """As `ctc_loss`; indices say whose labels they are, so all is whole."""
    return whole_signature((x, labels_indices, labels_values, sequence_length), (x.shape[1:2], x.shape))


def _ignored(operands, results):
    """Of a loss for each example, which ones are ignored."""
    return [math.prod(results[0].shape)] * bool(results[0].shape)


@register_operator(
    "NLLLoss", saves=SavedByOperator("all", outputs=(1,), internal=_ignored), algorithms=("likelihood",)
)  # fmt: skip
@register_operator("NLLLoss2d", algorithms=("likelihood",))
def negative_log_likelihood(logits, labels, weight, reduction="mean", ignore_index=-100):
    """The loss for log-probabilities (examples, classes, …), and the sum of the labels' weights.

    The mean is over these weights, so that each part contributes its sum over the total of all.
    """
    reduction = word("reduction", reduction)
    examples = "n ..." if logits.ndim > 1 else ""
    text = f"{examples.replace('n', 'n c') or 'c'}, {examples}, c -> {examples * (reduction == 'none')}, "
    local = positional(logits, labels, weight, ["sum", "mean", "none"].index(reduction), ignore_index)
    plain = equation(text, logits, labels, weight, local=local)
    return replace(plain, distributed=dict.fromkeys("c" if reduction == "sum" else plain.sizes, "likelihood"))


@register_operator(
    "SoftmaxCrossEntropyWithLogits", saves=SECOND_RESULT, operations=7, source="(logits, labels)",
    algorithms=("softmax_cross_entropy",),
)  # fmt: skip
def softmax_cross_entropy(logits, labels):
    """Of (examples, classes) with probabilities as labels: a loss for every example, and the gradient of logits."""
    return equation("n c, n c -> n, n c", logits, labels, distributed={"c": "softmax_cross_entropy"})


@register_operator(
    "SparseSoftmaxCrossEntropyWithLogits", saves=SavedByOperator("all", outputs=(0,), as_they_are=True), operations=7,
    attributes=("is_grad",), algorithms=("sparse_cross_entropy",),
)  # fmt: skip
def sparse_softmax_cross_entropy(logits, labels, is_grad=False):
    """Of (examples, classes) with positions as labels: the mean over examples."""
    if is_grad:
        raise ValueError("is_grad=True is not available for distributed tensors")
    return equation("n c, n -> ", logits, labels, distributed=dict.fromkeys("nc", "sparse_cross_entropy"))
