"""What becomes of a sharded tree's activations after `recompute()` and `swap()`."""

import logging
from contextlib import nullcontext
from weakref import WeakKeyDictionary

from mindspore import nn
from mindspore.graph.api import _pynative_executor

from mindformers_core.program.activation_policy import ActivationPolicy, Keeper
from mindformers_core.program.cutting import calls_alone, calls_of, unshared
from mindformers_core.program.operator_names import operator_texts
from mindformers_core.program.places import operators_in_order
from mindformers_core.program.plan import joined_path
from mindformers_core.recompute.again import call_again
from mindformers_core.recompute.algorithms import algorithm_of
from mindformers_core.recompute.budget import described
from mindformers_core.recompute.budgeting import choice_within
from mindformers_core.recompute.choosing import (
    cell_lies_in,
    check_whole_cells,
    choose_keys,
    full_layers,
    layers_of,
    whole_cells,
)
from mindformers_core.recompute.contradictions import check_gathers
from mindformers_core.recompute.explained import explained_activations, explained_cells
from mindformers_core.recompute.keeping import keeping
from mindformers_core.recompute.marking import marked
from mindformers_core.recompute.stages import check_compiled_stage, check_stages, stage_told
from mindformers_core.recompute.swapped import check_apart, swapped_keys
from mindformers_core.sharding.sharded_cells import CONTAINERS

__all__ = ["ChosenActivations"]

_LOG = logging.getLogger("mindformers_core")
_RECOMPUTED = "from mindformers_core.recompute.keeping import Recomputed", "recomputed", "Recomputed()"
_ON_HOST = "from mindformers_core.recompute.offloading import OnHost"


