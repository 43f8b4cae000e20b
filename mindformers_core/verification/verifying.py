"""`verify()`: is the plan of a Cell right?"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindformers_core.capture.traced import CaptureError
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import process_state, rank_of
from mindformers_core.dtypes import dtype_name
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators.signature import is_float
from mindformers_core.optimizers.grouped import GroupedOptimizer
from mindformers_core.optimizers.settings import AdamWSettings
from mindformers_core.padding import own_slices, stored_shape
from mindformers_core.program.observer import Instrumentation
from mindformers_core.program.structure import tree_map
from mindformers_core.sharding.declare import copy_cell, eager_cells
from mindformers_core.sharding.initialize import materialize
from mindformers_core.sharding.inspecting import prepare, programs
from mindformers_core.sharding.plan_passes import planned_call
from mindformers_core.sharding.shard import shard
from mindformers_core.sharding.sharded_cells import tree_and_path, tree_of, tree_of_root
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.verification.comparison import expected_part
from mindformers_core.verification.eager import local_inputs, own_gradients, verify_by_own_code
from mindformers_core.verification.engine import acts_in_training, seed_restored, simulate
from mindformers_core.verification.truth import differentiated, floating
from mindformers_core.zero.gradients import value_and_grad
from mindformers_core.zero.precision import MixedPrecision

_OPTIMIZER = AdamWSettings(weight_decay=0.1)
_MAX_NORM = 1e-3  # small, so that gradients are clipped


@seed_restored()
def verify(net, mesh, *inputs, config=None, plan=None, seed=0, **named_inputs):
    """Run the programs of all ranks of a mesh in this process, and compare their tensors with one card.

    Nothing is launched: ranks are threads, collectives are array operations. What runs is what will run: the generated
    source, with its collectives, and under `hsdp()` the buckets; forward, backward, clipping, and one step of AdamW.
    Floating tensors are float64, whatever their dtypes in the model, so that a difference is a fault. The idea is that
    of TTrace (2026) and TrainVerify (SOSP 2025): one program against its parallel form, tensor by tensor: all of a
    replica's first pass; of later passes, which run the same programs, results and gradients of weights, and all only
    where one of these differs. A model with Cells that the plan marks as eager, or with a `bprop` or `local_map`, is
    compared with its own code, as the note under the report says. On CPU, `mindspore.runtime.launch_blocking()` before
    it saves most of its time.

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
        TypeError, ValueError: what `shard()`, `hsdp()` or the first call raises. Desync: ranks wait for each other.
    """
    if not isinstance(mesh, DeviceMesh) or tuple(mesh.rank_list) != tuple(range(mesh.size)):
        raise ValueError(f"verify() takes the DeviceMesh of all ranks, from 0 on, not {mesh!r}")
    if not isinstance(net, nn.Cell) and (config, plan) != (None, None):
        raise ValueError(
            "verify(): config and plan are for a Cell that isn't sharded, not for a function that shards it"
        )
    given = tree_map(lambda leaf: leaf.asnumpy() if isinstance(leaf, Tensor) else leaf, (inputs, named_inputs))
    by_hand = []  # paths of the Cells that are found to be parallel code written by hand
    while True:
        try:
            if isinstance(net, nn.Cell) and (by_hand or eager_cells(net, plan) or own_gradients(net)):
                return verify_by_own_code(net, mesh, config, plan, seed, *given, by_hand)
            call = _Call(net, mesh, config, plan, seed, *given)
            check = simulate(call, call.plans, call.notes)
            if call.training and not check.faults and acts_in_training(call.plans):
                call = _Call(net, mesh, config, plan, seed, *given, evaluates=True)
                check = check.followed_by(simulate(call, call.plans, ("in evaluation, after net.set_train(False)",)))
            return check
        except CaptureError as error:
            if not isinstance(net, nn.Cell) or error.by_hand is None:
                raise
            by_hand.append(tree_and_path(error.by_hand)[1])


class _Call:
    """A call of a Cell on all ranks of a mesh, a subject of `simulate`; arguments as of `verify`, with arrays.

    With `evaluates` all Cells are in evaluation mode.
    """

    divisor, device_target, notes, goes_on, is_mixed = 1, None, (), False, False

    def __init__(self, net, mesh, config, plan, seed, args, kwargs, evaluates=False):
        self.mesh, self.seed, self.args, self.kwargs, self.evaluates = mesh, seed, args, kwargs, evaluates
        self.plans, steps = {}, 1  # (0, mesh of a Cell) -> `(CellGraph, CellPlan)`
        if isinstance(net, nn.Cell):
            materialize(net, seed)
            self.build_one, self.model = lambda: shard(copy_cell(net), mesh, config, plan, seed=seed), net
            self.parameters = {path: parameter.asnumpy() for path, parameter in net.parameters_and_names()}
            with rank_of(mesh.size, 0):
                self._plan(0)
        else:
            self.build_one, self.model, self.parameters, self.plain = net, None, {}, []
            SimulatedRanks(mesh.size).run(self._plan)
            if len(self.plain) == 1 and self.plain[0].parameters_dict().keys() == self.parameters.keys():
                self.model = self.plain[0]
                for path, parameter in self.model.parameters_and_names():
                    parameter.set_data(Tensor(self.parameters[path]))
        if evaluates and self.model is not None:
            self.model = copy_cell(self.model).set_train(False)
        if self.settings is not None:
            self.goes_on = True  # only `hsdp()` keeps a state from step to step
            steps = self.settings.accumulate_grad_step
            self.divisor = steps * (self.settings.group_size if self.settings.gradients_mean else 1)
            self.is_mixed = self.settings.precision != MixedPrecision()
            self.notes = ("not verified: tensors inside in the dtypes of mixed_precision",) * self.is_mixed
        self.passes = [
            ((0, step, replica), *self._inputs(step, replica, self.count), self._slopes)
            for replica, step in np.ndindex(self.count, steps)
        ]

    def build(self, rank):
        """The finished Cell of a rank, as stage 0."""
        ms.set_seed(self.seed)
        net = self.build_one()
        self.training = net.training
        net = net.set_train(False) if self.evaluates else net
        tree = tree_of_root(net, "verify")
        if any(hasattr(kind, "bprop") for kind in tree.classes.values()):
            raise ValueError(f"a Cell in {tree.label('')} has a bprop: verify() takes the model itself, before shard()")
        self.settings, (_, self.count) = tree.storage.settings, _replica(net, rank)
        return {0: net}

    def _plan(self, rank):
        """Put the plan of a rank's mesh into `plans`, and initial values that only ranks have into `parameters`."""
        if self.model is None:
            process_state().instrumentation = _InitialValues(rank, self.parameters, self.plain)
        net = self.build(rank)[0]
        tree = tree_of(net)
        if (0, tree.mesh) not in self.plans:
            inputs = tree.storage.cast_inputs(*self._local_inputs(net, rank))
            self.plans[0, tree.mesh] = planned_call(tree, "", *inputs)[:2]

    def replica(self, rank, cells):
        """Number of the replica whose batch a rank computes."""
        return _replica(cells[0], rank)[0]

    def _inputs(self, step, replica, count):
        """The inputs of a micro-step of one of `count` replicas: a part of the batch, which each step rolls by one."""

        def part(leaf):
            if not isinstance(leaf, np.ndarray):
                return leaf
            leaf = np.roll(leaf, step, 0) if leaf.ndim else leaf
            return np.split(leaf, count)[replica] if count > 1 else leaf

        return tree_map(part, (self.args, self.kwargs))

    def _local_inputs(self, net, rank, step=0):
        """A rank's part of the inputs of a micro-step, `(args, kwargs)`."""
        given = self._inputs(step, *_replica(net, rank))
        given = tree_map(lambda leaf: Tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, given)
        return local_inputs(net, given, rank)

    def _slopes(self, outputs):
        """The gradients of a pass's results, which ranks take later: 1 for a loss, else random ones."""
        draw, is_loss = np.random.default_rng(self.seed), len(outputs) == 1 and outputs[0].ndim == 0
        self.slopes = [np.ones_like(o) if is_loss else draw.standard_normal(o.shape).astype(o.dtype) for o in outputs]
        return self.slopes

    def step(self, rank, cells):
        run = self._differentiated if self.settings is None else self._under_hsdp
        results, gradients = run(cells[0], rank)
        parameters = tuple(_trained(cells[0]))
        return results, gradients, ClipByGlobalNorm(parameters, _MAX_NORM), GroupedOptimizer(parameters, _OPTIMIZER)

    def _under_hsdp(self, net, rank):
        gradient_of, losses, gradients = value_and_grad(net), {}, None
        while gradients is None:
            args, kwargs = self._local_inputs(net, rank, len(losses))
            result, gradients = gradient_of(*args, **kwargs)
            losses[0, len(losses)] = result[0] if isinstance(result, tuple) else result
        layout = programs(net)[-1].results[0].layout
        return {label: [(loss, layout)] for label, loss in losses.items()}, gradients

    def _differentiated(self, net, rank):
        (args, kwargs), weights = self._local_inputs(net, rank), _trained(net)
        if not weights and not floating((args, kwargs)):
            raise ValueError(
                f"verify() compares gradients, too, and {type(net).__name__} has none: it has no Parameters that are "
                "trained, and no tensor of floats among its inputs; give it one"
            )
        layouts = [each.layout for each in prepare(net, *args, **kwargs).results if is_float(each.dtype)]
        slopes = [expected_part(slope, layout, rank) for slope, layout in zip(self.slopes, layouts, strict=True)]
        outputs, gradients = differentiated(net, args, kwargs, lambda _: slopes, weights)
        return {(0, 0): list(zip(outputs, layouts, strict=True))}, gradients


