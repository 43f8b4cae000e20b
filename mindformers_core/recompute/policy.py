"""What becomes of a sharded tree's activations after `recompute()` and `swap()`."""

import logging
from contextlib import nullcontext
from weakref import WeakKeyDictionary, WeakSet

from mindspore.graph.api import _pynative_executor

from mindformers_core.recompute.again import call_again
from mindformers_core.recompute.algorithms import algorithm_of
from mindformers_core.recompute.budget import described
from mindformers_core.recompute.budgeting import choice_within
from mindformers_core.recompute.choosing import (
    check_whole_cells,
    choose_keys,
    full_layers,
    layers_of,
    swapped_keys,
    whole_cells,
)
from mindformers_core.recompute.explained import explained_activations
from mindformers_core.recompute.keeping import keeping
from mindformers_core.recompute.marking import apart, marked, unshared
from mindformers_core.recompute.operator_names import operator_names
from mindformers_core.recompute.places import called_cells, operators_in_order
from mindformers_core.recompute.stages import check_stages, stage_told
from mindformers_core.recompute.wording import cells_together
from mindformers_core.tensor_parallel.activation_policy import ActivationPolicy, ExplainedActivations, Keeper
from mindformers_core.tensor_parallel.sharded_cells import CONTAINERS

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
        self.full = full_layers(settings.full, self.layers, is_part)
        self.choices, self._compiled = WeakKeyDictionary(), WeakSet()  # the plans of programs of compiled functions
        self._frame = None  # of the last program
        self._has_matched = False  # all patterns, in some program
        self._recomputed = set()  # paths of Cells in which something is
        self._cells, self._gaps = whole_cells(settings, self.full, list(tree.cells))
        self.recomputed_cells = [
            path for path in self._cells if not any(_lies_in(path, other) for other in self._cells if other != path)
        ]

    def marked(self, path, frame, compiled):
        """See `ActivationPolicy`."""
        if not path:
            self._frame = frame
        if compiled is not None:
            if self.swapping.is_on:
                raise ValueError(
                    f"swap: nothing of {self.tree.label('')} can be swapped in a compiled function: run in PyNative "
                    "(recipe: context.mode: 1), or leave swap() out"
                )
            check_whole_cells(self.settings, frame, self._gaps, self._is_lenient(frame))
            for inner in () if compiled else self._cells:
                self.tree.cells[inner]._recompute(True, False)  # what recompute() does for graphs, not for PyNative
            keys = [key for key, inner in called_cells(frame) if f"{path}.{inner}".strip(".") in compiled]
            frame = apart(frame, keys) if keys else unshared(frame)  # else MindSpore confuses collectives in them
            self._compiled.add(frame)
            return frame
        keeper = Keeper(*_RECOMPUTED, takes_collectives=self.settings.mp_comm_recompute)
        lenient = self._is_lenient(frame)
        swapped = swapped_keys(self.swapping, frame, self.layers, path, lenient)
        keys, choice = self._chosen(path, frame, lenient, swapped)
        keepers = dict.fromkeys(keys, keeper)
        self._has_matched = self._has_matched or not (lenient or path)
        for key, prefetch in swapped.items():
            if key in keepers:
                texts = {name.place.key: name.text for name in operator_names(frame, path)}
                name = texts.get(key, "a redistribution")
                raise ValueError(
                    f"{name} of {self.tree.label('')} is recomputed and swapped: what is computed again isn't kept, "
                    "neither here nor on the host: choose one of the two (exclude takes it out of what is recomputed)"
                )
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
            choice = choice_within(self.settings, frame, path, units, lenient, frozenset(swapped))
            keys = choice.dropped
            self._report(choice, frame, path)
        places = [place for place in operators_in_order(frame) if place.key in keys]
        self._recomputed |= {f"{path}.{place.path}".strip(".") for place in places}
        return keys, choice

    def _report(self, choice, frame, path):
        """Tell what was chosen."""
        names = {name.place.key: name.text for name in operator_names(frame, path)}
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
        if self._frame is not None and not (self.is_part or self._has_matched):
            self.check_stages([self.told()])
            self._has_matched = True

    def told(self):
        """See `ActivationPolicy`."""
        return stage_told(self.layers, self._frame)

    def check_stages(self, told):
        """See `ActivationPolicy`."""
        check_stages(self.settings, self.swapping, told)

    def keeps_weights(self, unit):
        """See `ActivationPolicy`."""
        kept = self.settings.parallel_optimizer_comm_recompute is False
        return kept and any(f"{path}.".startswith(f"{unit}.") for path in self._recomputed)

    def explained(self, frame, path=""):
        """See `ActivationPolicy`."""
        if frame in self._compiled:
            shown = cells_together([each for _, each in called_cells(frame) if each in self._cells])
            return ExplainedActivations((f"recompute, whole Cells in a compiled function: {', '.join(shown)}",))
        arguments_need = not self.tree.storage.takes_gradients
        return explained_activations(frame, _RECOMPUTED[1], algorithm_of, path, arguments_need)

    def calling(self):
        """See `ActivationPolicy`."""
        asked = _pynative_executor.grad_flag() or self.tree.cells[""].requires_grad  # mindspore.grad(cell) sets that
        needed = asked and self.tree.compiling is None
        if needed:
            self.check_matched()
        return keeping() if needed else nullcontext()


def _lies_in(path, other):
    """Whether a Cell is below another one."""
    return not other or path.startswith(f"{other}.")


def _containers(tree):
    """The outermost Cells that hold others in a row: `(path, names of those)`."""
    found = []
    for path, cell in tree.cells.items():
        if isinstance(cell, CONTAINERS) and not any(f"{path}.".startswith(f"{other}.") for other, _ in found):
            found.append((path, tuple(cell.name_cells())))
    return found
