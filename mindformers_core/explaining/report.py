"""The report of a `CellPlan`: plain data from which text and page are rendered. Pure Python.

Equal calls share one `CellReport`, as they share one `CellPlan`: 80 identical layers have one report. Calls with
different notes have different reports.
"""

import os
from dataclasses import dataclass
from functools import cache

from mindformers_core.analysis.memory import activation_peaks
from mindformers_core.analysis.traffic import StepEntry, total
from mindformers_core.layout import Layout
from mindformers_core.operators.registry import facts_of
from mindformers_core.program.activation_policy import ExplainedActivations
from mindformers_core.program.plan import OperatorPlan, Redistribution, by_call
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.algorithms import algorithm_steps, own_gradient_steps


@dataclass(frozen=True)
class TensorEntry:
    """One tensor.

    Attributes:
        name: an argument's or parameter's name, else the number of its Value, as `"%3"`.
        dtype: its name.
        shape, local_shape: global, and of every rank's part.
    """

    name: str
    dtype: str
    shape: tuple
    local_shape: tuple
    layout: Layout


@dataclass(frozen=True, eq=False)
class Row:
    """One instruction of a Cell.

    Attributes:
        entry: the `Redistribution`, `OperatorPlan` or `CallPlan`.
        inputs, results: a `TensorEntry` for every tensor that it takes, and for every one that it gives.
        steps: a `StepEntry` for every step of a redistribution, or of the distributed algorithm that runs in an
            operator's place; empty for others.
        note: its `Annotation`, where its results are kept in another way than usual, or a Cell as a whole runs again;
            or None.
        report: of a call the `CellReport`, the same object for equal calls; None for a Cell with a `bprop`, which runs
            on whole tensors, and for others.
    """

    entry: object
    inputs: tuple
    results: tuple
    steps: tuple
    note: object
    report: "CellReport | None"

    @property
    def source(self):
        """The line of the user's code, without its folder."""
        return os.path.basename(self.entry.node.source or "")

    @property
    def taken(self):
        """The names of the tensors that it takes, as arguments in a text."""
        return ", ".join(entry.name for entry in self.inputs)

    @property
    def child(self):
        """The path of a called Cell from the calling one; from the root, with a leading `/`, where it isn't below."""
        return f"/{self.entry.node.graph.path}" if self.entry.node.child is None else self.entry.node.child

    @property
    def whole(self):
        """A sentence where an operator is registered with `gather=True`, else an empty one."""
        gathers = facts_of(self.entry.node.operator).gather
        return "every rank computes it of whole inputs: gather=True" if gathers else ""


@dataclass(frozen=True, eq=False)
class CellReport:
    """One call of one Cell.

    Attributes:
        path: of the Cell from the root; of equal calls that of the first.
        class_name: without its module.
        arguments, parameters, lifted: `TensorEntry`s of what comes in.
        rows: `Row`s, in order.
        results: `TensorEntry`s.
        traffic: of this call and all below it, see `total`.
    """

    path: str
    class_name: str
    arguments: tuple
    parameters: tuple
    lifted: tuple
    rows: tuple
    results: tuple
    traffic: dict


@dataclass(frozen=True, eq=False)
class Report:
    """The report of a plan.

    Attributes:
        training: whether the root Cell was captured in training.
        root: the `CellReport` of the root.
        decision: the `DeviceModel` by whose prices layouts were chosen, the `Price` of a step, and the mesh axes over
            which declared cuts of the batch, and of weights, come before prices.
        training_bytes, evaluation_bytes: activations of a rank at the peak, see `activation_peaks`.
        undropped_bytes: the first of these if all were held; None where they are.
        cells: number of Cell calls.
        note: the `Annotation` of the root, or None.
        kinds: of all `Annotation`s.
        micro_steps: forward and backward passes of a step.
        stored_traffic: what a step sends of parameters and gradients, see `total`.
    """

    mesh: object
    training: bool
    root: CellReport
    decision: tuple
    training_bytes: int
    evaluation_bytes: int
    undropped_bytes: int | None
    cells: int
    note: object
    kinds: set
    micro_steps: int
    stored_traffic: dict

    @property
    def traffic(self):
        """Traffic of one rank in one step, see `total`."""
        times = self.micro_steps
        sent = {key: (number * times, count * times) for key, (number, count) in self.root.traffic.items()}
        return sent | self.stored_traffic


