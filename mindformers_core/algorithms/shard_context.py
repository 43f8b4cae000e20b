"""`ShardContext`: what a distributed algorithm knows of its operator's cut, and how it communicates."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from mindspore import Tensor, dtype as mstype

from mindformers_core.algorithms.dropout import counters, next_random_state
from mindformers_core.algorithms.redistribute import redistribute_local, steps_local
from mindformers_core.communication import world
from mindformers_core.dtypes import dtype_name
from mindformers_core.layout import Layout
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.operators import TENSORS
from mindformers_core.redistribution import routing_step, shift_step


@dataclass(frozen=True)
class ShardContext:
    """How an operator is sharded: the axes, and the layouts and global shapes of its inputs.

    Attributes:
        axes: the axes that shard the operator's own dim, major to minor; empty for an algorithm that always runs.
        layouts: the layout of every tensor input as the operator gets it.
        shapes: the global shape of every tensor input.
        rank: the rank that runs, or for which it is written down.
        redistribute: `redistribute(local, source, target)` takes a local tensor from one layout to another.
        run_step: `run_step(local, step, others=())` runs a `Step`, perhaps with further operands.
        next_random_state: gives seed and offset of the next random draw.
        halos: of the operator's `LocalCall`.
        output: layout and global shape of the first result.
        float_dtype: of all random numbers with fractions; None: the one that the operator is given.
    """

    mesh: object
    axes: tuple
    layouts: tuple
    shapes: tuple
    rank: int
    redistribute: Callable = redistribute_local
    run_step: Callable = steps_local
    next_random_state: Callable = next_random_state
    halos: dict = field(default_factory=dict)
    output: tuple = ()
    float_dtype: object = None

    @cached_property
    def count(self):
        """Number of parts."""
        return self.mesh.axis_size(*self.axes)

    @cached_property
    def number(self):
        """Number of this rank's part, from 0."""
        return self.mesh.group_index(self.rank, self.axes)

    def start(self, size, dtype):
        """The global position at which this rank's part begins, if all parts have this size: a tensor without dims.

        A number would make the graphs of two ranks differ, since MindSpore drops the addition of 0.
        """
        return Tensor(self.number * size, dtype)

    def positions(self, dim):
        """The global positions along `dim` of this rank's part of the first input, int32; other dims have size 1."""
        part = self.layouts[0].local_slices(self.shapes[0], self.rank)[dim]
        shape = [-1 if each == dim else 1 for each in range(len(self.shapes[0]))]
        return Tensor(np.arange(part.start, part.stop).reshape(shape), mstype.int32)

    def along(self, dim):
        """For the parts along a dim of the first input alone."""
        return replace(self, axes=self.layouts[0].axes[dim])

    @cached_property
    def random_counters(self):
        """The counters of the random numbers of this rank's part of the first result; see `counters`."""
        layout, shape = self.output
        return tuple(map(Tensor, counters(shape, layout.local_slices(shape, self.rank))))

    @property
    def local_shape(self):
        """That of the first result."""
        layout, shape = self.output
        return layout.local_shape(shape)

    def combined(self, local, op="sum", varying=False):
        """The reduction of all parts with `op`, replicated; `varying`: for consumers that differ between ranks."""
        return self._made_whole(local, [()] * local.ndim, dict.fromkeys(self.axes, op), varying)

    def gathered(self, local, dim, varying=False):
        """All parts along a dim; `varying`: for consumers that differ between ranks."""
        dims = [()] * local.ndim
        dims[dim] = self.axes
        return self._made_whole(local, dims, {}, varying)

    def shift(self, local, distance, givers=None):
        """The tensor of the rank whose part is `distance` before this one, in a ring; zeros where that gives none.

        Args:
            local, distance: the tensor, and how far it goes.
            givers: numbers of the parts whose ranks give theirs. Default: all.
        """
        if distance % self.count == 0:
            return local
        givers = None if givers is None or len(givers) == self.count else tuple(givers)
        known = self.mesh, self.axes, distance, local.shape, dtype_name(local.dtype), givers
        return self.run_step(local, shift_step(*known))

    def dispatched(self, local, most, sizes):
        """Rows of every part's tensor (rows, …) for this one, in the order of parts; first ones are for the first part.

        In PyNative as many as come, or a row of zeros for none. In graphs `parts * most`: of each part `most`, behind
        those that come any.

        Args:
            local, most: the tensor, and how many rows go to a part at most.
            sizes: int32 (2, parts), in PyNative on the host: how many rows go to each part, and come from each.
        """
        return self._routed("dispatch", local, local.shape[0], self.count * most, sizes)

    def combined_rows(self, local, rows, most, sizes):
        """The way back, of a tensor as `dispatched` gives: `rows` of them, of which those that nobody has are zeros."""
        return self._routed("combine", local, self.count * most, rows, sizes)

    def _routed(self, kind, local, rows, to_rows, sizes):
        shape = rows, *local.shape[1:]
        step = routing_step(kind, self.mesh, self.axes, shape, dtype_name(local.dtype), to_rows)
        return self.run_step(local, step, others=(sizes,))

    def _made_whole(self, local, dims, partial_ops, varying):
        whole = Layout.on(self.mesh, [()] * local.ndim, varying=self.axes if varying else ())
        return self.redistribute(local, Layout.on(self.mesh, dims, partial_ops), whole)


def shard_context(plan, rank=None):
    """The `ShardContext` of an `OperatorPlan` with an algorithm; default: on this process's rank."""
    shapes = tuple(tensor.shape for tensor in tree_leaves((plan.node.args, plan.node.kwargs), TENSORS))
    given = plan.outputs[0].mesh, plan.cut_axes, plan.inputs, shapes, world().rank if rank is None else rank
    output = plan.outputs[0], plan.signature.output_shapes[0]
    move = partial(redistribute_local, model=plan.device_model)
    return ShardContext(*given, halos=plan.signature.local.halos, output=output, redistribute=move)
