"""The memory and the traffic of a step on a rank, computed from the plans. Pure Python.

The model states of the ZeRO paper (Rajbhandari et al. 2020, section 3: of Ψ weights in mixed precision 2Ψ bytes of
weights, 2Ψ of gradients, and 12Ψ of optimizer state, which includes the float32 master copy) are the first four kinds
of `MemoryEstimate`; buffers, of the paper's section 6.2, are the fifth.
"""

from dataclasses import dataclass, replace

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.redistribution.steps import wire_bytes
from mindformers_core.zero.settings import HsdpSettings


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on a rank at one time, without activations.

    Attributes:
        weights: unsharded weights, in the dtype of the passes; replicated ones that are updated in it, too.
        parts: the optimizer's weights where these are other tensors: shards, and copies in another dtype.
        gradients: whole and reduced gradients.
        state: the optimizer's state.
        buckets: buffers, and temporary tensors of collectives.
        passing: temporary bytes among these: weights of units, and whole gradients until the reduction of their bucket.
    """

    weights: int = 0
    parts: int = 0
    gradients: int = 0
    state: int = 0
    buckets: int = 0
    passing: int = 0

    @property
    def total(self):
        """The sum of all kinds."""
        return self.weights + self.parts + self.gradients + self.state + self.buckets

    @property
    def states(self):
        """The model states of the ZeRO paper: `total` without buckets and temporary bytes."""
        return self.total - self.buckets - self.passing


@dataclass(frozen=True)
class StepPlan:
    """The input of the formulas.

    Attributes:
        settings: the `HsdpSettings`.
        plans: `ParameterPlan`s of all parameters.
        gathers, reduces: `Bucket`s, in the order of a step.
        units: paths of the units that are gathered one by one, in the order of the Cells.
        at_once: whether all gradients of a backward pass exist before the first is reduced.
    """

    settings: HsdpSettings
    plans: tuple
    gathers: tuple
    reduces: tuple
    units: tuple
    at_once: bool

    def settings_of(self, bucket):
        """The `HsdpSettings` of a bucket's parameters."""
        return self.settings.without(self.plans[bucket.members[0]].cut)

    def part_bytes(self, plans):
        """Bytes of a rank's shards of parameters, or of all that are whole."""
        return sum(plan.shard_bytes(self.settings.without(plan.cut).shard_size) for plan in plans)

    def held_units(self, unit):
        """The units that are in place during the backward pass of `unit`."""
        if unit not in self.units:
            return ()
        place = self.units.index(unit)
        return self.units[max(0, place - self.settings.prefetch) : place + 1]

    def weight_bytes(self, unit):
        """`(bytes of unsharded weights, those of units among them)` during the backward pass of `unit`."""
        of_units = [plan for plan in self.plans if plan.dim is not None and plan.unit in self.units]
        held = self.held_units(unit)
        gathered = sum(plan.nbytes for plan in of_units if plan.unit in held)
        others = sum(plan.nbytes for plan in self.plans) - sum(plan.nbytes for plan in of_units)
        return others + gathered, gathered

    def gradient_bytes(self, bucket):
        """`(whole, in the dtype of sums, reduced, sums of earlier micro-steps)`: bytes of a bucket's gradients."""
        count = self.settings_of(bucket).shard_size if bucket.kind == "reducescatter" else 1
        summed = bucket.size * ITEM_BYTES[bucket.dtype]
        reduced = bucket.size * ITEM_BYTES[self.settings.precision.gradient or bucket.dtype] // count
        sums = 0 if self.settings.accumulate_grad_step == 1 else summed // (count if self.settings.sums_shards else 1)
        return sum(self.plans[number].nbytes for number in bucket.members), summed, reduced, sums


