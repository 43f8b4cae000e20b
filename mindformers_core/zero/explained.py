"""What `explain()` says of a Cell under `hsdp()`: what is cut, what is whole, and all buckets."""

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.hints import bytes_shown
from mindformers_core.zero.formulas import StepPlan, bucket_traffic, traffic_of_step

__all__ = ["bucket_lines", "explained", "explained_lines", "step_plan", "whole_lines"]

_NAMES = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}
_KEPT = {
    "level1": "optimizer state",
    "level2": "optimizer state and gradients",
    "level3": "optimizer state, gradients and weights",
}


def step_plan(storage, compiled=False):
    """The `StepPlan` of a step under a `HsdpStorage`, with forward and backward passes that are `compiled` or not."""
    settings = storage.settings
    replicas = settings.mesh.axis_size(*settings.replicate_axes)
    at_once = not settings.reduces_as_they_come or (compiled and not storage.units)
    return StepPlan(
        tuple(stored.plan for stored in storage.parameters), settings.shard_size, replicas, settings.precision,
        tuple(storage.gathers), tuple(storage.reduces), settings.accumulate_grad_step, at_once, settings.sums_shards,
        storage.units, settings.prefetch,
    )  # fmt: skip


def explained(storage):
    """The result of `ParameterStorage.explained` for a `HsdpStorage`."""
    settings, step = storage.settings, step_plan(storage)
    axes = settings.axis, "hsdp"
    traffic = {(axes, *key): sent for key, sent in traffic_of_step(step).items() if sent[1]}
    return explained_lines(settings, step), step.micro_steps, traffic


def explained_lines(settings, step):
    """Lines of text for the settings of `hsdp()` (`HsdpSettings`) and what follows from them (a `StepPlan`)."""
    count = step.shard_size * step.replicas
    if step.shard_size == 1:
        head = f"Under hsdp(): plain data parallelism over the {count} ranks of axis '{settings.axis}'."
    else:
        groups = f", in {step.replicas} groups that hold the same" if step.replicas > 1 else ""
        head = (
            f"Under hsdp(), {settings.level}: {_KEPT[settings.level]} in {step.shard_size} parts over "
            f"axis '{settings.axis}'{groups}."
        )
    cut = [plan for plan in step.plans if plan.dim is not None]
    lines = [head]
    if cut:
        kept = sum(step.shard_bytes(plan, plan.shard_dtype) for plan in cut)
        whole = sum(plan.nbytes for plan in cut)
        lines.append(
            f"  {len(cut)} parameters are cut: {bytes_shown(whole)} as they compute, {bytes_shown(kept)} of parts here"
        )
    if step.micro_steps > 1:
        kept = "parts of their gradients' sums" if step.sums_shards else "whole sums of their gradients"
        lines.append(f"  between {step.micro_steps} micro-steps a rank keeps {kept}")
    return [*lines, *whole_lines(step), *bucket_lines(step)]


def whole_lines(step):
    """What stays whole, and why."""
    whole = [plan for plan in step.plans if plan.dim is None]
    reasons = {plan.reason for plan in whole}
    if not whole:
        return []
    if len(reasons) == 1 and step.shard_size == 1:
        return [f"  all {len(whole)} parameters stay whole, {bytes_shown(sum(plan.nbytes for plan in whole))}"]
    lines = [f"  {len(whole)} parameters stay whole, {bytes_shown(sum(plan.nbytes for plan in whole))}:"]
    return lines + [
        f"    {plan.path}  {plan.dtype} {list(plan.shape)}, {bytes_shown(plan.nbytes)}: {plan.reason}" for plan in whole
    ]


def bucket_lines(step):
    """Every bucket: its collective, its buffer, its unit, and its members."""
    lines = []
    for title, buckets in (("of weights, in forward order", step.gathers), ("of gradients", step.reduces)):
        lines += [f"  buckets {title}:"] if buckets else []
        for number, bucket in enumerate(buckets):
            sent = ", ".join(f"{kind} sends {bytes_shown(nbytes)}" for kind, nbytes in bucket_traffic(step, bucket))
            unit = f" of {bucket.unit}" if bucket.unit else ""
            lines.append(
                f"    {number}: {_NAMES[bucket.kind]}{unit}, {bucket.dtype}, "
                f"{bytes_shown(bucket.size * ITEM_BYTES[bucket.dtype])}; {sent}"
            )
            lines.append(f"       {_members(step, bucket)}")
    return lines


def _members(step, bucket):
    paths = [step.plans[number].path for number in bucket.members]
    return ", ".join(paths) if len(paths) < 3 else f"{paths[0]} … {paths[-1]} ({len(paths)} in all)"
