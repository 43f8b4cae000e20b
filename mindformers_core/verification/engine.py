"""A verification: one training step of all ranks, simulated, against the same step on one card."""

import gc
import re
from contextlib import contextmanager
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import process_state
from mindformers_core.dtypes import dtype_name
from mindformers_core.hints import listed
from mindformers_core.lowering.corrected import CORRECTED
from mindformers_core.mindspore_private import GLOBAL_SEED, SEEDS
from mindformers_core.operators import facts_of, is_float
from mindformers_core.padding import own_array, stored_array
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.program.graph import OperatorNode
from mindformers_core.program.structure import tree_map
from mindformers_core.scopes import replaced
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.verification.checking import FLOAT32_KERNELS, PRECISIONS, Check
from mindformers_core.verification.comparison import largest
from mindformers_core.verification.drawing import SEED
from mindformers_core.verification.observing import RankInstrumentation, RankObserver, place_of
from mindformers_core.verification.ranges import compare_ranges, range_cases
from mindformers_core.verification.rounding import EPS, allowances
from mindformers_core.verification.stepping import compare_step
from mindformers_core.verification.truth import OneCard, differentiated, part_sizes

_OWN_CODE = 2**-10, 2**-14  # tolerance and rounding: the model's own code runs in float32
_OWN_TERMS = 2**-7  # of the largest magnitude in a pass, whose rounding errors in float32 are left where terms cancel
_OWN_STATE = 2**-16, 2**-20  # the same, of the parameters that it writes
_OWN_SUMS = 4  # units of rounding of a result in half precision there: kernels add in it
_HUGE = 1e30  # counts as infinite: the lowest number of float32 is not that of float64
_AS_BEFORE = 2**-22, 0.0  # of float32 parameters that nothing writes
_FIRST = (-1,)  # the order of faults in the model's own code
_LEAVE_IT = ("add_", "sub_", "mul_", "div_", "floor_divide_", "remainder_", "exp_")  # on CPU, their tensor as it was


def acts_in_training(plans):
    """Whether programs draw numbers or write Parameters, as dropout and batch norms do in training."""
    return any(facts.draws or facts.writes for facts in map(facts_of, _operators_of(plans)))


def _operators_of(plans):
    """Names of all operators of the captured programs, a set."""
    nodes = [node for graph, _ in plans.values() for call in graph.calls() for node in call.nodes]
    return {node.operator for node in nodes if isinstance(node, OperatorNode)}


@contextmanager
def seed_restored():
    """While open, `ms.set_seed` may be called; then its seed, which may be None, and all generators are as before."""
    seed, numbers, data, draws = ms.get_seed(), np.random.get_state(), ms.dataset.config.get_seed(), ms.get_rng_state()
    try:
        yield
    finally:
        SEEDS[GLOBAL_SEED] = seed
        ms.dataset.config.set_seed(data)  # it seeds NumPy, too
        np.random.set_state(numbers)
        ms.set_rng_state(draws)


def simulate(subject, plans, notes=()):
    """Run one step of all ranks, in float64; in float32 where an operator has no kernel for that.

    Args:
        subject: an object with these attributes:

            mesh: of all ranks.
            build: function of a rank that returns its finished Cells, by stage.
            step: function of a rank and its Cells that runs a step up to clipping; returns, of every pass whose results
                are compared, label -> pairs (local tensor, layout); the reduced gradients; a `ClipByGlobalNorm`, and a
                `GroupedOptimizer`.
            replica: function of a rank and its Cells: the number of the data-parallel replica whose batch it computes.
            parameters: path -> array with the global initial values.
            passes: `(label, args, kwargs, slopes)` of every pass, as of `OneCard.run`.
            divisor: of the sum of all passes' gradients; None: the number of labels, see `OneCard`.
            device_target: see `rank_of`.
            goes_on: whether `step` may be called again, for the second step.
            is_mixed: whether the Cells compute in several dtypes, in which results and gradients are compared, too.
            model: the Cell on one card, whose own code the captured program is compared with; or None.
        plans: (number of a stage, mesh of its Cell) -> `(CellGraph, CellPlan)`.
        notes: sentences about what isn't verified.

    Returns:
        The `Check`, with all faults.
    """
    sizes, given = part_sizes(graph for graph, _ in plans.values()), subject.parameters.items()
    subject.parameters = {path: stored_array(each, sizes.get(path, ())) for path, each in given}
    is_coarse = not FLOAT32_KERNELS.isdisjoint(_operators_of(plans))
    wide, narrow = PRECISIONS["float32 in float64" if is_coarse else "float64"], PRECISIONS["float32"]
    try:
        return _simulated(subject, plans, wide, notes)
    except TypeError as error:
        text = str(error).partition("\n")[0]
        if not re.search("float|dtype", text.lower()):
            raise
    note = f"in float32, to {narrow.tolerance:.1g}: {text}"
    return _simulated(subject, plans, narrow, (*notes, note))