def memory_of_step(step, state_bytes):
    """The peak memory of a step.

    Args:
        step: the `StepPlan`.
        state_bytes: bytes of optimizer state for an element: 8 for Adam's two float32 moments.

    Returns:
        `({"pass": MemoryEstimate, "update": MemoryEstimate}, states)`: the peak of forward and backward pass, the
        optimizer's step after it, and the largest `MemoryEstimate.states` at any time.
    """
    trained = [plan for plan in step.plans if plan.trainable]
    state = sum(step.part_bytes([plan]) // ITEM_BYTES[plan.shard_dtype] * state_bytes for plan in trained)
    parts = step.part_bytes(plan for plan in step.plans if plan.is_copied)
    alone = sum(plan.nbytes for plan in step.plans if not plan.is_copied)
    moments = [*_opening(step, alone, parts), *_reducing(step, parts), *_summing(step, parts)]
    moments = [replace(estimate, state=state) for estimate in moments]
    update = MemoryEstimate(alone, parts, step.part_bytes(trained), state)
    peak = max(moments, key=lambda estimate: estimate.total)
    return {"pass": peak, "update": update}, max(estimate.states for estimate in (*moments, update))


def _opening(step, alone, parts):
    """During the gathers at the beginning of a step."""
    weights = alone + sum(plan.nbytes for plan in step.plans if plan.dim is None and plan.is_copied)
    yield MemoryEstimate(weights, parts)
    for bucket in step.gathers:
        if bucket.unit not in step.units:
            weights += bucket.size * ITEM_BYTES[bucket.dtype]
            yield MemoryEstimate(weights, parts, buckets=_gather_buffers(step, bucket))


def _gather_buffers(step, bucket):
    """The buffer of a gather, and the copy of one of its weights."""
    members = [step.plans[number] for number in bucket.members]
    copy = max(plan.nbytes for plan in members) if len(members) > 1 or members[0].dim else 0
    return bucket.size * ITEM_BYTES[bucket.dtype] + copy


def _parts_in_pass(step, parts):
    """Bytes of shards during the passes: those of the passes' dtype are lent, unless there are units."""
    if step.units:
        return parts
    lent = [plan for plan in step.plans if plan.dim is not None and plan.shard_dtype == plan.dtype]
    return parts - step.part_bytes(lent)


def _reducing(step, parts):
    """During the reduction of each bucket in the last micro-step."""
    parts, done = _parts_in_pass(step, parts), 0
    waiting = sum(_waiting(step, bucket) for bucket in step.reduces)
    for bucket in step.reduces:
        waiting -= _waiting(step, bucket)
        weights, gathered = step.weight_bytes(bucket.unit)
        held = step.held_units(bucket.unit)
        for other in step.gathers:
            if other.unit in held:
                buffers = _gather_buffers(step, other)
                yield MemoryEstimate(weights, parts, done + waiting, buckets=buffers, passing=gathered)
        own, summed, reduced, sums = step.gradient_bytes(bucket)
        if sums == summed:  # whole sums: the gradients are added, then the new sums are reduced
            passing = gathered + (0 if step.at_once else own)
            yield MemoryEstimate(weights, parts, done + waiting + own + sums, passing=passing)
            own, sums = summed, step.plans[bucket.members[-1]].nbytes  # the last gradient is still referenced
        passing = gathered + (0 if step.at_once else own)
        buffers = _reduce_buffers(step, bucket, own)
        yield MemoryEstimate(weights, parts, done + waiting + own + sums, buckets=buffers, passing=passing)
        done += reduced
    weights, gathered = step.weight_bytes("")
    yield MemoryEstimate(weights, parts, done, passing=gathered)


def _waiting(step, bucket):
    """Bytes of gradients and sums of a bucket before its reduction."""
    whole, _, _, sums = step.gradient_bytes(bucket)
    return (whole if step.at_once else 0) + sums


def _reduce_buffers(step, bucket, own):
    """Peak bytes of a reduction besides its gradients, `own` bytes, of which the last one is referenced to the end."""
    _, summed, reduced, _ = step.gradient_bytes(bucket)
    scattered = summed // (step.settings_of(bucket).shard_size if bucket.kind == "reducescatter" else 1)
    last = step.plans[bucket.members[-1]]
    copied = own != summed or last.dim
    if len(bucket.members) == 1:
        return max(scattered + (summed if copied else 0), scattered + reduced)
    joining = 2 * summed if copied else 0
    gone = own - own * last.size // bucket.size
    return max(summed, max(joining, scattered + summed, scattered + reduced) - gone)


def _summing(step, parts):
    """At the end of a backward pass whose whole gradients are added to sums."""
    micro_steps = step.settings.accumulate_grad_step
    if micro_steps == 1 or step.settings.sums_shards:
        return
    sizes = [step.gradient_bytes(bucket)[:2] for bucket in step.reduces]
    gradients = sum(sum(pair) if micro_steps > 2 else max(pair) for pair in sizes)
    yield MemoryEstimate(step.weight_bytes("")[0], _parts_in_pass(step, parts), gradients)


def bucket_traffic(step, bucket):
    """The bytes that one run of a bucket's collectives sends: `(kind, bytes)`, as `count_collectives` counts."""
    settings, whole = step.settings_of(bucket), bucket.size * ITEM_BYTES[bucket.dtype]
    count = settings.shard_size
    if bucket.kind == "allgather":
        return [("all_gather", wire_bytes("all_gather", count, whole))]
    if bucket.kind == "allreduce":
        return [("all_reduce", wire_bytes("all_reduce", settings.group_size, whole))]
    traffic = [("reduce_scatter", wire_bytes("reduce_scatter", count, whole))]
    replicas = settings.group_size // count
    if replicas > 1:
        traffic.append(("all_reduce", wire_bytes("all_reduce", replicas, whole // count)))
    return traffic


def traffic_of_step(step):
    """`("forward" or "backward", kind of collective)` -> `(calls, bytes)` that one rank makes and sends in a step.

    Weights that are unsharded during a step are gathered before the forward pass.
    """
    sums, micro_steps = {}, step.settings.accumulate_grad_step
    for bucket in (*step.gathers, *step.reduces):
        of_unit = bucket.kind == "allgather" and bucket.unit in step.units
        ways = ("backward",) if bucket.kind != "allgather" else ("forward", "backward") if of_unit else ("forward",)
        for kind, nbytes in bucket_traffic(step, bucket):
            times = micro_steps if of_unit or (kind == "reduce_scatter" and step.settings.sums_shards) else 1
            for way in ways:
                calls, before = sums.get((way, kind), (0, 0))
                sums[way, kind] = calls + times, before + times * nbytes
    return sums
