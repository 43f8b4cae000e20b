"""`verify()`: is the plan of a Cell right?"""

import copy
from functools import partial
from inspect import signature
from types import SimpleNamespace

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn

from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import process_state, world
from mindformers_core.dtensor.move import dtype_name
from mindformers_core.operators.signature import is_float, tensor_meta
from mindformers_core.optimizers.adamw import AdamW
from mindformers_core.passes.forward_backward import ForwardBackward, is_differentiable
from mindformers_core.program.observer import Observer
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.redistribution.arrays import assemble
from mindformers_core.sharding.initialize import materialize
from mindformers_core.sharding.inspecting import prepare, programs
from mindformers_core.sharding.parameter_storage import as_computed
from mindformers_core.sharding.shard import shard
from mindformers_core.sharding.sharded_cells import tree_of, tree_of_root
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.verification.engine import RankStep, Subject, plans_of, simulate
from mindformers_core.zero.gradients import value_and_grad
from mindformers_core.zero.precision import MixedPrecision

__all__ = ["verify"]

_OPTIMIZER = SimpleNamespace(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, weight_decay_exclude=("*bias*", "*norm*"))
_MAX_NORM = 1e-3  # small, so that gradients are clipped


def verify(net, mesh, *inputs, config=None, plan=None, seed=0, **named_inputs):
    """Run the programs of all ranks of a mesh in this process, and compare every tensor with one card.

    Nothing is launched: ranks are threads, collectives are array operations. What runs is what will run: the generated
    source, with its collectives, and under `hsdp()` the buckets; forward, backward, clipping, and one step of AdamW.
    Floating tensors are float64, whatever their dtypes in the model, so that a difference is a fault. The idea is that
    of TTrace (2026) and TrainVerify (SOSP 2025): one program against its parallel form, tensor by tensor.

    Args:
        net: a Cell that isn't sharded, of which every rank gets a copy, sharded by `shard(copy, mesh, config, plan)`;
            on the meta device, it gets its initial values. Or a function without arguments that returns the finished
            Cell of a rank: after `shard()`, `recompute()`, `hsdp()`.
        mesh: the `DeviceMesh` of all ranks, from 0 on.
        inputs, named_inputs: arguments of one call on one card: tensors of the whole batch, and other values.
        config, plan, seed: as of `shard`, for a Cell that isn't sharded.

    Returns:
        A `Check`: `.faults` is empty for a plan that is right, `.report()` is the text.

    Raises:
        TypeError, ValueError: what `shard()`, `hsdp()` or the first call raises.
    """
    inputs, named = tree_map(_plain, (inputs, named_inputs))
    subject = _Call(net, mesh, config, plan, seed, inputs, named)
    plans = plans_of(mesh, subject.build, subject.planning_inputs)
    step = subject.subject()
    return simulate(step, plans, subject.notes)


