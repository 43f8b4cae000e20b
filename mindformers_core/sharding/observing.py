"""Observers of instrumented programs: which call of which Cell, in which pass, has computed a tensor."""

from collections import Counter

from mindspore import nn

from mindformers_core.program.observer import Observer
from mindformers_core.scopes import replaced
from mindformers_core.sharding.sharded_cells import tree_and_path


class ProgramObserver(Observer):
    """Base of observers to which programs report their tensors; a subclass defines `computed`."""

    instruments = True

    def __init__(self):
        self._pass = self._direction = None
        self._seen = Counter()  # (pass, direction, id of tree, path, id of source, number) -> reports so far

    def in_pass(self, label, direction):
        return replaced(self, _pass=label, _direction=direction)

    def observed(self, source, cell, number, tensor):
        """See `Observer`. Of several calls it isn't known which one the backward pass computes again."""
        tree, path = tree_and_path(cell)
        program = next(each for each in tree.programs.values() if each.source is source)
        seen = source.observed[number]
        graphs = program.calls_by_plan[path, seen.plan]
        place = self._pass, self._direction, id(tree), path, id(source), number
        self._seen[place] += 1
        if self._direction != "backward" or len(graphs) == 1:
            turn, ordinal = divmod(self._seen[place] - 1, len(graphs))
            self.computed(tree, program, path, graphs[ordinal], turn, seen, tensor)

    def computed(self, tree, program, path, graph, turn, seen, tensor):
        """The call `graph` of the Cell at `path` has computed a local tensor, in the pass `_pass`.

        `turn`: number of earlier runs of the program in the pass; `seen`: the `Observed`.
        """
        raise NotImplementedError


def parameter_paths(cells):
    """Id of a Parameter -> path, of what root Cells compute with and of what their users see."""
    walks = (walk for net in cells for walk in (net.parameters_and_names(), nn.Cell.parameters_and_names(net)))
    return {id(parameter): path for walk in walks for path, parameter in walk}
