"""What a job costs: operations of its model by the captured graphs, memory and seconds of a process; its epochs."""

import resource
from collections import deque
from statistics import median

import mindspore as ms

from mindformers_core.communication import process_state
from mindformers_core.data.streams import Stream
from mindformers_core.operators.registry import facts_of
from mindformers_core.operators.resolve import BACKWARD_WORK
from mindformers_core.program.graph import CallNode
from mindformers_core.propagation.operators import operator_signature
from mindformers_core.sharding.inspecting import programs

_SLOW = 1.5  # times the others' seconds
_FEW, _MOST = 5, 50  # steps that a median is of


def model_operations(cells):
    """Floating-point operations of both passes of a micro-batch, of all ranks, in these stages of the model.

    Those of products, convolutions and attention (all scores, masked ones included) on whole tensors, 2·m·n·k for a
    product, three times: as in Megatron-LM's formula (Narayanan et al., 2021), and the same on any mesh. What is
    computed again isn't counted.

    Returns:
        The number; None for Cells that run operator by operator, or of which not all weights are trained.
    """
    made = [programs(cell)[-1:] for cell in cells]
    if not all(made) or not all(each.requires_grad for cell in cells for each in cell.get_parameters()):
        return None
    graphs = (graph for (program,) in made for graph in program.graph.calls())
    nodes = [node for graph in graphs for node in graph.nodes if not isinstance(node, CallNode)]
    counted = [(facts_of(node.operator).operations, node) for node in nodes]
    found = sum(count(operator_signature(node).sizes) for count, node in counted if callable(count))
    return found * (1 + BACKWARD_WORK)


def epochs(dataset, first, end):
    """What the row of a step with samples `first` … `end - 1` has about epochs, see docs/metrics.md: a dict.

    Nothing of a user's dataset that orders its samples itself.
    """
    if not isinstance(dataset, Stream):
        return {}
    found, begun = dataset.epochs(end), dataset.begun(first, end)
    row = {f"epoch {number}" if len(found) > 1 else "epoch": each for number, each in enumerate(found)}
    return row | ({"epoch_begins": begun} if begun else {})


def peak_memory():
    """The most bytes that this process had at once: of tensors on the device; on CPU of all that is resident."""
    if ms.get_context("device_target") != "CPU":
        return ms.runtime.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def waited():
    """Seconds that this rank has spent in collectives, and waiting for messages, so far; compiled ones aren't known."""
    watch = process_state().watch
    return 0.0 if watch is None else watch.recorder.waited


class Pace:
    """Finds the rank that the others wait for, by the seconds of a step in which each doesn't wait."""

    def __init__(self, rank):
        self._rank, self._told, self._steps = rank, None, deque(maxlen=_MOST)
        self.add = self._steps.append  # the seconds that a step has taken this rank, without waiting for others

    @property
    def seconds(self):
        """Of a step of the last ones; None before there are a few."""
        return median(self._steps) if len(self._steps) >= _FEW else None

    def told(self, everywhere):
        """What the row of a step has about a slow rank, by a dict, rank -> `seconds`: a dict. Rank 0 says it once."""
        slow, before = slow_rank(everywhere), self._told
        self._told = slow and slow[0]
        if self._rank == 0 and self._told not in (None, before):
            print("warning: rank {} is slow: a step takes it {:.3g} s, the others {:.3g} s".format(*slow), flush=True)
        return {"slow_rank": slow[0], "slow_seconds": slow[1]} if slow else {}


def slow_rank(everywhere):
    """`(rank, its seconds, the median of the others)` where it takes 1.5 times as long as they do; else None. Pure."""
    if len(everywhere) == 1 or None in everywhere.values():
        return None
    rank = max(everywhere, key=everywhere.get)
    others = median(seconds for each, seconds in everywhere.items() if each != rank)
    return (rank, everywhere[rank], others) if everywhere[rank] > _SLOW * others else None
