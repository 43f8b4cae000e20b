"""What is wrong with a pipeline table, in words; steps of a rank are numbered from 0. Pure Python."""

from mindformers_core.pipeline.tables.dependencies import message_pairs, message_steps, step_needs, step_parts
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType

__all__ = ["head_fault", "missing_fault", "overlap_fault", "rank_fault", "sequence_fault", "stuck_fault"]

_COMPUTE = frozenset((MetaStepType.FWD, MetaStepType.BWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT))
_WITH_NEXT = (MetaStepType.FWD_SEND, MetaStepType.BWD_RECV)  # the messages of a stage with the one after it
_MOST_RANKS = 4  # that a fault writes out


def head_fault(table):
    """The fault in the number of micro-batches or the stages' ranks, or None."""
    count, ranks = table.micro_batch_num, range(table.rank_num)
    if type(count) is not int or count < 1:
        return f"micro_batch_num: {count!r} should be a whole number from 1 on"
    if not table.stage_ranks:
        return "stage_ranks: there are no stages"
    for stage, rank in enumerate(table.stage_ranks):
        if type(rank) is not int or rank not in ranks:
            return f"stage_ranks: stage {stage} is on rank {rank!r}, but the table has orders of {len(ranks)} rank(s)"
    return None


def rank_fault(table, rank, kinds):
    """The first fault that shows in the order of one rank alone, or None; faults of compute steps before others.

    (Sends and receives may have been added by `lowered`, and then their faults come from those of compute steps.)

    Args:
        table: the `ScheduleTable`.
        rank: the rank.
        kinds: the types that there may be.
    """
    numbered = list(_numbered(table.orders[rank]))
    for computes_only in (True, False):
        done = {}
        for number, step in numbered:
            if computes_only and step.type not in _COMPUTE:
                continue
            fault = _place_fault(table, rank, step, kinds)
            if fault is None:
                settled = [(step.micro_index, *part) for part in step_parts(step.type, step.stage_index)]
                if settled[0] in done:
                    fault = f"that was already done by {done[settled[0]]}"
                elif not computes_only:
                    fault = _need_fault(table, rank, step, done)
                done.update(dict.fromkeys(settled, f"step {number}, {step}"))
            if fault:
                return f"step {number} of rank {rank}, {step}: {fault}"
    return None


def overlap_fault(table, rank, number, step):
    """Why the parts of an `OVERLAP` can't overlap, or None."""
    for part in step.sub_steps:
        for need in step_needs(part.type, part.stage_index, table.stage_ranks):
            for other in step.sub_steps:
                if other.micro_index == part.micro_index and need in step_parts(other.type, other.stage_index):
                    return f"step {number} of rank {rank}, {step}: {part} needs {other}, so they can't overlap"
    return None


def missing_fault(table, micro_index, place, other_end=None):
    """A step (type, stage) that isn't in the table; `other_end`: (type, stage) of the other end of its message."""
    kind, stage = place
    missing = f"rank {table.stage_ranks[stage]} has no {_names(micro_index, place)}"
    if other_end is None:
        return f"{missing}: the {kind.name} of micro-batch {micro_index} on stage {stage} is missing"
    rank, other = table.stage_ranks[other_end[1]], MetaStep(micro_index, *other_end)
    return f"{missing}, the other end of step {_number(table, rank, other)} of rank {rank}, {other}"