class ChosenActivations(ActivationPolicy):
    """What `recompute()` and `swap()` give a tree.

    Args:
        tree: the `ShardedTree`.
        settings: the `RecomputeSettings`.
        swapping: the `SwapSettings`.
        is_part: whether the tree is a part of the model.

    Attributes:
        settings, swapping: as given.
        choices: `FramePlan` of a program -> its `Choice`, under a budget, as long as there is the program.
    """

    marks = True

    def __init__(self, tree, settings, swapping, is_part=False):
        self.tree, self.settings, self.swapping, self.is_part = tree, settings, swapping, is_part
        self.layers = layers_of(_containers(tree))
        self.choices = WeakKeyDictionary()
        self._compiled = WeakKeyDictionary()  # plan of a program of compiled functions -> (its path, `compiled`)
        self._frame = None  # of the last program
        self._short = None  # of a budget: (bytes that can be kept at the least, all bytes), where that is too much
        self._has_matched = False  # all patterns, in some program
        self._recomputed = set()  # paths of Cells in which something is
        if not is_part:
            check_stages(settings, swapping, [self.told()])
        if tree.storage.settings is not None:  # else hsdp() may still be called
            self._check_gathers()
        self.full = full_layers(settings.full, self.layers, is_part=True)
        self._cells, self._gaps = whole_cells(settings, self.full, list(tree.cells))
        self.recomputed_cells = [
            path for path in self._cells if not any(cell_lies_in(path, other) for other in self._cells if other != path)
        ]

    def marked(self, path, frame, compiled):
        """See `ActivationPolicy`."""
        if not path:
            self._frame = frame
        if compiled is not None:
            lenient = self._is_lenient(frame)
            check_whole_cells(self.settings, self.swapping, frame, self._gaps, lenient, self.full)
            for inner in () if compiled else self._cells:
                self.tree.cells[inner]._recompute(True, False)  # what recompute() does for graphs, not for PyNative
            frame = frame if compiled else unshared(frame)  # else MindSpore confuses collectives in them
            self._compiled[frame] = path, compiled
            return frame
        keeper = Keeper(*_RECOMPUTED, takes_collectives=self.settings.mp_comm_recompute)
        lenient = self._is_lenient(frame)
        swapped = swapped_keys(self.swapping, frame, self.layers, algorithm_of, path, lenient)
        keys, choice = self._chosen(path, frame, lenient, swapped)
        keepers = dict.fromkeys(keys, keeper)
        self._has_matched = self._has_matched or not (lenient or path)
        own = self.settings, self.swapping, frame, self.layers
        check_apart(*own, keys, swapped, self.tree.label(""), path, self.full)
        for key, prefetch in swapped.items():
            keepers[key] = Keeper(_ON_HOST, f"on_host_{prefetch}", f"OnHost(prefetch={prefetch})")
        frame = marked(frame, keepers)
        if choice is not None:
            self.choices[frame] = choice
        return frame

    def _is_lenient(self, frame):
        """Whether patterns may match nothing: they are for other stages, were all found before, or in evaluation."""
        return self.is_part or self._has_matched or not frame.graph.training

    def _chosen(self, path, frame, lenient, swapped):
        """`(keys, Choice or None)`: the instructions of a program of the Cell at `path` that are computed again.

        A budget leaves alone what is `swapped`.
        """
        units, choice = tuple(self.tree.storage.units), None
        if self.settings.budget is None or path:  # a budget is for the whole
            keys = choose_keys(self.settings, frame, algorithm_of, path, self.full, units, lenient)
        else:
            needed = not self.tree.storage.takes_gradients
            own = self.settings, frame, path, units, lenient, frozenset(swapped), needed
            choice = choice_within(*own, is_part=self.is_part)
            keys = choice.dropped
            if frame.graph.training:
                self._short = (choice.least_bytes, choice.all_bytes) if choice.problem else None
            if not choice.problem:
                self._report(choice, frame, path)
        places = [place for place in operators_in_order(frame) if place.key in keys]
        self._recomputed |= {joined_path(path, place.path) for place in places}
        return keys, choice

    def _report(self, choice, frame, path):
        """Tell what was chosen."""
        names = operator_texts(frame, path)
        lines = described(choice, lambda key: names.get(key, "a redistribution"))
        _LOG.info("%s, within budget %s:\n%s", self.tree.label(path), self.settings.budget, "\n".join(lines))

    def call_again(self, function, others, tensors):
        """See `ActivationPolicy`."""
        return call_again(function, others, tensors)

    def check_compiling(self):
        """See `ActivationPolicy`."""
        if self.recomputed_cells and _pynative_executor.grad_flag():
            raise ValueError(
                f"{self.tree.label('')} is recomputed, but PyNative differentiates a compiled function that calls it, "
                "and keeps all of it: take gradients with zero.value_and_grad(hsdp(cell), compiled=True), or within "
                "the compiled function"
            )

    def check_matched(self):
        """See `ActivationPolicy`."""
        self._check_gathers()
        program = next(reversed(self.tree.programs.values()), None)
        choice = None if program is None else self.choices.get(program.frame)
        if choice is not None and choice.problem:
            raise ValueError(choice.problem)
        if self._frame is not None and not (self.is_part or self._has_matched):
            self.check_stages([self.told()])
            self._has_matched = True

    def _check_gathers(self):
        sharding = self.tree.storage.settings
        instead = f"optimizer_level is '{sharding.level}'" if sharding else "hsdp() wasn't called"
        gathers = not self.settings.is_on or sharding is not None and sharding.level == "level3"
        check_gathers(self.settings, gathers, "hsdp(optimizer_level='level3')", instead)

    def told(self):
        """See `ActivationPolicy`."""
        return stage_told(self.layers, self._frame, list(self.tree.cells), self._short)

    def check_stages(self, told):
        """See `ActivationPolicy`."""
        self._check_gathers()
        check_stages(self.settings, self.swapping, told)

    def check_compiled_stage(self, told):
        """See `ActivationPolicy`."""
        check_compiled_stage(self.settings, self.swapping, self._gaps, [each for each in told if each is not None])

    def keeps_weights(self, unit):
        """See `ActivationPolicy`."""
        kept = self.settings.parallel_optimizer_comm_recompute is False
        return kept and any(f"{path}.".startswith(f"{unit}.") for path in self._recomputed)

    def explained(self, frame, path=""):
        """See `ActivationPolicy`."""
        arguments_need = not self.tree.storage.takes_gradients
        if frame in self._compiled:
            called, compiled = self._compiled[frame]
            again, units = (calls_of(frame, called, cells) for cells in compiled or (self.recomputed_cells, ()))
            cells = [key for key, how in calls_alone(frame, again, units).items() if how == "again"]
            return explained_cells(frame, cells, bool(compiled), algorithm_of, path, arguments_need)
        return explained_activations(frame, _RECOMPUTED[1], algorithm_of, path, arguments_need, self.swapping.is_on)

    def calling(self):
        """See `ActivationPolicy`."""
        asked = _pynative_executor.grad_flag() or self.tree.cells[""].requires_grad  # mindspore.grad(cell) sets that
        needed = asked and self.tree.compiling is None
        if needed:
            self.check_matched()
        return keeping() if needed else nullcontext()


def _containers(tree):
    """The outermost Cells that hold layers in a row: `(path, names of those)`."""
    found = []
    for path, cell in tree.cells.items():
        if _holds_layers(cell) and not any(f"{path}.".startswith(f"{other}.") for other, _ in found):
            found.append((path, tuple(cell.name_cells())))
    return found


def _holds_layers(cell):
    """Whether the Cells in a Cell are layers: a SequentialCell may also be a stem or head of Dense and GELU."""
    is_sequence = isinstance(cell, nn.SequentialCell)
    return isinstance(cell, CONTAINERS) and not (is_sequence and all(map(_is_single, cell.cells())))


def _is_single(cell):
    """Whether a Cell is MindSpore's own, or of this package, and holds no others."""
    return type(cell).__module__.startswith(("mindspore.", "mindformers_core.")) and not cell.name_cells()
