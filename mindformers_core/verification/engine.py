"""A verification: one training step of all ranks, simulated, against the same step on one card."""

import gc
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import extract_tb

import numpy as np
from mindspore import Tensor, nn

from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import process_state
from mindformers_core.dtensor.corrected import CORRECTED
from mindformers_core.dtensor.move import dtype_name
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators.signature import is_float
from mindformers_core.optimizers.adamw import decays
from mindformers_core.passes.thread_tape import ThreadTape, custom_gradients
from mindformers_core.program.graph import OperatorNode
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.verification.checking import FLOAT32_KERNELS, PRECISIONS, Check
from mindformers_core.verification.comparison import largest
from mindformers_core.verification.drawing import DRAWING
from mindformers_core.verification.observing import RankObserver
from mindformers_core.verification.truth import OneCard

__all__ = ["RankStep", "Subject", "operators_of", "simulate"]

_OWN_CODE, _OWN_ROUNDING = 2**-10, 2**-14  # the model's own code runs in float32
_HUGE = 1e30  # counts as infinite: the lowest number of float32 is not that of float64
_UPDATE_TOLERANCE = 1e-5  # optimizers take scalars and keep moments in float32,
_UPDATE_ROUNDING = 2**-23  # and compute weights of float64 in float32


@dataclass(frozen=True, eq=False)
class RankStep:
    """The step of one rank before clipping.

    Attributes:
        losses: the loss, or all floating results, of every pass: label -> local tensors.
        layouts: of the results.
        parameters, gradients: what the optimizer updates, and the reduced gradients.
        clip: function of the gradients: `(clipped ones, norm)`.
        optimizer: an `AdamW`.
        learning_rate: of the step.
    """

    losses: dict
    layouts: tuple
    parameters: tuple
    gradients: tuple
    clip: Callable
    optimizer: object
    learning_rate: float = 1e-3


@dataclass(frozen=True, eq=False)
class Subject:
    """What is verified.

    Attributes:
        mesh: of all ranks.
        build: function of a rank that returns its finished Cells, by stage.
        step: function of a rank and its Cells that returns the `RankStep`.
        replica: function of a rank and its Cells: the number of the data-parallel replica whose own batch it computes.
        parameters: path -> array with the global initial values.
        passes: `(label, args, kwargs, slopes)` of every pass, as of `OneCard.run`.
        divisor: of the sum of all passes' gradients.
        device_target: see `rank_of`.
        model: the Cell on one card, whose own code the captured program is compared with; or None.
    """

    mesh: DeviceMesh
    build: Callable
    step: Callable
    replica: Callable
    parameters: dict
    passes: list
    divisor: int = 1
    device_target: str | None = None
    model: nn.Cell | None = None


def operators_of(plans):
    """Names of all operators of the captured programs, a set."""
    nodes = [node for graph, _ in plans.values() for call in graph.calls() for node in call.nodes]
    return {node.operator for node in nodes if isinstance(node, OperatorNode)}


def simulate(subject, plans, notes=()):
    """Run one step of all ranks, in float64; in float32 where an operator has no kernel for that.

    Args:
        subject: the `Subject`.
        plans: (number of a stage, mesh of its Cell) -> `(CellGraph, CellPlan)`.
        notes: sentences about what isn't verified.

    Returns:
        The `Check`, with all faults.
    """
    is_coarse = not FLOAT32_KERNELS.isdisjoint(operators_of(plans))
    wide, narrow = PRECISIONS["float32 in float64" if is_coarse else "float64"], PRECISIONS["float32"]
    try:
        return _simulated(subject, plans, wide, notes)
    except TypeError as error:
        text = str(error).partition("\n")[0]
        if "float64" not in text.lower():
            raise
    note = f"in float32, to {narrow.tolerance:.1g}: {text}"
    return _simulated(subject, plans, narrow, (*notes, note))


