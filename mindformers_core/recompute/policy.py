"""What becomes of a sharded tree's activations after `recompute()` and `swap()`."""

import logging
from contextlib import nullcontext

from mindspore.graph.api import _pynative_executor

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
from mindformers_core.recompute.keeping import keeping
from mindformers_core.recompute.marking import marked, unshared
from mindformers_core.recompute.operator_names import operator_names
from mindformers_core.recompute.places import operators_in_order
from mindformers_core.recompute.prediction import recomputed, saved_activations, saved_bytes
from mindformers_core.recompute.wording import layers_together
from mindformers_core.tensor_parallel.activation_policy import ActivationPolicy, Keeper
from mindformers_core.tensor_parallel.explaining.wording import bytes_shown
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
        dropped: path of a called Cell -> keys of the instructions of its last program that are computed again.
        swapped: likewise those whose results wait on the host, with how many saved tensors ahead they come back.
        choices: likewise the `Choice`, under a budget.
    """

    marks = True

    def __init__(self, tree, settings, swapping, is_part=False):
        self.tree, self.settings, self.swapping, self.is_part = tree, settings, swapping, is_part
        self.layers = layers_of(_containers(tree))
        self.full = full_layers(settings.full, self.layers, is_part)
        self.dropped, self.swapped, self.choices = {}, {}, {}
        self._has_matched = False  # all patterns, in some program
        self._recomputed = set()  # paths of Cells in which something is
        cells, self._gaps = whole_cells(settings, self.full, list(tree.cells))
        for path in cells:
            tree.cells[path]._recompute(True, False)  # what recompute() does for graphs, and nothing for PyNative

    def check_splitting(self):
        """See `ActivationPolicy`."""
        raise ValueError(
            f"{self.tree.label('')} is recomputed or swapped, but a schedule with weight steps (zb_h1, zb_v, "
            "dualpipe_v) keeps what the weights' gradients are computed from: use 1f1b, interleaved_1f1b, gpipe or "
            "looped_bfs, or leave recompute() and swap() out"
        )

    def marked(self, path, frame, compiled):
        """See `ActivationPolicy`."""
        if compiled:
            if self.swapping.is_on:
                raise ValueError(
                    f"swap: nothing of {self.tree.label('')} can be swapped in a compiled function: run in PyNative "
                    "(recipe: context.mode: 1), or leave swap() out"
                )
            check_whole_cells(self.settings, frame, self._gaps, self._is_lenient(frame))
            return unshared(frame)  # MindSpore confuses collectives that several recomputed Cells call
        keeper = Keeper(*_RECOMPUTED, takes_collectives=self.settings.mp_comm_recompute)
        lenient = self._is_lenient(frame)
        keepers = dict.fromkeys(self.chosen(path, frame, lenient), keeper)
        swapped = self.swapped[path] = swapped_keys(self.swapping, frame, self.layers, path, lenient)
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
        return marked(frame, keepers)

    def _is_lenient(self, frame):
        """Whether patterns may match nothing: they are for other stages, were all found before, or in evaluation."""
        return self.is_part or self._has_matched or not frame.graph.training

    def chosen(self, path, frame, lenient):
        """Keys of the instructions of a program, of a call of the Cell at `path`, that are computed again."""
        units = tuple(self.tree.storage.units)
        if self.settings.budget is None:
            keys = choose_keys(self.settings, frame, algorithm_of, path, self.full, units, lenient)
        else:
            choice = choice_within(self.settings, frame, path, units, lenient)
            keys = self._report(choice, frame, path)
        places = [place for place in operators_in_order(frame) if place.key in keys]
        self.dropped[path] = keys
        self._recomputed |= {f"{path}.{place.path}".strip(".") for place in places}
        return keys

    def _report(self, choice, frame, path):
        """Tell what was chosen; the keys of it."""
        names = {name.place.key: name.text for name in operator_names(frame, path)}
        self.choices[path] = choice
        lines = described(choice, lambda key: names.get(key, "a redistribution"))
        _LOG.info("%s, within budget %s:\n%s", self.tree.label(path), self.settings.budget, "\n".join(lines))
        return choice.dropped

    def keeps_weights(self, unit):
        """See `ActivationPolicy`."""
        kept = self.settings.parallel_optimizer_comm_recompute is False
        return kept and any(f"{path}.".startswith(f"{unit}.") for path in self._recomputed)

    def explained(self, frame):
        """See `ActivationPolicy`: what is computed again, by name, and the bytes that are saved with and without."""
        texts = {name.place.key: name.text for name in operator_names(frame)}
        keepers = {place.key: place.frame.keepers.get(place.entry) for place in operators_in_order(frame)}
        keys = {key for key, keeper in keepers.items() if keeper and keeper.name == _RECOMPUTED[1]}
        swapped = {key for key, keeper in keepers.items() if keeper} - keys
        again = sorted(recomputed(frame, keys, algorithm_of))
        before, after = (saved_bytes(frame, some, algorithm_of) for some in (frozenset(), keys))
        names = layers_together([texts[key] for key in again if key in texts])
        lines = []
        if swapped:
            saved = sum(t.nbytes for t in saved_activations(frame, keys, algorithm_of) if t.key in swapped)
            lines.append(f"swap: results of {len(swapped)} instructions wait on the host, {bytes_shown(saved)}")
        return lines + [
            f"recompute: {len(again)} of {len(keepers)} instructions run again; "
            f"{bytes_shown(after)} of {bytes_shown(before)} of activations are kept for the backward pass",
            *(f"  computed again: {name}" for name, _ in names),
        ]

    def calling(self):
        """See `ActivationPolicy`."""
        needed = _pynative_executor.grad_flag() and not self.tree.compiling
        return keeping() if needed else nullcontext()


def _containers(tree):
    """The outermost Cells that hold others in a row: `(path, names of those)`."""
    found = []
    for path, cell in tree.cells.items():
        if isinstance(cell, CONTAINERS) and not any(f"{path}.".startswith(f"{other}.") for other, _ in found):
            found.append((path, tuple(cell.name_cells())))
    return found