def _simulated(subject, plans, precision, notes):
    """The `Check` of a step in a `Precision`; where a fault may be due to rounding, of another run that allows for it:
    for that of the dtypes in the model's own code, and for that of kernels in programs.
    """
    graphs = {stage: graph for (stage, _), (graph, _) in sorted(plans.items(), key=lambda entry: entry[0][0])}
    card = partial(
        OneCard, graphs, subject.parameters, dtype=precision.dtype, divisor=subject.divisor, passes=subject.passes
    )

    def of_kernel(_, operator):
        return EPS["float32" if operator in FLOAT32_KERNELS else precision.dtype]

    truth, of_programs, of_own = card(), {}, {}
    given = subject.mesh, plans, truth, precision, notes
    check = _compared(subject, Check(*given))
    if check.faults and precision is not PRECISIONS["float64"]:
        of_programs = allowances(truth, card(noise=of_kernel))
    if any(fault.order == _FIRST for fault in check.faults):
        perturbed = card(noise=lambda dtype, _: EPS.get(dtype, 0.0) * (_OWN_SUMS if "16" in dtype else 1))
        # 1 - y * y of a saturated tanh is rounded in its backward kernel alone
        of_own = allowances(truth, perturbed, card(dtype="float32"))
    if not check.is_located() or of_programs or of_own:
        check = _compared(subject, Check(*given, is_whole=not check.is_located(), allowances=of_programs), of_own)
    if subject.is_mixed and not check.faults:
        allowed = allowances(truth, card(noise=lambda dtype, _: EPS.get(dtype, 0.0)))
        mixed = Check(subject.mesh, plans, truth, PRECISIONS["mixed"], allowances=allowed)
        _on_ranks(subject, partial(_compare_rank, subject, mixed))
        check = check.followed_by(mixed)
    return check


def _compared(subject, check, of_own=None):
    """The `Check`, after one step of all ranks; `of_own`: the allowances for the model's own code. Default: none."""
    if unlike := _unlike_own_code(subject, check.plans) or _compare_own_code(check, subject, of_own or {}):
        check.notes += (f"not verified: that the captured program computes what the model's own code does, {unlike}",)
    ranges = range_cases(check.truth, check.plans)

    def work(rank):
        observer, cells = _compare_rank(subject, check, rank)
        compare_ranges(check, rank, {stage: tree_of(net).mesh for stage, net in cells.items()}, ranges)
        return _second_step(subject, rank, cells, observer) if subject.goes_on else None

    try:
        ended = _on_ranks(subject, work)
    except (RuntimeError, ValueError) as error:
        if not check.faults:
            raise
        check.notes += (f"not verified: what comes after an error: {error}",)
    else:
        if subject.goes_on:
            _compare_second_step(check, subject, ended)
    return check


def _on_ranks(subject, work):
    """`work(rank)` of all ranks; Python's search for unreachable Cells would take a tenth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with custom_gradients():
            return SimulatedRanks(subject.mesh.size, subject.device_target).run(work)
    finally:
        gc.enable() if collects else None


def _compare_rank(subject, check, rank):
    """Compare a rank's first step; returns its `RankObserver` and its Cells."""
    observer = process_state().observer = RankObserver(rank, check)
    process_state().instrumentation = RankInstrumentation(observer)
    cells = subject.build(rank)
    observer.enter_cells(cells, subject.replica(rank, cells))
    try:
        ms.manual_seed(SEED)
        step = subject.step(rank, cells)
    except Exception as error:
        if where := place_of(error.__traceback__):
            error.args = (f"{str(error).partition(chr(10))[0]} ({where})",)
        raise
    _compare_held(check, observer, cells, subject.parameters)
    compare_step(check, observer, step, _buckets(cells))
    return observer, cells


def _second_step(subject, rank, cells, observer):
    """A rank's next step: path -> `(Parameter's layout, value before, reduced gradient)`, of what is trained, and path
    -> `(layout, value before)` of the others."""
    observer.is_watching = False
    held = {path: parameter for net in cells.values() for path, parameter in net.parameters_and_names()}
    before = {path: (each.layout, each.asnumpy().copy()) for path, each in held.items()}
    ms.manual_seed(SEED)
    _, gradients, _, optimizer = subject.step(rank, cells)
    paths = [observer.paths[id(parameter)] for parameter in optimizer.parameters]
    return before, dict(zip(paths, (gradient.asnumpy() for gradient in gradients), strict=True))


def _compare_second_step(check, subject, ended):
    """Compare the reduced gradients of all ranks' second step with one card's, from the ranks' own parameters."""
    parameters = {path: array.copy() for path, array in subject.parameters.items()}
    for rank, (before, _) in enumerate(ended):
        for path, (layout, part) in before.items():
            whole = parameters[path] = parameters[path].astype(part.dtype, copy=False)
            whole[layout.local_slices(whole.shape, rank)] = part
    card = OneCard(check.truth.graphs, parameters, check.precision.dtype, subject.divisor, subject.passes)
    scale = max(card.largest("gradient", label) for label in card.weight_gradients)
    for rank, (before, gradients) in enumerate(ended):
        for path, gradient in gradients.items():
            value = card.step_gradients.get(path, np.zeros(subject.parameters[path].shape))
            given = (3, 0), rank, "reduced gradient of the second step", (None, None, None, path, "")
            check.hold(*given, before[path][0], Tensor(gradient), value, scale)


