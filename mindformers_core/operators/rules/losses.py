"""Rules of losses: examples are parallel; classes too, where a label is looked up in the part that has it."""

import math
from dataclasses import replace
from functools import partial

from mindformers_core.operators import saved
from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import dim_names, dim_sizes
from mindformers_core.operators.rules.elementwise import elementwise
from mindformers_core.operators.rules.indexing import check_indices, positional
from mindformers_core.operators.rules.scattering import CORRECTED
from mindformers_core.operators.saved import INPUTS_AS_THEY_ARE, SECOND_RESULT, UNMEASURED, SavedByOperator
from mindformers_core.operators.signature import Signature, tensors_in, undivided

_REDUCTIONS = ("sum", "mean", "none")  # by the number that MindSpore gives them


def _reduced(plain, reduction, whole=()):
    """`plain`, of a loss for each element, with it reduced: a mean is the sum of equal parts' means over their number.

    Of a batch the mean is over dim 0 alone.
    """
    reduction = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    if reduction == "none":
        return replace(plain, whole=frozenset(whole))
    factors = dict.fromkeys((name for (name,) in plain.outputs[0]), "sum")
    means = {"mean": dict.fromkeys(factors, "mean"), "batchmean": {"d0": "mean"}, "sum": {}}[reduction]
    outputs = ((), *plain.outputs[1:])
    return replace(plain, outputs=outputs, reduced=factors, whole=frozenset(whole), distributed=means)


def _elementwise_loss(order, broadcasts, x, *args, **named):
    """The loss of every element: `order` names the arguments after the first, of which tensors may be broadcast."""
    given = dict(zip(order, args)) | named
    if len(args) > len(order):
        raise TypeError(f"got {len(args)} arguments after the first, not {', '.join(order)}")
    tensors = [x, *tensors_in(given.values())]
    if not broadcasts and given["target"].shape != x.shape:
        raise ValueError(f"a target {given['target'].shape} doesn't fit {x.shape}")
    return _reduced(elementwise(*tensors), given.get("reduction", "mean"))


_BY_PLACE = ("target", "reduction")
_LOGITS = {"saves": saved.INPUTS, "operations": 9, "source": f"{CORRECTED}binary_cross_entropy_of_logits"}
_WORD = {"attributes": ("reduction",), "source": "(logits, labels)", "saves": INPUTS_AS_THEY_ARE, "operations": 4}
# Names of operators, the arguments after the first, whether target and input are broadcast, and their other facts
_ELEMENTWISE = (
    ("SmoothL1Loss", ("target", "beta", "reduction"), False, {"saves": saved.INPUTS, "operations": 4}),
    ("BCEWithLogitsLoss", ("target", "weight", "pos_weight", "reduction"), False, _LOGITS),
    ("BinaryCrossEntropy", ("target", "weight", "reduction"), False, {"saves": saved.INPUTS, "operations": 6}),
    ("MSELossExt L1LossExt SoftMarginLoss", _BY_PLACE, True, {"saves": UNMEASURED, "operations": 3}),
    ("KLDiv", ("target", "reduction", "log_target"), True, {"saves": UNMEASURED, "operations": 4}),
    ("KLDivLoss", _BY_PLACE, False, _WORD),
)
for _names, _order, _broadcasts, _facts in _ELEMENTWISE:
    register_operator(*_names.split(), **_facts)(partial(_elementwise_loss, _order, _broadcasts))


@register_operator("SigmoidCrossEntropyWithLogits", saves=INPUTS_AS_THEY_ARE, operations=7)
def sigmoid_cross_entropy(logits, labels):
    """A loss for every element."""
    return _elementwise_loss(_BY_PLACE, False, logits, labels, "none")


@register_operator("MultiMarginLoss", saves=UNMEASURED, attributes=("reduction",), source="(x, target, weight=None)")
@register_operator("MultilabelMarginLoss", saves=UNMEASURED, attributes=("reduction",), source="(x, target)")
def margin_loss(x, target, weight=None, reduction="mean"):
    """Of (examples, classes) with one position, or several in a row, as labels; then with which were meant, besides."""
    check_indices(target)
    if x.ndim != 2 or target.shape not in (x.shape, x.shape[:1]):
        raise ValueError(f"labels {target.shape} don't fit {x.shape}: (examples, classes) are needed")
    names = dim_names(x)
    inputs = (names, names[: target.ndim], *(((("d1",),),) if weight is not None else ()))
    several = target.ndim == 2
    plain = Signature(inputs, (names[:1], names)[: 1 + several], dim_sizes(x))
    return _reduced(plain, reduction, dim_sizes(x) if several and reduction != "none" else ("d1",))


@register_operator("TripletMarginLoss", saves=UNMEASURED, attributes=("reduction",))
def triplet_margin_loss(x, positive, negative, margin, reduction="mean"):
    """Distances over dim 1 of three tensors that are alike."""
    if x.ndim < 2 or not x.shape == positive.shape == negative.shape:
        raise ValueError(f"{x.shape}, {positive.shape} and {negative.shape} are not alike")
    names = dim_names(x)
    inputs = (names, names, names, *((),) * len(tensors_in([margin])))
    return _reduced(Signature(inputs, ((names[0], *names[2:]),), dim_sizes(x)), reduction, ("d1",))


