"""`record_digests()`: while a run computes, this rank writes digests of all that its programs compute."""

import os
import time
from contextlib import contextmanager
from functools import cache

import mindspore as ms
import numpy as np
from mindspore import Parameter

from mindformers_core.communication.world import process_state, world
from mindformers_core.diff.digests import COLUMNS, digest, sign
from mindformers_core.diff.listing import Listing, tensor_facts
from mindformers_core.diff.runs import NO_PASS, layout_text, row_files, write_rows, write_table
from mindformers_core.diff.tolerance import EPS
from mindformers_core.dtypes import dtype_name
from mindformers_core.mindspore_private import needs_gradient
from mindformers_core.padding import padded_shape, sizes_of_parts
from mindformers_core.program.graph import ParameterUse
from mindformers_core.program.observer import Observer
from mindformers_core.program.plan import Redistribution
from mindformers_core.scopes import replaced
from mindformers_core.sharding.observing import ProgramObserver, parameter_paths
from mindformers_core.verification.comparison import gradient_layout


@contextmanager
def record_digests(folder, **about):
    """While open, every program that is generated on this rank writes digests of its tensors into a folder.

    All ranks of a run open it, before they make their programs, with the same folder; another run needs another one.

    Args:
        folder: where the files are written; it is made.
        about: facts about the run, plain data; reports show `mesh` and `context`.

    Yields:
        The `DigestRecorder`: call its `end_step()` after each step, and `held()` with further tensors.
    """
    state = process_state()
    if type(state.observer) is not Observer:
        raise ValueError(f"record_digests('{folder}'): this rank is recorded already: leave that block before")
    with replaced(state, observer=DigestRecorder(folder, world().rank, about | {"ranks": world().size})):
        yield state.observer


class DigestRecorder(ProgramObserver):
    """Writes the digests of one rank; `instruments`: whether generated programs report, which compiled ones can't."""

    def __init__(self, folder, rank, about, instruments=True):
        super().__init__()
        self.folder, self.rank, self.instruments, self.step = os.fspath(folder), rank, instruments, 0
        self._table, self._written = {"about": about, "facts": {}, "rows": []}, 0
        self._rows, self._roots, self._paths = [], [], None
        self._listing, self._entries, self._entry = cache(Listing), cache(self._make_entries), cache(self._make_entry)

    def sharded(self, cell):
        self._roots.append(cell)
        self._paths = None

    def weight_gradient(self, parameter, gradient):
        """See `Observer`; placeholders of gradients that were taken as they came have other shapes."""
        if self._pass is not None and gradient.shape == parameter.shape:
            layout = gradient_layout(getattr(parameter, "computing_layout", None) or parameter.layout)
            self._hold("weight gradient", gradient, parameter, layout, self._pass)

    def held(self, what, tensor, parameter=None):
        """Record a local tensor outside of the passes.

        Args:
            what, tensor: what it is, as "reduced gradient"; the same in all runs.
            parameter: the Parameter whose layout it has; None for one that is whole, and the same on all ranks.
        """
        self._hold(what, tensor, parameter, getattr(parameter, "layout", None), NO_PASS)

    def _hold(self, what, tensor, parameter, layout, label):
        """Record a tensor of a Parameter, or a whole one, in a layout."""
        if parameter is None:
            name, about, local = what, ("", what, what), tensor
        else:
            self._paths = self._paths or parameter_paths(self._roots)
            path, local = self._paths.get(id(parameter), parameter.name), parameter
            name, about = f"parameter {path}", (path.rpartition(".")[0], "parameter", path)
        shape = getattr(local, "global_shape", local.shape)
        self._table["facts"].setdefault(name, tensor_facts(*about, shape, dtype_name(local.dtype)))
        self._add(self._entry(what, name, layout), tensor, label)

    def end_step(self, step=None):
        """Write the rows of a step; `step` is its number, by default that of the last one and 1."""
        self.step = self.step + 1 if step is None else step
        if not self._written:  # not before, since the run's folder may be moved then
            os.makedirs(self.folder, exist_ok=True)
            for path in row_files(self.folder, self.rank).values():  # of an earlier run
                path.unlink()
        if len(self._table["rows"]) > self._written:
            write_table(self.folder, self.rank, self._table)
            self._written = len(self._table["rows"])
        write_rows(self.folder, self.step, self.rank, self._rows)
        self._rows = []
        self._seen.clear()

    def computed(self, tree, program, path, graph, turn, seen, tensor):
        """Record a tensor of a program, and later its gradient."""
        value, gradient = self._entries(program, graph, seen)
        label = self._pass or (0, turn)
        if value is not None:
            self._add(value, tensor, label, self._direction == "backward")
        if gradient is not None and needs_gradient(tensor) and not isinstance(tensor, Parameter):  # as a cast may be
            tensor.register_hook(lambda found: None if found is None else self._add(gradient, found, label))

    def _add(self, entry, tensor, label, again=False):
        """Record a tensor; one of an unexpected shape gets a digest that is not finite."""
        number, shape, starts = entry
        array = (tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor).asnumpy()
        values = digest(array, starts) if array.shape == shape else np.full(COLUMNS, np.nan)
        self._rows.append((time.time_ns(), self.rank, number, label, again, values))

    def _make_entries(self, program, graph, seen):
        """The entries of a tensor of a call, and of its gradient, or None."""
        listing, layout, entry = self._listing(program), seen.layout, seen.entry
        moved = entry.described if isinstance(entry, Redistribution) else None
        is_marked = moved is not None and all("mark" in step.kind for step in entry.steps)  # forward the same tensor
        if is_marked or any(op not in ("sum", "avg") for _, op in layout.partial):
            return None, None
        name = listing.names[graph.call, seen.value.id]
        self._table["facts"].setdefault(name, listing.facts[name])
        value = self._entry("value", name, layout, moved)
        is_made = moved is None and entry is not None and not isinstance(entry, ParameterUse)
        return value, self._entry("gradient", name, gradient_layout(layout)) if is_made else None

    def _make_entry(self, what, name, layout, moved=None):
        """`(number of the row in the table, expected local shape, global positions of its first elements)`."""
        self._table["rows"].append((what, name, layout_text(layout), moved))
        shape = self._table["facts"][name]["shape"]
        local, starts = tuple(shape), (0,) * len(shape)
        if layout is not None:
            whole = padded_shape(local, sizes_of_parts(layout, local, True, name))  # zeros don't change a digest
            starts = tuple(tuple(run.start for run in runs) for runs in layout.local_runs(whole, self.rank))
            local = layout.local_shape(whole)
        return len(self._table["rows"]) - 1, local, starts


def perturb(parameters, seed, rank):
    """Change every element of floating Parameters by a unit of rounding, up or down by its global position."""
    for parameter in parameters:
        eps = EPS.get(dtype_name(parameter.dtype), 0.0)
        shape = parameter.layout.global_shape(parameter.shape)
        starts = [part.start for part in parameter.layout.local_slices(shape, rank)]
        signs = ms.Tensor(sign(tuple(parameter.shape), starts, seed) * eps)
        ms.ops.assign(parameter, (parameter.astype(ms.float32) * (1 + signs)).astype(parameter.dtype))