def _unlike_own_code(subject, plans):
    """The reason for which the user's own code can't be compared with the captured program; "" where it can."""
    if subject.model is None:
        return "for it is sharded when it is built"
    dtypes = {dtype_name(parameter.dtype) for parameter in subject.model.get_parameters()}
    narrow = sorted(name for name in dtypes if is_float(name) and name not in ("float32", "float64"))
    if narrow:
        return f"whose weights are in {narrow[0]}"
    used = sorted(_operators_of(plans))
    drawn, wrong = [name for name in used if facts_of(name).draws], [name for name in used if name in CORRECTED]
    return f"which draws numbers, by {drawn[0]}" if drawn else f"whose {wrong[0]} is wrong on CPU" if wrong else ""


def _compare_own_code(check, subject, slack):
    """Compare with the user's own code on one card, in the first pass; returns why it can't run, or ""."""
    label, rank = subject.passes[0][0], subject.mesh.rank_list[0]
    try:
        groups = _own_results(subject, check.truth)
    except Exception as error:  # operators without a kernel here that generated code calls in another way
        return f"which fails here: {str(error).strip().partition(chr(10))[0]}"
    for group, kind in zip(groups, ("value", "gradient", "value"), strict=True):
        is_written = group is groups[-1]  # few operators make them
        terms = 0.0 if is_written else check.truth.largest(kind, label) * _OWN_TERMS
        scale = max(terms, largest([np.clip(value, -_HUGE, _HUGE) for *_, value in group]))
        for what, found, value in group:
            at = None, label, None, f"{what} by the model's own code; one card's is the captured program's", None
            given = _FIRST, rank, "result", at, None, Tensor(found), np.clip(value, -_HUGE, _HUGE), scale
            check.hold(*given, limits=_OWN_STATE if is_written else _OWN_CODE, slack=slack.get(id(value), 0.0))
    return ""


def _not_in_place(*_, **__):
    raise RuntimeError("MindSpore's arithmetic in place, as x.add_(y), leaves x as it was on CPU")


def _own_results(subject, truth):
    """Triples (what, found, expected) of the user's own code in the first pass: three lists, of its results, gradients
    and written parameters, which are restored."""
    model, (label, args, kwargs, slopes) = subject.model, subject.passes[0]
    weights = {path: weight for path, weight in model.parameters_and_names() if path in truth.trained}
    args, kwargs = tree_map(lambda leaf: Tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, (args, kwargs))
    written = {path: p for path, p in model.parameters_and_names() if path in truth.written[label]}
    before = {path: parameter.asnumpy().copy() for path, parameter in written.items()}
    expected, gradients, sizes = truth.outputs[label], truth.weight_gradients[label], truth.part_sizes
    try:
        with custom_gradients(), replaced(Tensor, **dict.fromkeys(_LEAVE_IT, _not_in_place)):
            results, found = differentiated(model, args, kwargs, lambda _: slopes(expected), weights.values())
        after = {path: Tensor(parameter.asnumpy().copy()) for path, parameter in written.items()}
    finally:
        for path, array in before.items():
            ops.assign(written[path], Tensor(array))
    gradients = {path: own_array(gradients[path], sizes[path]) for path in weights}
    groups = (
        [("a result", *pair) for pair in zip(results, expected, strict=True)],
        [(f"gradient of {path}", one, gradients[path]) for path, one in zip(weights, found, strict=True)],
        [(f"{path} afterwards", one, truth.written[label][path]) for path, one in after.items()],
    )
    return [[(what, np.clip(one.asnumpy(), -_HUGE, _HUGE), value) for what, one, value in group] for group in groups]


def _buckets(cells):
    """Path of a parameter -> its bucket of gradients, as text."""
    found = {}
    for net in cells.values():
        storage = tree_of(net).storage
        for number, bucket in enumerate(getattr(storage, "reduces", ())):
            names = [storage.parameters[member].plan.path for member in bucket.members]
            text = f"{bucket.kind} number {number} of {len(storage.reduces)}, of {listed(names, 3, ', ')}"
            found.update(dict.fromkeys(names, text))
    return found


def _compare_held(check, observer, cells, parameters):
    """Compare what parameters hold after all passes: what programs write, such as running statistics, or what they held
    before, `parameters`, in no other digit."""
    written = {path: array for state in check.truth.written.values() for path, array in state.items()}
    held = {path: parameter for net in cells.values() for path, parameter in net.parameters_and_names()}
    for path, parameter in held.items():
        what, value, limits = "written parameter", written.get(path), None
        if value is None:
            what, value, limits = "parameter after the passes", parameters.get(path), _AS_BEFORE
        if value is not None and not (limits and "16" in dtype_name(parameter.dtype)):
            given = (2, 0), observer.rank, what, (None, None, None, path, "")
            check.hold(*given, parameter.layout, parameter, value, limits=limits)
