"""The activation policy of a sharded tree after `recompute()` and `swap()`."""

import logging
from contextlib import nullcontext
from weakref import WeakKeyDictionary

from mindspore import nn

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.mindspore_private import pynative_executor, recompute_in_graphs
from mindformers_core.program.activation_policy import ActivationPolicy, Keeper
from mindformers_core.program.partition import annotate, calls_alone, calls_of, unshared
from mindformers_core.program.plan import joined_path
from mindformers_core.recompute.budget import choice_within, described
from mindformers_core.recompute.checkpointing import checkpoint_call
from mindformers_core.recompute.explained import explained_activations, explained_cells
from mindformers_core.recompute.keeping import keeping
from mindformers_core.recompute.selection import NamedProgram, cell_lies_in, layers_of, whole_cells, written_by
from mindformers_core.recompute.settings import check_compilable, check_gathers
from mindformers_core.recompute.stages import check_compiled_stages, check_stages, stage_summary
from mindformers_core.sharding.sharded_cells import CONTAINERS

_LOG = logging.getLogger("mindformers_core")
_RECOMPUTED = "from mindformers_core.recompute.keeping import Recomputed", "recomputed", "Recomputed()"
_ON_HOST = "from mindformers_core.recompute.offloading import OnHost"


class ChosenActivations(ActivationPolicy):
    """The `ActivationPolicy` that `recompute()` and `swap()` install in a tree.

    Args:
        tree: the `ShardedTree`.
        settings: the `RecomputeSettings`.
        swapping: the `SwapSettings`.
        is_part: whether the tree is a part of the model.

    Attributes:
        settings, swapping: the arguments.
        choices: `CellPlan` of a program -> its `Choice` under a budget, for the lifetime of the program.
    """

    is_active = True
    checkpoint_call = staticmethod(checkpoint_call)

    def __init__(self, tree, settings, swapping, is_part=False):
        self.tree, self.settings, self.swapping, self.is_part = tree, settings, swapping, is_part
        self.layers = layers_of(_containers(tree))
        self.choices = WeakKeyDictionary()
        self._compiled = WeakKeyDictionary()  # plan of a program of compiled functions -> (its path, `compiled`)
        self._summary = stage_summary(settings, swapping, self.layers, tree.cells)
        self._has_matched = False  # all patterns, in some program
        self._recomputed = set()  # paths of Cells in which something is
        if not is_part:
            check_stages(settings, swapping, [self._summary])
        if tree.storage.settings is not None:  # else hsdp() may still be called
            self._check_gathers()
        self._cells, self._gaps = whole_cells(settings, self.layers, list(tree.cells))
        self.recomputed_cells = [
            path for path in self._cells if not any(cell_lies_in(path, other) for other in self._cells if other != path)
        ]

    def annotate(self, path, plan, compiled):
        program = NamedProgram(plan, path, self.layers, algorithm_of, not self.tree.storage.takes_gradients)
        if not path:
            self._summary = stage_summary(self.settings, self.swapping, self.layers, self.tree.cells, program)
            if plan.graph.training:  # in evaluation patterns may match nothing
                self._check_matches()
        if compiled is not None:
            return self._compiled_plan(program, compiled)
        swapped = program.swapped(self.swapping)
        keys, choice = self._chosen(program, swapped)
        both = [key for key in swapped if key in keys]
        program.check_apart(self.settings, self.swapping, both, self.tree.label(""))
        keepers = dict.fromkeys(keys, Keeper(*_RECOMPUTED, takes_collectives=self.settings.mp_comm_recompute))
        keepers |= {key: Keeper(_ON_HOST, f"on_host_{n}", f"OnHost(prefetch={n})") for key, n in swapped.items()}
        plan = annotate(plan, keepers)
        if choice is not None:
            self.choices[plan] = choice
        return plan

    def _compiled_plan(self, program, compiled):
        """The `CellPlan` of a compiled function with recomputed Cells."""
        self._check_compilable()
        for each in self.settings.requests:
            if program.match(each).operators:
                raise ValueError(
                    f"{each.where}: {each.pattern.text!r} selects operators, but compiled functions can only recompute "
                    "whole Cells: name Cells, or run in PyNative (recipe: context.mode: 1)"
                )
        for place in program.places:
            if written_by(place) and any(cell_lies_in(joined_path(program.path, place.path), c) for c in self._cells):
                raise ValueError(
                    f"recompute: Cell '{joined_path(program.path, place.path)}' writes Parameters "
                    f"({', '.join(sorted(written_by(place)))}), and a compiled function that runs again would write "
                    "them twice: exclude it, or run in PyNative (recipe: context.mode: 1)"
                )
        for inner in () if compiled else self._cells:
            recompute_in_graphs(self.tree.cells[inner], True, False)  # as recompute(), but not in PyNative
        plan = program.plan if compiled else unshared(program.plan)  # else MindSpore confuses collectives in them
        self._compiled[plan] = program.path, compiled
        return plan

    def _check_compilable(self):
        check_compilable(self.settings, self.swapping)
        for around, inner in self._gaps:
            raise ValueError(
                f"recompute.exclude: Cell '{inner}' lies in '{around}', which is recomputed, but compiled functions "
                "can only recompute whole Cells: select the Cells beside it, or run in PyNative (recipe: "
                "context.mode: 1)"
            )

    def _chosen(self, program, swapped):
        """`(keys, Choice or None)`: the recomputed instructions of a program; a budget never selects `swapped` ones."""
        units, choice = tuple(self.tree.storage.units), None
        if self.settings.budget is None or program.path:  # a budget is for the whole
            keys = program.recomputed(self.settings, units)
        else:
            choice = choice_within(self.settings, program, units, frozenset(swapped), self.is_part)
            keys = choice.dropped
            if program.plan.graph.training:
                self._summary["short"] = [choice.least_bytes, choice.all_bytes] if choice.problem else None
            if not choice.problem:
                label, lines = self.tree.label(program.path), described(choice, program.texts)
                _LOG.info("%s, within budget %s:\n%s", label, self.settings.budget, "\n".join(lines))
        self._recomputed |= {joined_path(program.path, place.path) for place in program.places if place.key in keys}
        return keys, choice

    def check_compiling(self):
        if self.recomputed_cells and pynative_executor.grad_flag():
            raise ValueError(
                f"{self.tree.label('')} is recomputed, but PyNative differentiates a compiled function that calls it, "
                "and keeps all of it: take gradients with zero.value_and_grad(hsdp(cell), compiled=True), or within "
                "the compiled function"
            )

    def validate_for_backward(self):
        self._check_gathers()
        program = next(reversed(self.tree.programs.values()), None)
        choice = None if program is None else self.choices.get(program.plan)
        if choice is not None and choice.problem:
            raise ValueError(choice.problem)
        if self._summary["found"] is not None:
            self._check_matches()

    def _check_matches(self):
        """Check patterns, unless they may be for other stages, or were all found before."""
        if not (self.is_part or self._has_matched):
            check_stages(self.settings, self.swapping, [self._summary])
            self._has_matched = True

    def _check_gathers(self):
        sharding = self.tree.storage.settings
        instead = f"optimizer_level is '{sharding.level}'" if sharding else "hsdp() wasn't called"
        gathers = sharding is not None and sharding.level == "level3"
        check_gathers(self.settings, gathers, "hsdp(optimizer_level='level3')", instead)

    def stage_summary(self):
        return self._summary

    def check_stages(self, summaries, is_compiled):
        self._check_gathers()
        check_stages(self.settings, self.swapping, summaries)
        if not is_compiled:
            return
        self._check_compilable()
        known = [summary for summary in summaries if summary is not None]
        if self.is_part and all(summary["compiled"] for summary in known):  # a whole model says so by itself
            check_compiled_stages(self.settings, known)

    def keeps_weights(self, unit):
        kept = self.settings.parallel_optimizer_comm_recompute is False
        return kept and any(f"{path}.".startswith(f"{unit}.") for path in self._recomputed)

    def explained(self, plan, path=""):
        arguments_need = not self.tree.storage.takes_gradients
        if plan in self._compiled:
            called, compiled = self._compiled[plan]
            again, units = (calls_of(plan, called, cells) for cells in compiled or (self.recomputed_cells, ()))
            cells = [key for key, how in calls_alone(plan, again, units).items() if how == "again"]
            return explained_cells(plan, cells, bool(compiled), algorithm_of, path, arguments_need)
        return explained_activations(plan, _RECOMPUTED[1], algorithm_of, path, arguments_need, self.swapping.is_on)

    def calling(self):
        asked = pynative_executor.grad_flag() or self.tree.cells[""].requires_grad  # mindspore.grad(cell) sets that
        needed = asked and self.tree.compiling is None
        if needed:
            self.validate_for_backward()
        return keeping() if needed else nullcontext()


def _containers(tree):
    """The outermost containers of consecutive layers: `(path, names of the layers)`."""
    found = []
    for path, cell in tree.cells.items():
        if _holds_layers(cell) and not any(f"{path}.".startswith(f"{other}.") for other, _ in found):
            found.append((path, tuple(cell.name_cells())))
    return found


def _holds_layers(cell):
    """Whether the children of a Cell are layers; a SequentialCell may also be a stem or head of Dense and GELU."""
    is_sequence = isinstance(cell, nn.SequentialCell)
    return isinstance(cell, CONTAINERS) and not (is_sequence and all(map(_is_single, cell.cells())))


def _is_single(cell):
    """Whether a Cell has no children and a class of MindSpore or of this package."""
    return type(cell).__module__.startswith(("mindspore.", "mindformers_core.")) and not cell.name_cells()