def _simulated(subject, plans, precision, notes):
    """The `Check` of a step in a `Precision`."""
    graphs = {stage: graph for (stage, _), (graph, _) in plans.items()}
    graphs = {stage: graphs[stage] for stage in sorted(graphs)}
    truth = OneCard(graphs, subject.parameters, precision.dtype, subject.divisor)
    for each in subject.passes:
        truth.run(*each)
    check = Check(subject.mesh, plans, truth, precision, notes)
    unlike = _unlike_own_code(subject, plans)
    try:
        pairs = [] if unlike else _own_results(check, subject)
    except Exception as error:  # operators without a kernel here that generated code calls in another way
        pairs, unlike = [], f"which fails here: {str(error).strip().partition(chr(10))[0]}"
    if unlike:
        check.notes += (f"not verified: that the captured program computes what the model's own code does, {unlike}",)
    _compare_own_code(check, subject, pairs)

    def work(rank):
        observer = process_state().observer = RankObserver(rank, check)
        cells = subject.build(rank)
        paths = observer.enter_cells(cells)
        observer.replica = subject.replica(rank, cells)
        try:
            step = subject.step(rank, cells)
        except (RuntimeError, TypeError, ValueError) as error:
            frames = extract_tb(error.__traceback__)
            lines = [frame.line for frame in frames if os.path.basename(frame.filename).startswith("parallel_")]
            if not lines:
                raise
            text = str(error).partition("\n")[0]
            raise type(error)(f"{text} (in the generated line '{lines[-1]}')") from error
        _compare_step(check, rank, observer.replica, paths, step, _buckets(cells))

    with custom_gradients(), _without_collection():
        SimulatedRanks(subject.mesh.size, subject.device_target).run(work)
    return check


def _unlike_own_code(subject, plans):
    """The reason for which the user's own code can't be compared with the captured program; "" where it can."""
    if subject.model is None:
        return "for it is sharded when it is built"
    dtypes = {dtype_name(parameter.dtype) for parameter in subject.model.get_parameters()}
    narrow = sorted(name for name in dtypes if is_float(name) and name not in ("float32", "float64"))
    if narrow:
        return f"whose weights are in {narrow[0]}"
    drawn, wrong = (sorted(names & operators_of(plans)) for names in (DRAWING, CORRECTED.keys()))
    return f"which draws numbers, by {drawn[0]}" if drawn else f"whose {wrong[0]} is wrong on CPU" if wrong else ""


def _own_results(check, subject):
    """Triples (what, found, expected): results and gradients of the user's own code on one card, in the first pass."""
    (label, args, kwargs, slopes), truth = subject.passes[0], check.truth
    weights = {path: weight for path, weight in subject.model.parameters_and_names() if path in truth.trained}
    args, kwargs = tree_map(lambda leaf: Tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, (args, kwargs))
    inputs = [leaf for leaf in tree_leaves((args, kwargs), Tensor) if is_float(dtype_name(leaf.dtype))]
    tape, results = ThreadTape(), []

    def forward(*_):
        found = tree_leaves(subject.model(*args, **kwargs), Tensor)
        results.extend(result for result in found if is_float(dtype_name(result.dtype)))

    with custom_gradients():
        tape.record(forward, inputs)
        sens = [
            Tensor(slope, result.dtype) for slope, result in zip(slopes(truth.outputs[label]), results, strict=True)
        ]
        _, gradients = tape.gradients(tuple(inputs), tuple(results), tuple(sens), list(weights.values()))
    pairs = [("a result", *pair) for pair in zip(results, truth.outputs[label], strict=True)]
    expected = truth.weight_gradients[label]
    pairs += [(f"gradient of {path}", found, expected[path]) for path, found in zip(weights, gradients, strict=True)]
    return [
        (what, np.clip(found.asnumpy(), -_HUGE, _HUGE), np.clip(value, -_HUGE, _HUGE)) for what, found, value in pairs
    ]


