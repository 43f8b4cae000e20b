"""How much memory a step takes on a rank, and how much it sends, computed ahead from the plans. Pure Python.

What the ZeRO paper counts as model states (Rajbhandari et al. 2020, section 3: of Ψ weights in mixed precision 2Ψ bytes
of weights, 2Ψ of gradients, and 12Ψ of optimizer state, the float32 master copy among it) are the first four kinds of
`MemoryEstimate`; buffers, which it treats apart (section 6.2), are the fifth.
"""

from dataclasses import dataclass, replace
from math import prod

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.redistribution.steps import wire_bytes
from mindformers_core.zero.precision import MixedPrecision

__all__ = ["MemoryEstimate", "StepPlan", "bucket_traffic", "memory_of_step", "traffic_of_step"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on a rank at one time. Activations are not among them.

    Attributes:
        weights: of whole weights, as they compute; of those that stay whole and are updated as they are, too.
        parts: of what the optimizer updates, where that is another tensor: parts, and copies in another dtype.
        gradients: of whole and of reduced gradients.
        state: of the optimizer's state.
        buckets: of buffers, and of what else a collective needs while it runs.
        passing: among these, what comes and goes: weights of units, and whole gradients until their bucket is reduced.
    """

    weights: int = 0
    parts: int = 0
    gradients: int = 0
    state: int = 0
    buckets: int = 0
    passing: int = 0

    @property
    def total(self):
        """All together."""
        return self.weights + self.parts + self.gradients + self.state + self.buckets

    @property
    def states(self):
        """What the ZeRO paper counts: all but buckets, and what comes and goes with them."""
        return self.total - self.buckets - self.passing


@dataclass(frozen=True)
class StepPlan:
    """What the figures follow from.

    Attributes:
        plans: `ParameterPlan`s of all parameters.
        shard_size, replicas: number of parts, and of ranks that hold the same part.
        precision: the `MixedPrecision`.
        gathers, reduces: `Bucket`s, in the order in which they run.
        micro_steps: of a step.
        at_once: whether all gradients of a backward pass are there before the first is reduced.
        sums_shards: whether every micro-step's gradients are reduce-scattered, and sums of parts kept.
        units: paths of the units that come and go, in the order of the Cells.
        prefetch: how many units are gathered ahead.
    """

    plans: tuple
    shard_size: int
    replicas: int
    precision: MixedPrecision
    gathers: tuple
    reduces: tuple
    micro_steps: int = 1
    at_once: bool = True
    sums_shards: bool = False
    units: tuple = ()
    prefetch: int = 1

    def shard_bytes(self, plan, dtype):
        """Bytes of a rank's part in a dtype, given by name."""
        return prod(plan.shard_shape(self.shard_size)) * ITEM_BYTES[dtype]

    def comes_and_goes(self, plan):
        """Whether a weight is gathered with its unit."""
        return plan.dim is not None and plan.unit in self.units

    def held_units(self, unit):
        """The units that are in place while the backward pass is at `unit`."""
        if unit not in self.units:
            return ()
        place = self.units.index(unit)
        return self.units[max(0, place - self.prefetch) : place + 1]

    def gradient_bytes(self, bucket):
        """Bytes of whole gradients of a bucket: `(as they compute, as they are summed, as they wait afterwards)`."""
        members = [self.plans[number] for number in bucket.members]
        dtypes = (None, self.precision.reduce_dtype, self.precision.gradient_dtype)
        return tuple(
            sum(plan.size * ITEM_BYTES[dtype_of(plan.dtype) if dtype_of else plan.dtype] for plan in members)
            for dtype_of in dtypes
        )


def memory_of_step(step, state_bytes):
    """`({"pass": MemoryEstimate, "update": MemoryEstimate}, states)`: the fullest time of forward and backward pass,
    the optimizer's step after it, and the most of `MemoryEstimate.states` at any time.

    Args:
        step: the `StepPlan`.
        state_bytes: bytes of optimizer state for an element: 8 for Adam's two float32 moments.
    """
    trained = [plan for plan in step.plans if plan.trainable]
    state = sum(prod(plan.shard_shape(step.shard_size)) * state_bytes for plan in trained)
    copied = [plan for plan in step.plans if plan.dim is not None or plan.shard_dtype != plan.dtype]
    parts = sum(step.shard_bytes(plan, plan.shard_dtype) for plan in copied)
    gradients = sum(step.shard_bytes(plan, plan.shard_dtype) for plan in trained)
    alone = sum(plan.nbytes for plan in step.plans if plan not in copied)
    moments = [*_opening(step, alone, parts), *_reducing(step, parts), *_summing(step, parts)]
    moments = [replace(figures, state=state) for figures in moments]
    update = MemoryEstimate(alone, parts, gradients, state)
    largest = max(moments, key=lambda figures: figures.total)
    return {"pass": largest, "update": update}, max(figures.states for figures in (*moments, update))


def _opening(step, alone, parts):
    """While whole weights are put in place, bucket by bucket."""
    there = alone + sum(plan.nbytes for plan in step.plans if plan.dim is None and plan.shard_dtype != plan.dtype)
    yield MemoryEstimate(there, parts)
    for bucket in step.gathers:
        if bucket.unit not in step.units:
            there += bucket.size * ITEM_BYTES[bucket.dtype]
            yield MemoryEstimate(there, parts, buckets=_gather_buffers(step, bucket))


def _gather_buffers(step, bucket):
    """What a gather needs besides: the buffer, and of several weights one after the other as it is cut out of it."""
    members = [step.plans[number] for number in bucket.members]
    cut_out = max(plan.nbytes for plan in members) if len(members) > 1 or members[0].dim else 0
    return bucket.size * ITEM_BYTES[bucket.dtype] + cut_out


def _weights(step, unit):
    """`(whole weights, those of units that come and go among them)` while the backward pass is at `unit`."""
    always = sum(plan.nbytes for plan in step.plans if not step.comes_and_goes(plan))
    held = step.held_units(unit)
    gathered = sum(plan.nbytes for plan in step.plans if step.comes_and_goes(plan) and plan.unit in held)
    return always + gathered, gathered


def _parts_in_pass(step, parts):
    """Bytes of parts while whole weights are in place: those of the same dtype are lent, but with units."""
    if step.units:
        return parts
    cut = [plan for plan in step.plans if plan.dim is not None and plan.shard_dtype == plan.dtype]
    return parts - sum(step.shard_bytes(plan, plan.shard_dtype) for plan in cut)


def _reducing(step, parts):
    """While the gradients of each bucket are reduced, in the last micro-step."""
    parts, reduced = _parts_in_pass(step, parts), 0
    waiting = sum(_waiting(step, bucket) for bucket in step.reduces)
    for bucket in step.reduces:
        waiting -= _waiting(step, bucket)
        weights, gathered = _weights(step, bucket.unit)
        held = step.held_units(bucket.unit)
        for other in step.gathers:
            if other.unit in held:
                buffers = _gather_buffers(step, other)
                yield MemoryEstimate(weights, parts, reduced + waiting, buckets=buffers, passing=gathered)
        compute, summed, waits = step.gradient_bytes(bucket)
        own, sums = compute, _sum_bytes(step, bucket)
        if sums == summed:  # whole ones: first they are added, then the new sums are reduced
            yield MemoryEstimate(
                weights, parts, reduced + waiting + own + sums, passing=gathered + (not step.at_once) * own
            )
            own, sums = summed, step.plans[bucket.members[-1]].nbytes  # the last gradient that came stays
        buffers = _reduce_buffers(step, bucket, own)
        passing = gathered + (0 if step.at_once else own)
        yield MemoryEstimate(weights, parts, reduced + waiting + own + sums, buckets=buffers, passing=passing)
        reduced += waits // _count(step, bucket)
    weights, gathered = _weights(step, "")
    yield MemoryEstimate(weights, parts, reduced, passing=gathered)


def _waiting(step, bucket):
    """Bytes of whole gradients of a bucket whose turn hasn't come."""
    compute, _, _ = step.gradient_bytes(bucket)
    return (compute if step.at_once else 0) + _sum_bytes(step, bucket)


def _sum_bytes(step, bucket):
    """Bytes of the sums over the micro-steps before."""
    _, summed, _ = step.gradient_bytes(bucket)
    if step.micro_steps == 1:
        return 0
    return summed // _count(step, bucket) if step.sums_shards else summed


def _count(step, bucket):
    return step.shard_size if bucket.kind == "reducescatter" else 1


def _reduce_buffers(step, bucket, own):
    """What a reduction needs at the most besides its gradients, `own` bytes, of which the last one stays to the end."""
    (_, summed, waits), count = step.gradient_bytes(bucket), _count(step, bucket)
    last = step.plans[bucket.members[-1]]
    copied = own != summed or last.dim
    scattering, cutting = summed * (count + 1) // count, (summed + waits) // count
    if len(bucket.members) == 1:
        return max(scattering if copied else summed // count, cutting)
    joining = 2 * summed if copied else 0
    gone = own - own * last.size // bucket.size
    return max(summed, max(joining, scattering, cutting) - gone)


def _summing(step, parts):
    """At the end of a backward pass whose gradients are summed up with those before it."""
    if step.micro_steps == 1 or step.sums_shards:
        return
    gradients = 0
    for bucket in step.reduces:
        compute, summed, _ = step.gradient_bytes(bucket)
        gradients += compute + summed if step.micro_steps > 2 else max(compute, summed)
    weights, _ = _weights(step, "")
    yield MemoryEstimate(weights, _parts_in_pass(step, parts), gradients)


def bucket_traffic(step, bucket):
    """What one run of a bucket's collective sends: a list of `(kind, bytes)`, as `count_collectives` counts."""
    whole = bucket.size * ITEM_BYTES[bucket.dtype]
    if bucket.kind == "allgather":
        return [("all_gather", wire_bytes("all_gather", step.shard_size, whole))]
    if bucket.kind == "allreduce":
        return [("all_reduce", wire_bytes("all_reduce", step.shard_size * step.replicas, whole))]
    over_replicas = [("all_reduce", wire_bytes("all_reduce", step.replicas, whole // step.shard_size))]
    scattered = ("reduce_scatter", wire_bytes("reduce_scatter", step.shard_size, whole))
    return [scattered, *(over_replicas if step.replicas > 1 else [])]


def traffic_of_step(step):
    """`("forward" or "backward", kind of collective)` -> `(calls, bytes)` that one rank makes and sends in a step.

    Weights that are whole between steps are gathered before the forward pass.
    """
    sums = {}
    for bucket in (*step.gathers, *step.reduces):
        is_gather = bucket.kind == "allgather"
        comes_and_goes = is_gather and bucket.unit in step.units
        for kind, nbytes in bucket_traffic(step, bucket):
            times = step.micro_steps if comes_and_goes or (kind == "reduce_scatter" and step.sums_shards) else 1
            for way in ("forward",) * is_gather + ("backward",) * (comes_and_goes or not is_gather):
                calls, before = sums.get((way, kind), (0, 0))
                sums[way, kind] = calls + times, before + times * nbytes
    return sums
