"""`record_digests()`: while a run computes, this rank writes digests of all that its programs compute."""

import os
import time
from contextlib import contextmanager

import mindspore as ms
import numpy as np

from mindformers_core.communication.world import process_state, world
from mindformers_core.diff.comparing import EPS
from mindformers_core.diff.digests import COLUMNS, digest, sign
from mindformers_core.diff.files import forget_rank, write_rows, write_table
from mindformers_core.diff.listing import Listing, layout_facts
from mindformers_core.dtensor.move import dtype_name
from mindformers_core.program.graph import ParameterUse
from mindformers_core.program.observer import Observer
from mindformers_core.program.plan import Redistribution
from mindformers_core.sharding.observing import ProgramObserver, parameter_paths
from mindformers_core.verification.comparison import gradient_layout

__all__ = ["DigestRecorder", "perturb", "record_digests"]


@contextmanager
def record_digests(folder, **about):
    """While open, every program that is generated on this rank writes digests of its tensors into a folder.

    All ranks of a run open it, before they make their programs, with the same folder; another run needs another one.

    Args:
        folder: where the files are written; it is made.
        about: facts about the run, plain data that `diff` shows where they differ.

    Yields:
        The `DigestRecorder`. The own training loop calls its `end_step()` after each step, and may give it further
        tensors with `held()`.

    Raises:
        ValueError: this rank is observed already.
    """
    state = process_state()
    if type(state.observer) is not Observer:
        raise ValueError(f"record_digests('{folder}'): this rank is recorded already: leave that block before")
    state.observer = DigestRecorder(folder, world().rank, about | {"ranks": world().size})
    try:
        yield state.observer
    finally:
        state.observer = Observer()