@register_operator("CosineEmbeddingLoss", saves=UNMEASURED)
def cosine_embedding_loss(x, other, target, margin=0.0, reduction="mean"):
    """Of two tensors (examples, features), or (features,), and a target for each example."""
    names = dim_names(x)
    if x.shape != other.shape or target.shape != x.shape[:-1]:
        raise ValueError(f"{x.shape}, {other.shape} and targets {target.shape} are not alike")
    plain = Signature((names, names, names[:-1]), (names[:-1],), dim_sizes(x))
    return _reduced(plain, reduction, names[-1])


@register_operator("CTCLossV2", saves=UNMEASURED)
def ctc_loss(log_probs, targets, input_lengths, target_lengths):
    """For each sequence of (time, sequences, classes) a loss, and logarithms of all its alignments' probabilities."""
    time, count, classes = log_probs.shape
    if targets.ndim != 2 or targets.shape[0] != count:
        raise ValueError(f"targets {targets.shape} are not (sequences, labels) for {log_probs.shape}")
    labels, each = targets.shape[1], (("n",),)
    sizes = {"t": time, "n": count, "c": classes, "s": labels, "states": 2 * labels + 1}
    inputs = ((("t",), ("n",), ("c",)), (("n",), ("s",)), each, each)
    return Signature(inputs, (each, (("n",), ("t",), ("states",))), sizes, whole=frozenset(sizes) - {"n"})


@register_operator("CTCLoss", saves=UNMEASURED)
def ctc_loss_of_sparse_labels(x, labels_indices, labels_values, sequence_length):
    """As `ctc_loss`; indices say whose labels they are, so all is whole."""
    return undivided((x, labels_indices, labels_values, sequence_length), (x.shape[1:2], x.shape))


def _ignored(operands, results):
    """Of a loss for each example, which ones are ignored."""
    return [math.prod(results[0].shape)] * bool(results[0].shape)


@register_operator(
    "NLLLoss",
    saves=SavedByOperator("all", outputs=(1,), internal=_ignored),
    source=f"{CORRECTED}negative_log_likelihood",
)
@register_operator("NLLLoss2d", saves=UNMEASURED)
def negative_log_likelihood(logits, labels, weight, reduction="mean", ignore_index=-100):
    """The loss for log-probabilities (examples, classes, …), and the sum of the labels' weights.

    The mean is over these weights, so that each part contributes its sum over the total of all.
    """
    reduction = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    place, names = min(1, logits.ndim - 1), dim_names(logits)
    classes, examples = names[place], (*names[:place], *names[place + 1 :])
    if labels.shape != (*logits.shape[:place], *logits.shape[place + 1 :]) or weight.shape != (logits.shape[place],):
        raise ValueError(f"labels {labels.shape} and weights {weight.shape} don't fit {logits.shape}")
    inputs, sizes = (names, examples, (classes,)), dim_sizes(logits)
    mean, each = reduction == "mean", reduction == "none"
    sums = classes if each else (name for (name,) in names)
    cut = classes if not (mean or each) else sizes
    localize = positional(logits, labels, weight, _REDUCTIONS.index(reduction), ignore_index)
    return Signature(
        inputs, (examples if each else (), ()), sizes, dict.fromkeys(sums, "sum"),
        distributed=dict.fromkeys(cut, "likelihood"), localize=localize,
    )  # fmt: skip


@register_operator("SoftmaxCrossEntropyWithLogits", saves=SECOND_RESULT, operations=7, source="(logits, labels)")
def softmax_cross_entropy(logits, labels):
    """Of (examples, classes) with probabilities as labels: a loss for every example, and the gradient of logits."""
    if logits.ndim != 2 or labels.shape != logits.shape:
        raise ValueError(f"labels {labels.shape} don't fit logits {logits.shape}: both are (examples, classes)")
    names, sizes = dim_names(logits), dim_sizes(logits)
    return Signature((names, names), (names[:1], names), sizes, distributed={"d1": "softmax_cross_entropy"})


@register_operator(
    "SparseSoftmaxCrossEntropyWithLogits", saves=SavedByOperator("all", outputs=(0,), as_they_are=True), operations=7,
    attributes=("is_grad",),
)  # fmt: skip
def sparse_softmax_cross_entropy(logits, labels, is_grad=False):
    """Of (examples, classes) with positions as labels: the mean over examples."""
    if is_grad or logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"labels {labels.shape} don't fit logits {logits.shape}: (examples) and (examples, classes), is_grad=False"
        )
    names, sizes = dim_names(logits), dim_sizes(logits)
    sums = dict.fromkeys(sizes, "sum")
    return Signature((names, names[:1]), ((),), sizes, sums, distributed=dict.fromkeys(sizes, "sparse_cross_entropy"))
