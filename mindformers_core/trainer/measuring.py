"""What a job costs, the operations of its model by the captured graphs and the memory of a process; its epochs."""

import resource

import mindspore as ms

from mindformers_core.data.streams import Stream
from mindformers_core.operators.registry import facts_of
from mindformers_core.operators.resolve import BACKWARD_WORK
from mindformers_core.program.graph import CallNode
from mindformers_core.propagation.operators import operator_signature
from mindformers_core.sharding.inspecting import programs


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