class DigestRecorder(ProgramObserver):
    """Writes the digests of one rank.

    Args:
        folder, about: as of `record_digests`.
        rank: the global rank.
        instruments: whether generated programs report their tensors; compiled ones can't.
    """

    def __init__(self, folder, rank, about, instruments=True):
        super().__init__()
        self.folder, self.rank, self.instruments = os.fspath(folder), rank, instruments
        os.makedirs(self.folder, exist_ok=True)
        self.step = 0
        self._table, self._written = {"about": about, "facts": {}, "layouts": [], "rows": []}, 0
        forget_rank(self.folder, rank)
        self._numbers, self._layouts = {}, {}  # (what, name, layout, moved) -> number of a row; Layout -> its number
        self._starts = []  # for every number of a row (expected local shape, global position), or None
        self._roots, self._paths = [], None
        self._listings, self._entries = {}, {}
        self._begin_step()

    def _begin_step(self):
        self._rows, self._digests, self._labels = [], [], {}
        self._seen.clear()
        self._pass = self._direction = None

    def placed(self, cell, parameters):
        """See `Observer`."""
        self._roots.append(cell)
        self._paths = None
        return parameters

    def in_pass(self, label, direction):
        """See `Observer`."""
        return super().in_pass(label[::-1], direction)

    def weight_gradient(self, parameter, gradient):
        """See `Observer`; placeholders of gradients that were taken as they came have other shapes."""
        if self._pass is not None and gradient.shape == parameter.shape:
            layout = gradient_layout(getattr(parameter, "computing_layout", None) or parameter.layout)
            name, facts = self._parameter_facts(parameter, layout)
            self._add(self._number("weight gradient", name, layout, facts=facts), gradient, self._pass)

    def held(self, what, tensor, parameter=None):
        """Record a tensor outside of the passes.

        Args:
            what: what it is, as "reduced gradient"; the same in all runs.
            tensor: the local tensor.
            parameter: the Parameter whose layout it has; None for one that is whole, and the same on all ranks.
        """
        layout = getattr(parameter, "layout", None)
        if parameter is None:
            name, facts = what, _facts("", what, what, tensor.shape, tensor.dtype)
        else:
            name, facts = self._parameter_facts(parameter, layout)
        self._add(self._number(what, name, layout, facts=facts), tensor, None)

    def end_step(self, step=None):
        """Write the rows of a step; `step` is its number, by default that of the last one and 1."""
        self.step = self.step + 1 if step is None else step
        if len(self._table["rows"]) > self._written:
            write_table(self.folder, self.rank, self._table)
            self._written = len(self._table["rows"])
        write_rows(self.folder, self.step, self.rank, self._rows, self._digests, list(self._labels))
        self._begin_step()

    def _parameter_facts(self, parameter, layout):
        if self._paths is None:
            self._paths = parameter_paths(self._roots)
        path = self._paths.get(id(parameter), parameter.name)
        shape = parameter.shape if layout is None else layout.global_shape(parameter.shape)
        return f"parameter {path}", _facts(path.rpartition(".")[0], "parameter", path, shape, parameter.dtype)

    def _number(self, what, name, layout, moved=None, facts=None):
        """The number of a row in the table."""
        key = what, name, layout, moved
        if key not in self._numbers:
            if layout not in self._layouts:
                self._layouts[layout] = len(self._layouts)
                self._table["layouts"].append(None if layout is None else layout_facts(layout))
            facts = self._table["facts"].setdefault(name, facts)
            self._numbers[key] = len(self._table["rows"])
            self._table["rows"].append((what, name, self._layouts[layout], moved))
            shape = tuple(facts["shape"])
            slices = [slice(0, size) for size in shape] if layout is None else layout.local_slices(shape, self.rank)
            self._starts.append((tuple(s.stop - s.start for s in slices), tuple(s.start for s in slices)))
        return self._numbers[key]

    def _add(self, number, tensor, label, again=False):
        """Record a tensor; one of an unexpected shape gets a digest that is not finite."""
        shape, starts = self._starts[number]
        array = (tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor).asnumpy()
        values = digest(array, starts) if array.shape == shape else np.full(COLUMNS, np.nan)
        place = -1 if label is None else self._labels.setdefault(label, len(self._labels))
        self._rows.append((number, place, again, time.time_ns()))
        self._digests.append(values)

    def computed(self, tree, program, path, graph, turn, seen, tensor):
        """Record a tensor of a program, and later its gradient."""
        key = id(program), path, graph.call, seen.number
        if key not in self._entries:
            self._entries[key] = self._make_entry(program, graph, seen)
        value, gradient = self._entries[key]
        label = self._pass if self._pass is not None else (turn, 0)
        if value is not None:
            self._add(value, tensor, label, self._direction == "backward")
        if gradient is not None and tensor._requires_grad:
            tensor.register_hook(lambda found: self._add(gradient, found, label))

    def _make_entry(self, program, graph, seen):
        """The numbers of the rows of a tensor of a call, and of its gradient, or None."""
        if id(program) not in self._listings:
            self._listings[id(program)] = Listing(program)
        listing, layout, entry = self._listings[id(program)], seen.layout, seen.entry
        moved = entry.described if isinstance(entry, Redistribution) else None
        is_marked = moved is not None and all("mark" in step.kind for step in entry.steps)  # forward the same tensor
        if is_marked or any(op not in ("sum", "avg") for _, op in layout.partial):
            return None, None
        name = listing.name(graph, seen.value)
        facts = listing.facts[name]
        is_made = moved is None and entry is not None and not isinstance(entry, ParameterUse)
        value = self._number("value", name, layout, moved, facts)
        return value, self._number("gradient", name, gradient_layout(layout), None, facts) if is_made else None


def _facts(cell, operator, hint, shape, dtype):
    about = {"cell": cell, "operator": operator, "source": None, "hint": hint, "inputs": []}
    return about | {"shape": list(shape), "dtype": dtype_name(dtype)}


def perturb(parameters, seed, rank):
    """Change every element of floating parameters by their dtype's unit of rounding, up or down by its global position.

    Args:
        parameters: this rank's Parameters, with a `layout`.
        seed: of the signs, from 1.
        rank: the global rank.
    """
    for parameter in parameters:
        eps = EPS.get(dtype_name(parameter.dtype), 0.0)
        shape = parameter.layout.global_shape(parameter.shape)
        starts = [part.start for part in parameter.layout.local_slices(shape, rank)]
        signs = ms.Tensor(sign(tuple(parameter.shape), starts, seed) * eps)
        ms.ops.assign(parameter, (parameter.astype(ms.float32) * (1 + signs)).astype(parameter.dtype))