class _InitialValues(Instrumentation):
    """Puts the parts that `shard()` gives a rank into global arrays, `found` by path, and copies of the first rank's
    Cells, before they are sharded, into the list `plain`."""

    def __init__(self, rank, found, plain):
        self.rank, self.found, self.plain = rank, found, plain

    def placed(self, cell, parameters):
        if self.rank == 0:
            self.plain.append(copy_cell(cell))
        for path, before in cell.parameters_and_names():
            part = parameters[id(before)]
            whole = self.found.setdefault(path, np.empty(part.global_shape, part.asnumpy().dtype))
            slices = part.layout.local_slices(stored_shape(part), self.rank)
            own = own_slices(slices, getattr(part, "part_sizes", ()))
            whole[own] = part.asnumpy()[tuple(map(slice, whole[own].shape))]
        return parameters


def _trained(net):
    """The Parameters that get gradients: those of floats."""
    return [parameter for parameter in net.trainable_params() if is_float(dtype_name(parameter.dtype))]


def _replica(net, rank):
    """Number of the replica, with a batch of its own, that a rank belongs to, and number of replicas."""
    settings, mesh = tree_of(net).storage.settings, tree_of(net).mesh
    axes = () if settings is None else (*settings.replicate_axes, *settings.shard_axes)
    if not axes or not {*settings.axes, *axes}.isdisjoint(mesh.axis_names):
        return 0, 1
    return settings.mesh.group_index(rank, axes), settings.group_size
