"""The lines of `explain()` about a Cell under `hsdp()`: sharded and replicated parameters, and all buckets."""

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.hints import bytes_shown
from mindformers_core.zero.formulas import StepPlan, bucket_traffic
from mindformers_core.zero.plan import LEVELS
from mindformers_core.zero.settings import shown_axes

_NAMES = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}


def step_plan(storage, compiled=False):
    """The `StepPlan` of a step under a `HsdpStorage`, with forward and backward passes that are `compiled` or not."""
    at_once = not storage.settings.reduces_as_they_come or (compiled and not storage.units)
    plans = tuple(stored.plan for stored in storage.parameters)
    return StepPlan(storage.settings, plans, tuple(storage.gathers), tuple(storage.reduces), storage.units, at_once)


def explained_lines(step):
    """Lines of text for a `StepPlan`."""
    settings, named = step.settings, shown_axes(step.settings.axes)
    replicas = settings.group_size // settings.shard_size
    if settings.shard_size == 1:
        head = f"Under hsdp(): plain data parallelism over the {replicas} ranks of {named}."
    else:
        groups = f", in {replicas} groups that hold the same" if replicas > 1 else ""
        head = (
            f"Under hsdp(), {settings.level}: {LEVELS[settings.level]} in {settings.shard_size} parts over "
            f"{named}{groups}."
        )
    lines, cut = [head], [plan for plan in step.plans if plan.dim is not None]
    if cut:
        kept = step.part_bytes(cut)
        whole = sum(plan.nbytes for plan in cut)
        lines.append(
            f"  {len(cut)} parameters are cut: {bytes_shown(whole)} as they compute, {bytes_shown(kept)} of parts here"
        )
    if settings.accumulate_grad_step > 1:
        kept = "parts of their gradients' sums" if settings.sums_shards else "whole sums of their gradients"
        lines.append(f"  between {settings.accumulate_grad_step} micro-steps a rank keeps {kept}")
    return [*lines, *whole_lines(step), *bucket_lines(step)]


def whole_lines(step):
    """Lines about the replicated parameters, with the reasons."""
    whole = [plan for plan in step.plans if plan.dim is None]
    if not whole:
        return []
    size = bytes_shown(sum(plan.nbytes for plan in whole))
    if step.settings.shard_size == 1:
        return [f"  all {len(whole)} parameters stay whole, {size}"]
    return [f"  {len(whole)} parameters stay whole, {size}:"] + [
        f"    {plan.path}  {plan.dtype} {list(plan.shape)}, {bytes_shown(plan.nbytes)}: {plan.reason}" for plan in whole
    ]


def bucket_lines(step):
    """Lines about every bucket: its collective, its unit, its buffer, its traffic and its members."""
    lines = []
    for title, buckets in (("of weights, in forward order", step.gathers), ("of gradients", step.reduces)):
        lines += [f"  buckets {title}:"] if buckets else []
        for number, bucket in enumerate(buckets):
            sent = ", ".join(f"{kind} sends {bytes_shown(nbytes)}" for kind, nbytes in bucket_traffic(step, bucket))
            unit = f" of {bucket.unit}" if bucket.unit else ""
            paths = [step.plans[member].path for member in bucket.members]
            lines.append(
                f"    {number}: {_NAMES[bucket.kind]}{unit}, {bucket.dtype}, "
                f"{bytes_shown(bucket.size * ITEM_BYTES[bucket.dtype])}; {sent}"
            )
            members = ", ".join(paths) if len(paths) < 3 else f"{paths[0]} … {paths[-1]} ({len(paths)} in all)"
            lines.append(f"       {members}")
    return lines