def sequence_fault(table, rank_messages):
    """Two ranks that have different orders of the messages between them, or None."""
    ends = [tuple(table.stage_ranks[stage] for _, stage in pair) for pair in message_pairs(table.stage_ranks)]
    sequences = {}  # (rank, other rank) -> the messages between them, as the rank orders them
    for rank, messages in enumerate(rank_messages):
        for message in messages:
            sender, taker = ends[(abs(message) - 1) // table.micro_batch_num]
            sequences.setdefault((rank, taker if message < 0 else sender), []).append(message)
    for (rank, other), sequence in sequences.items():
        for message, opposite in zip(sequence, sequences[other, rank]):
            if message != -opposite:
                own, others = (message_steps(table, each)[0] for each in (message, opposite))
                return (
                    f"ranks {rank} and {other} have different orders of the messages between them, but sends wait for "
                    f"their receives: where rank {rank} has {own} (its step {_number(table, rank, own)}), rank {other} "
                    f"has {others} (its step {_number(table, other, others)})"
                )
    return None


def stuck_fault(table, waiting):
    """The ranks that wait for ever, first those that wait for one another in a circle; or None.

    Args:
        table: the `ScheduleTable`.
        waiting: for every stuck rank the message at which it waits, with a minus if it sends it.
    """
    if not waiting:
        return None
    texts, awaited = {}, {}
    for rank, message in waiting.items():
        own, other_end = message_steps(table, message)
        awaited[rank] = table.stage_ranks[other_end.stage_index]
        texts[rank] = (
            f"stuck at step {_number(table, rank, own)}, {own}, waiting for {other_end} of rank {awaited[rank]} "
            f"(its step {_number(table, awaited[rank], other_end)})"
        )
    circle = [min(waiting)]
    while awaited[circle[-1]] not in circle:
        circle.append(awaited[circle[-1]])
    circle = circle[circle.index(awaited[circle[-1]]) :]
    behind = [rank for rank in sorted(waiting) if rank not in circle]
    text = f"deadlock: rank {circle[0]} is " + ", which is ".join(texts[rank] for rank in circle[:_MOST_RANKS])
    if len(circle) > _MOST_RANKS:
        text += f", and so on, in a circle of {len(circle)} ranks"
    return text + "".join(f"; rank {rank} is {texts[rank]}" for rank in behind[:_MOST_RANKS])


def _place_fault(table, rank, step, kinds):
    micro_index, kind, stage, _ = step
    if kind == MetaStepType.OVERLAP:
        return "the sub_steps of an OVERLAP are one or more steps of other types"
    if type(stage) is not int or not 0 <= stage < table.stage_num:
        return f"there is no stage {stage!r}; stages are 0 to {table.stage_num - 1}"
    if table.stage_ranks[stage] != rank:
        return f"stage {stage} is on rank {table.stage_ranks[stage]}"
    if type(micro_index) is not int or not 0 <= micro_index < table.micro_batch_num:
        return f"there is no micro-batch {micro_index!r}; they are 0 to {table.micro_batch_num - 1}"
    if kind not in kinds:
        return f"in a forward-only table there are {', '.join(known.name for known in kinds)}"
    other = stage + 1 if kind in _WITH_NEXT else stage - 1
    if kind in _COMPUTE or 0 <= other < table.stage_num and table.stage_ranks[other] != rank:
        return None
    if 0 <= other < table.stage_num:
        return f"stages {stage} and {other} are both on rank {rank}, which sends itself nothing"
    return f"stage {stage} is the {'last' if other > stage else 'first'}: there is nothing to send or receive"


def _need_fault(table, rank, step, done):
    for need in step_needs(step.type, step.stage_index, table.stage_ranks):
        if (step.micro_index, *need) not in done:
            names = _names(step.micro_index, need)
            for number, part in _numbered(table.orders[rank]):
                if part.micro_index == step.micro_index and need in step_parts(part.type, part.stage_index):
                    return f"it needs {part}, which comes only as step {number}"
            bare = all(part.type in _COMPUTE for order in table.orders for _, part in _numbered(order))
            hint = "; the table has no sends and receives: lowered(table) adds them" if bare else ""
            return f"it needs {names}, which rank {rank} hasn't{hint}"
    return None


def _numbered(order):
    """(number in the order, step) of all steps; those of an `OVERLAP` have its number."""
    for number, step in enumerate(order):
        for part in step.sub_steps or (step,):
            yield number, part


def _number(table, rank, wanted):
    return next(number for number, part in _numbered(table.orders[rank]) if part == wanted)


def _names(micro_index, place):
    """The texts of the steps that settle (type, stage)."""
    kind, stage = place
    kinds = (each for each in MetaStepType if each == kind or place in step_parts(each, stage))
    return " or ".join(str(MetaStep(micro_index, each, stage)) for each in kinds)
