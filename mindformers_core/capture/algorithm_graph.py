"""Graphs of distributed algorithms: each algorithm runs once on traced tensors, and its operators are recorded.

So an algorithm is written once: the eager engine runs it, and generated code has the operators of its graph.
"""

from dataclasses import replace

from mindspore import nn

from mindformers_core.algorithms.distributed_operators import run_algorithm, run_gradient
from mindformers_core.algorithms.redistribute import meta_of
from mindformers_core.algorithms.shard_context import shard_context
from mindformers_core.capture.capture import capture
from mindformers_core.operators import tensor_meta
from mindformers_core.program.structure import Value, tree_fill, tree_leaves, tree_map
from mindformers_core.propagation.operators import local_signature
from mindformers_core.redistribution import plan_redistribution


def algorithm_of(plan, rank=None, of_gradient=False):
    """Pair of an algorithm's `CellGraph` and, for each of its nodes, the `Step`s of a redistribution or None.

    Args:
        plan: an `OperatorPlan` that has an `algorithm`.
        rank, of_gradient: see `algorithm_graph`. Default: the first one of the mesh.

    Raises:
        CaptureError: the algorithm looks at values.
    """
    graph = algorithm_graph(plan, plan.outputs[0].mesh.rank_list[0] if rank is None else rank, of_gradient)
    return graph, [redistribution_steps(plan, node) for node in graph.nodes]


def redistribution_steps(plan, node):
    """The `Step`s of a node of an `OperatorPlan`'s algorithm that communicates; None for any other."""
    if node.operator == "Step":
        return (node.args[1],)
    if node.operator != "Redistribute":
        return None
    value, source, target, shape = node.args
    return plan_redistribution(source, target, shape, value.dtype, plan.device_model).steps


def algorithm_graph(plan, rank, of_gradient=False):
    """The graph of a distributed algorithm, which replaces a sharded operator, on local shapes.

    Four kinds of nodes are special:

    - the operator itself, under its own name, with other tensors among its arguments;
    - `Redistribute(value, source, target, shape)`, which moves a local tensor from one `Layout` to another; `shape` is
      the global one;
    - `Step(value, step, …)`, which runs a `Step`, perhaps with further operands;
    - `RandomState()`, which gives seed and offset of a random draw (`next_random_state` in `dropout.py`).

    Args:
        plan: the `OperatorPlan` of an operator that has an `algorithm`.
        rank: for which rank. Graphs of different ranks differ in constants only.
        of_gradient: whether the graph is that of the algorithm's own gradient.

    Returns:
        A `CellGraph`. Its arguments are the operator's tensors, in the order of `node.taken`; its result has the
        structure of `node.outputs`. Of a gradient the arguments are these, the results, and their gradients; its
        results are the gradients of the floating tensors, in order.

    Raises:
        CaptureError: the algorithm looks at values.
    """
    metas = [tensor_meta(layout.local_shape(value.shape), value.dtype) for value, layout in plan.consumed]
    expected = plan.local_shapes
    if of_gradient:
        made = [tensor_meta(shape, value.dtype) for shape, value in zip(expected, plan.node.made)]
        expected = [meta.shape for meta in metas if meta.differentiable]
        metas += [*made, *made]
    graph = capture(_Algorithm(plan, shard_context(plan, rank), of_gradient), *metas)
    found = [value.shape for value in tree_leaves(graph.result)]
    assert found == expected, f"algorithm '{plan.algorithm}' of {plan.node.operator} gives {found}, not {expected}"
    return graph


def called_node(node, args):
    """The `OperatorNode` with these arguments: without its primitive where an algorithm has changed its attributes."""
    changed = node.primitive and args[node.primitive.inputs :] != node.args[node.primitive.inputs :]
    return replace(node, kind="function", primitive=None) if changed else node


class _Algorithm(nn.Cell):
    """An algorithm as a Cell of the operator's local tensors, to be captured."""

    def __init__(self, plan, cut, of_gradient):
        super().__init__()
        self.plan, self.cut, self.of_gradient = plan, cut, of_gradient

    def construct(self, *tensors):
        self.recorder = recorder = tensors[0].recorder
        cut = replace(self.cut, redistribute=self._move, run_step=self._step, next_random_state=recorder.random_state)
        if not self.of_gradient:
            return run_algorithm(self.plan, tensors, self._operator, cut)
        count, each = len(tensors) - 2 * len(self.plan.outputs), len(self.plan.outputs)
        made = tensors[count : count + each], tensors[count + each :]
        made = (tree_fill(self.plan.node.outputs, values, Value) for values in made)
        return run_gradient(self.plan, tensors[:count], *made, cut)

    def _move(self, local, source, target):
        """As `redistribute_local`, recorded as a node."""
        shape = source.global_shape(local.shape)
        args = self.recorder.stand_in((local, source, target, shape))
        meta = self.recorder.meta(target.local_shape(shape), local.dtype)
        return self.recorder.add_node("Redistribute", "function", args, {}, meta)

    def _step(self, local, step, others=()):
        """As `steps_local` of one step, recorded as a node."""
        args, meta = self.recorder.stand_in((local, step, *others)), self.recorder.meta(step.output_shape, local.dtype)
        return self.recorder.add_node("Step", "function", args, {}, meta)

    def _operator(self, args, kwargs):
        """The operator of the plan; the algorithm may have changed its attributes, which are among the arguments."""
        node = self.plan.node
        shapes = iter(local_signature(node, *tree_map(meta_of, (args, kwargs))).output_shapes)
        outputs = tree_map(lambda value: self.recorder.meta(next(shapes), value.dtype), node.outputs)
        node = called_node(node, args)
        args, kwargs = self.recorder.stand_in((args, kwargs))
        return self.recorder.add_node(node.operator, node.kind, args, kwargs, outputs, node.primitive)