class _Call:
    """A call of a Cell on all ranks of a mesh; arguments as of `verify`."""

    def __init__(self, net, mesh, config, plan, seed, args, kwargs):
        self.mesh, self.seed, self.args, self.kwargs = mesh, seed, args, kwargs
        self.cell, self.notes = net if isinstance(net, nn.Cell) else None, ()
        if self.cell is not None:
            materialize(net, seed)
        self.build_one = net if self.cell is None else lambda: shard(copy.deepcopy(net), mesh, config, plan, seed=seed)

    def build(self, rank):
        """The finished Cell of a rank, as stage 0."""
        ms.set_seed(self.seed)
        net = self.build_one()
        self._refuse(net)
        return {0: net}

    @staticmethod
    def _refuse(net):
        tree = tree_of_root(net, "verify")
        if any(hasattr(kind, "bprop") for kind in tree.classes.values()):
            raise ValueError(
                f"verify() differentiates by MindSpore's rules, and a Cell in {tree.label('')} has a bprop"
            )

    def planning_inputs(self, rank, stage, net):
        """Local inputs for planning, `(args, kwargs)`."""
        args, kwargs = self._local_inputs(net, rank)
        return tree_map(_meta, tree_of(net).storage.cast_inputs(args, kwargs))

    def _local_inputs(self, net, rank, step=0):
        """A rank's part of the inputs of a micro-step, `(args, kwargs)`."""
        tree = tree_of(net)
        bound = signature(tree.classes[""].construct).bind(net, *self.args, **self.kwargs)
        replica, count = self._replica(rank, net)

        def part(leaf, name):
            if not isinstance(leaf, np.ndarray):
                return leaf
            leaf = _replica_part(_rolled(leaf, step), replica, count)
            layout = tree.boundaries[""].arriving_layout(name, leaf.ndim)
            return Tensor(leaf[layout.local_slices(leaf.shape, rank)].copy())

        for name, value in list(bound.arguments.items())[1:]:
            bound.arguments[name] = tree_map(lambda leaf, name=name: part(leaf, name), value)
        return bound.args[1:], bound.kwargs

    @staticmethod
    def _replica(rank, net):
        """Number of the replica, with a batch of its own, that a rank belongs to, and number of replicas."""
        settings, mesh = tree_of(net).storage.settings, tree_of(net).mesh
        axes = () if settings is None else (*settings.replicate_axes, *settings.shard_axes)
        if not axes or set(axes) <= set(mesh.axis_names) or settings.axis in mesh.axis_names:
            return 0, 1
        return settings.mesh.group_index(rank, axes), settings.mesh.axis_size(*axes)

    def subject(self):
        """The `Subject`."""
        held = SimulatedRanks(self.mesh.size).run(self._held)
        settings, count = held[0][1:]
        if settings and settings.precision != MixedPrecision():
            self.notes = ("not verified: the dtypes of mixed_precision; everything is computed in one dtype",)
        steps = 1 if settings is None else settings.accumulate_grad_step
        passes = []
        for replica in range(count):
            for step in range(steps):
                rolled = tree_map(partial(_rolled, step=step), (self.args, self.kwargs))
                given = tree_map(partial(_replica_part, replica=replica, count=count), rolled)
                passes.append(((0, step, replica), *given, self._slopes))
        divisor = steps * (settings.group_size if settings and settings.gradients_mean else 1)
        return Subject(
            self.mesh,
            self.build,
            self.step,
            lambda rank, cells: self._replica(rank, cells[0])[0],
            self._parameters([each[0] for each in held]),
            passes,
            divisor,
        )

    def _held(self, rank):
        observer = process_state().observer = _InitialValues()
        net = self.build(rank)[0]
        return observer.found, tree_of(net).storage.settings, self._replica(rank, net)[1]

    def _parameters(self, held):
        """Path -> array with the global initial values."""
        if self.cell is not None:
            return {path: parameter.asnumpy() for path, parameter in self.cell.parameters_and_names()}
        found = {}
        for path, (_, layout, shape) in held[0].items():
            local = {rank: held[rank][path][0] for rank in layout.mesh.rank_list}
            found[path] = assemble(local, layout, shape)
        return found

    def _slopes(self, outputs):
        """The gradients of a pass's results: 1 for a loss, else random ones."""
        draw = np.random.default_rng(self.seed)
        if len(outputs) == 1 and outputs[0].ndim == 0:
            return [np.ones_like(outputs[0])]
        return [draw.standard_normal(output.shape).astype(output.dtype) for output in outputs]

    def step(self, rank, cells):
        """The `RankStep` of a rank."""
        net = cells[0]
        args, kwargs = tree_map(_widened, self._local_inputs(net, rank))
        run = self._differentiated if tree_of(net).storage.settings is None else self._under_hsdp
        losses, layouts, gradients = run(net, args, kwargs)
        parameters = tuple(net.trainable_params())
        optimizer = AdamW(parameters, _OPTIMIZER)
        return RankStep(losses, layouts, parameters, gradients, ClipByGlobalNorm(parameters, _MAX_NORM), optimizer)

    def _under_hsdp(self, net, args, kwargs):
        gradient_of, losses, gradients = value_and_grad(net), {}, None
        gradient_of.prepare(*args, **kwargs)
        while gradients is None:
            args, kwargs = tree_map(_widened, self._local_inputs(net, world().rank, len(losses)))
            result, gradients = gradient_of(*args, **kwargs)
            losses[0, len(losses)] = [result[0] if isinstance(result, tuple) else result]
        return losses, (programs(net)[-1].results[0].layout,), gradients

    def _differentiated(self, net, args, kwargs):
        passes, program = ForwardBackward(_floating), prepare(net, *args, **kwargs)
        inputs = _floating(tree_leaves((args, kwargs), Tensor))

        def forward(*moving):
            moving = iter(moving)
            given = tree_map(lambda leaf: next(moving) if _floating([leaf]) else leaf, (args, kwargs))
            return [result.to_local() for result in tree_leaves(net(*given[0], **given[1]), Tensor)]

        results = _floating(passes.forward(0, forward, inputs))
        floats = [each for each in program.results if is_float(each.dtype)]
        layouts = tuple(each.layout for each in floats)
        outputs = [np.empty(each.shape, tensor.asnumpy().dtype) for each, tensor in zip(floats, results)]
        slopes = [
            Tensor(slope[layout.local_slices(slope.shape, world().rank)].copy())
            for slope, layout in zip(self._slopes(outputs), layouts, strict=True)
        ]
        weights = ParameterTuple(net.trainable_params())
        found, gradients = passes.backward(0, slopes, weights)
        return {(0, 0): results}, layouts, gradients


class _InitialValues(Observer):
    """Keeps the parts that `shard()` gives a rank: path -> `(array, layout, global shape)`, in `found`."""

    def __init__(self):
        self.found = {}

    def placed(self, cell, parameters):
        """See `Observer`."""
        for path, before in cell.parameters_and_names():
            part = parameters[id(before)]
            self.found[path] = part.asnumpy().copy(), part.layout, tuple(part.global_shape)
        return parameters


def _rolled(leaf, step):
    """An input of a micro-step: the batch, beginning with another sample in each."""
    return np.roll(leaf, step, 0) if isinstance(leaf, np.ndarray) and leaf.ndim else leaf


def _replica_part(leaf, replica, count):
    """The part of an input that a data-parallel replica has as its own batch."""
    return np.split(leaf, count)[replica] if isinstance(leaf, np.ndarray) and count > 1 else leaf


def _floating(tensors):
    return tuple(tensor for tensor in tensors if isinstance(tensor, Tensor) and is_differentiable(tensor))


def _plain(leaf):
    """A tensor as an array."""
    return leaf.asnumpy() if isinstance(leaf, Tensor) else leaf


def _widened(leaf):
    return as_computed(leaf) if isinstance(leaf, Tensor) else leaf


def _meta(leaf):
    return tensor_meta(tuple(leaf.shape), dtype_name(leaf.dtype)) if isinstance(leaf, Tensor) else leaf
