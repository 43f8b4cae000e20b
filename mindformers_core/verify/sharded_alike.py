"""Settings of `hsdp()` for small sizes, under which the same parameters are sharded along the same dims.

The same parameters share buckets, too, as far as one limit for all buckets of a kind can say it.
"""

import re

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.zero.apply import plan_buckets
from mindformers_core.zero.buckets import KINDS, Fusion

__all__ = ["fusion_alike", "sharding_difference", "threshold_alike"]


def threshold_alike(pairs):
    """The KB for `hsdp(threshold=…)` that separates small parameters as the large ones are separated.

    Args:
        pairs: pairs (`ParameterPlan` of the large one, `ParameterPlan` of the small one).

    Raises:
        ValueError: no threshold does.
    """
    below = [small for large, small in pairs if "threshold" in large.reason]
    most = max(below, key=lambda plan: plan.nbytes, default=None)
    above = [small for large, small in pairs if large.dim is not None or large.reason.startswith("no dim")]
    least = min(above, key=lambda plan: plan.nbytes, default=None)
    if most is None:
        return 0
    if least is not None and least.nbytes <= most.nbytes:
        raise ValueError(f"'{least.path}' isn't larger than '{most.path}', which hsdp() doesn't shard")
    return most.nbytes / 1024


def sharding_difference(pairs):
    """None, or a sentence on the first parameter that `hsdp()` shards in another way; arguments as `threshold_alike`."""
    for large, small in pairs:
        one, other = (
            (plan.dim, plan.dtype, plan.shard_dtype, plan.trainable, *(_wordless(t) for t in (plan.unit, plan.reason)))
            for plan in (large, small)
        )
        if one != other:
            shown = [f"along dim {plan.dim}" if plan.dim is not None else plan.reason for plan in (large, small)]
            return f"hsdp() shards '{large.path}' {shown[0]} at the recipe's sizes, and {shown[1]} at small sizes"
    return None


def _wordless(text):
    """A text without its numbers."""
    return re.sub(r"\[.*?\]|[\d.]+(e[+-]?\d+)?", "#", text)


def fusion_alike(stages):
    """The `comm_fusion` for small parameters: units have several buckets, and buckets several members, where they had.

    Args:
        stages: for every stage `(HsdpSettings, buckets of the large storage, pairs, numbers)`; `pairs` as of
            `threshold_alike`, the small plans sharded already; `numbers` are those of the large ones in their storage.

    Returns:
        A dict, kind of collective -> MB.
    """
    return {kind: max(_limits(kind, stages), key=lambda limit: _likeness(kind, limit, stages)) for kind in KINDS}


def _limits(kind, stages):
    """MB at which some bucket could be full."""
    sums = {0}
    for _, _, pairs, _ in stages:
        plans = [small for _, small in pairs]
        for start in range(len(plans)):
            total = 0
            for plan in plans[start:]:
                if plan.unit != plans[start].unit:
                    break
                total += plan.size * ITEM_BYTES[plan.dtype]
                sums.add(total)
    return sorted(nbytes / 2**20 for nbytes in sums)


def _likeness(kind, limit, stages):
    """`(units that have several buckets and members alike, units with the same buckets)`."""
    alike = same = 0
    for settings, buckets, pairs, numbers in stages:
        gathers, reduces = plan_buckets([small for _, small in pairs], settings, dict.fromkeys(KINDS, Fusion(limit)))
        places = {number: place for place, number in enumerate(numbers)}
        theirs, ours = {}, {}
        for bucket in buckets:
            members = tuple(places[number] for number in bucket.members if number in places)
            if bucket.kind == kind and members:
                theirs.setdefault(pairs[members[0]][1].unit, []).append((members, len(bucket.members)))
        for bucket in (*gathers, *reduces):
            if bucket.kind == kind:
                ours.setdefault(bucket.unit, []).append((bucket.members, len(bucket.members)))
        for unit, found in theirs.items():
            mine = ours.get(unit, [])
            kinds = [(len(each) > 1, max((count for _, count in each), default=0) > 1) for each in (found, mine)]
            alike += kinds[0] == kinds[1]
            same += found == mine
    return alike, same
