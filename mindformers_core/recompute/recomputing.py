"""`recompute()`: have a sharded Cell's backward pass compute again what was chosen by name (RFC ICY7S6).

In PyNative every chosen operator's results are let go of one by one, see `keeping.py`. Compiled functions recompute
whole Cells, by MindSpore's own marks.
"""

import logging
from contextlib import nullcontext

from mindspore.graph.api import _pynative_executor

from mindformers_core.recompute.algorithms import algorithm_of
from mindformers_core.recompute.budget import described
from mindformers_core.recompute.budgeting import choice_within
from mindformers_core.recompute.choosing import check_whole_cells, choose_keys, full_layers, layers_of, whole_cells
from mindformers_core.recompute.keeping import keeping
from mindformers_core.recompute.marking import marked, unshared
from mindformers_core.recompute.operator_names import operator_names
from mindformers_core.recompute.places import operators_in_order
from mindformers_core.recompute.prediction import recomputed, saved_bytes
from mindformers_core.recompute.settings import RecomputeSettings
from mindformers_core.recompute.wording import layers_together
from mindformers_core.tensor_parallel.activation_policy import ActivationPolicy, Keeper
from mindformers_core.tensor_parallel.explaining.wording import bytes_shown
from mindformers_core.tensor_parallel.sharded_cells import CONTAINERS, EagerCell, ShardedCell

__all__ = ["Recomputing", "recompute"]

_LOG = logging.getLogger("mindformers_core")
_RECOMPUTED = "from mindformers_core.recompute.keeping import Recomputed", "recomputed", "Recomputed()"


def recompute(cell, is_part=False, **settings):
    """Have the backward pass of a sharded Cell compute again what it would otherwise keep; gives `cell`.

    What is selected are operators, or Cells: of a Cell its results are kept, everything in it is computed again. What
    is computed again is run once, on inputs that are kept, or computed again in their turn; random numbers are the
    same. Losses and gradients are bit by bit what they are without.

    Args:
        cell: the root of a tree that `shard()` made; on one card, over a mesh of one. Before or after `hsdp()`.
        is_part: whether the Cell is a stage of a pipeline: layers and patterns that aren't here may be on another one.
        settings: see `RecomputeSettings`: `full`, `select`, `exclude`, `mp_comm_recompute`,
            `parallel_optimizer_comm_recompute`, `budget`. For patterns, see `patterns.py`.

    Raises:
        TypeError: not a sharded Cell. ValueError: a Cell below a root, or that runs eagerly, or was given here before;
            settings that can't be. When a program is made: a pattern that matches nothing. In compiled functions:
            anything but whole Cells.
    """
    tree = _checked_tree(cell)
    settings = RecomputeSettings(**settings)
    if settings.is_on:
        tree.activations = Recomputing(tree, settings, is_part)
        tree.forget_programs()
    return cell


def _checked_tree(cell):
    """The `ShardedTree` of a root Cell whose activations can be kept in another way."""
    if not isinstance(cell, ShardedCell):
        raise TypeError(
            f"recompute() takes a Cell that shard() was called with, not {type(cell).__name__}: on one card, "
            'shard(cell, init_device_mesh((1,), ("dp",))) first'
        )
    tree, path = cell.__dict__["_sharding"]
    if path:
        raise ValueError(f"recompute() takes the root: call it with {tree.label('')}, and select '{path}'")
    if tree.activations.marks:
        raise ValueError(f"recompute() was called with {tree.label('')} already: give everything in one call")
    for inner, child in tree.cells.items():
        if isinstance(child, EagerCell):
            raise ValueError(
                f"{tree.label(inner)} runs operator by operator (eager), where recompute() can't name operators: "
                'shard(cell, mesh, mode="generated"), and mark no Cell of it eager'
            )
        if child._recompute_cell is not None:
            raise ValueError(
                f"{tree.label(inner)} is recomputed by its own recompute() already: leave that out, and select it here"
            )
    return tree


class Recomputing(ActivationPolicy):
    """What `recompute()` gives a tree.

    Args:
        tree: the `ShardedTree`.
        settings: the `RecomputeSettings`.
        is_part: whether the tree is a part of the model.

    Attributes:
        dropped: path of a called Cell -> keys of the instructions of its last program that are computed again.
        choices: likewise the `Choice`, under a budget.
    """

    marks = True

    def __init__(self, tree, settings, is_part=False):
        self.tree, self.settings, self.is_part = tree, settings, is_part
        self.full = full_layers(settings.full, layers_of(_containers(tree)), is_part)
        self.dropped, self.choices = {}, {}
        self._recomputed = set()  # paths of Cells in which something is
        cells, self._gaps = whole_cells(settings, self.full, list(tree.cells))
        for path in cells:
            tree.cells[path]._recompute(True, False)  # what recompute() does for graphs, and nothing for PyNative

    def check_splitting(self):
        """See `ActivationPolicy`."""
        raise ValueError(
            f"{self.tree.label('')} is recomputed, but a schedule with weight steps (zb_h1, zb_v, dualpipe_v) keeps "
            "what the weights' gradients are computed from: use 1f1b, interleaved_1f1b, gpipe or looped_bfs, or leave "
            "recompute() out"
        )

    def marked(self, path, frame, compiled):
        """See `ActivationPolicy`."""
        if compiled:
            check_whole_cells(self.settings, frame, self._gaps, self.is_part)
            return unshared(frame)  # MindSpore confuses collectives that several recomputed Cells call
        keeper = Keeper(*_RECOMPUTED, takes_collectives=self.settings.mp_comm_recompute)
        return marked(frame, dict.fromkeys(self.chosen(path, frame), keeper))

    def chosen(self, path, frame):
        """Keys of the instructions of a program, of a call of the Cell at `path`, that are computed again."""
        units = tuple(self.tree.storage.units)
        if self.settings.budget is None:
            keys = choose_keys(self.settings, frame, algorithm_of, path, self.full, units, self.is_part)
        else:
            choice = choice_within(self.settings, frame, path, units, self.is_part)
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
        keys = self.dropped.get("", set())
        texts = {name.place.key: name.text for name in operator_names(frame)}
        again = sorted(recomputed(frame, keys, algorithm_of))
        before, after = (saved_bytes(frame, some, algorithm_of) for some in (frozenset(), keys))
        names = layers_together([texts[key] for key in again if key in texts])
        return [
            f"recompute: {len(again)} of {len(operators_in_order(frame))} instructions run again; "
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