def make_report(plan, algorithm=None, activations=None, micro_steps=1, stored_traffic=None):
    """The `Report` of a plan.

    Args:
        plan: the `CellPlan` of the root.
        algorithm: as of `through_algorithm`.
        activations: the `ExplainedActivations` of the plan. Default: all are held.
        micro_steps, stored_traffic: see `Report`. Default: one, and nothing.

    Raises:
        ValueError: an operator runs a distributed algorithm, and there is no `algorithm`: nothing is hidden.
    """
    activations = ExplainedActivations() if activations is None else activations
    algorithm = algorithm and cache(algorithm)
    root = _cell_report(plan, algorithm, activations.notes, {})
    calls = sum(1 for _ in plan.walk())
    peaks, undropped = activation_peaks(plan, algorithm, activations), None
    if activations.dropped or activations.on_host:
        held = ExplainedActivations(arguments_need=activations.arguments_need)
        undropped, _ = activation_peaks(plan, algorithm, held)
    note, kinds = activations.notes.get(()), {note.kind for note in activations.notes.values()}
    how = *peaks, undropped, calls, note, kinds, micro_steps, stored_traffic or {}
    decision = plan.device_model, plan.price, *plan.kept
    return Report(plan.mesh, plan.graph.training, root, decision, *how)


def _cell_report(plan, algorithm, notes, known):
    """The `CellReport` of a plan, made once for equal notes; `known` are those that exist, by identity and notes."""
    memo = id(plan), frozenset(notes.items())
    if memo in known:
        return known[memo]
    graph, names, inner = plan.graph, _names(plan.graph), by_call(notes.items())
    rows = [
        _row(entry, plan, names, algorithm, inner.get(index, {}), known)
        for index, entry in enumerate(plan.instructions)
    ]

    def entries(values):
        return tuple(_tensor(value, plan.layouts[value.id], names) for value in values)

    known[memo] = report = CellReport(
        path=graph.path,
        class_name=graph.class_name.rpartition(".")[2],
        arguments=entries(dict.fromkeys(tree_leaves(graph.arguments))),
        parameters=entries(use.value for use in graph.parameters),
        lifted=tuple(_tensor(value, layout, names) for value, layout in plan.lifted),
        rows=tuple(rows),
        results=tuple(_tensor(value, layout, names) for value, layout in plan.returned),
        traffic=total(rows),
    )
    return report


def _names(graph):
    """Number of a Value -> its name, for every Value of a graph that no node produces."""
    names = {}
    for name, structure in graph.arguments.items():
        values = tree_leaves(structure)
        for place, value in enumerate(values):
            names.setdefault(value.id, name if values == [structure] else f"{name}.{place}")
    names |= {use.value.id: use.local or use.path for use in graph.parameters}
    return names | {use.value.id: use.local or use.path or f"constant {use.value}" for use in graph.constants}


def _tensor(value, layout, names):
    name = names.get(value.id, f"%{value.id}")
    return TensorEntry(name, value.dtype, value.shape, layout.local_shape(value.shape), layout)


def _row(entry, plan, names, algorithm, notes, known):
    """The row of an instruction; `notes` are those of the instruction itself, under `()`, and of the called Cell."""
    inputs, results = (
        tuple(_tensor(value, layout, names) for value, layout in pairs) for pairs in (entry.consumed, entry.produced)
    )
    note, report, sent, own = notes.get(()), None, (), ()
    if isinstance(entry, Redistribution):
        sent = ((step, entry.gradient) for step in entry.steps)
    elif entry.plan is not None:
        report = _cell_report(entry.plan, algorithm, notes, known)
    elif isinstance(entry, OperatorPlan) and entry.algorithm is not None:
        flows = any(value.id in plan.gradients for value, _ in entry.produced)
        sent = ((step, gradient and flows) for step, gradient in algorithm_steps(entry, algorithm))
        own = own_gradient_steps(entry, algorithm) if flows else ()
    steps = [StepEntry(step, gradient, note is not None and note.sends) for step, gradient in sent]
    steps += [StepEntry(step, False, True, False) for step in own]
    return Row(entry, inputs, results, tuple(steps), note, report)