def _compare_own_code(check, subject, pairs):
    """Compare what `_own_results` gives."""
    label, rank = subject.passes[0][0], subject.mesh.rank_list[0]
    for kind in ("a result", "gradient"):
        some = [pair for pair in pairs if pair[0].startswith(kind)]
        limits = {"tolerance": _OWN_CODE, "rounding": _OWN_ROUNDING * largest([value for _, _, value in some])}
        for what, found, value in some:
            at = None, label, None, f"{what} by the model's own code; one card's is the captured program's", None
            check.hold((-1,), rank, "result", at, None, Tensor(found), value, **limits)


@contextmanager
def _without_collection():
    """While open, Python doesn't search for unreachable objects: the many Cells of all ranks would take a tenth of the
    time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _buckets(cells):
    """Path of a parameter -> its bucket of gradients, as text."""
    found = {}
    for net in cells.values():
        storage = tree_of(net).storage
        for number, bucket in enumerate(getattr(storage, "reduces", ())):
            names = [storage.parameters[member].plan.path for member in bucket.members]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text = f"{bucket.kind} number {number} of {len(storage.reduces)}, of {', '.join(names[:3])}{more}"
            found.update(dict.fromkeys(names, text))
    return found


def _compare_step(check, rank, replica, paths, step, buckets):
    """Compare the results of a rank's passes, its gradients, and its parameters after one update."""
    truth, parameters = check.truth, [(paths[id(parameter)], parameter) for parameter in step.parameters]

    terms = max((truth.largest("gradient", label) for label in truth.weight_gradients), default=0.0)

    def hold(order, what, path, layout, tensor, value, tolerance=None, bucket="", rounding=None):
        at = None, None, None, path, bucket
        rounding = check.precision.rounding * terms if rounding is None else rounding
        check.hold((2, order), rank, what, at, layout, tensor, value, tolerance=tolerance, rounding=rounding)

    for label, results in step.losses.items():
        for result, layout, value in zip(results, step.layouts, truth.outputs[(*label, replica)], strict=True):
            hold(0, "result", str(label), layout, result, value)
    summed = dict(truth.step_gradients)
    for path, parameter in parameters:
        summed.setdefault(path, np.zeros(parameter.global_shape))
    for (path, parameter), gradient in zip(parameters, step.gradients, strict=True):
        bucket = buckets.get(path, "")
        hold(1, "reduced gradient", path, parameter.layout, gradient, summed[path], bucket=bucket)
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in summed.values()))
    clipped, found = step.clip(tuple(step.gradients))
    hold(2, "gradient norm", "", None, found, norm, _UPDATE_TOLERANCE)
    factor = min(step.clip.max_norm / (norm + 1e-6), 1.0) if step.clip.max_norm else 1.0
    for (path, parameter), gradient in zip(parameters, clipped, strict=True):
        hold(3, "clipped gradient", path, parameter.layout, gradient, summed[path] * factor, _UPDATE_TOLERANCE)
    before = [parameter.asnumpy().copy() for _, parameter in parameters]
    step.optimizer(clipped, *step.optimizer.scalars(1, step.learning_rate))
    for (path, parameter), old, gradient in zip(parameters, before, clipped, strict=True):
        value = _first_update(old, gradient.asnumpy(), step.learning_rate, step.optimizer.section, parameter.name)
        rounding = _UPDATE_ROUNDING * np.abs(old).max(initial=0.0)
        hold(4, "update", path, None, Tensor(parameter.asnumpy() - old), value, _UPDATE_TOLERANCE, rounding=rounding)


def _first_update(weight, gradient, rate, section, name):
    """What AdamW's first step adds to a weight (Loshchilov and Hutter, 2019): both moments are of one gradient."""
    decay = section.weight_decay if decays(name, section.weight_decay_exclude) else 0.0
    return -rate * (gradient / (np.abs(gradient) + section.eps) + decay * weight)
