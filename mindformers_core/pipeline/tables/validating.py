"""Checks pipeline tables: every step is there, in a possible order, without deadlock. Pure Python."""

from collections import defaultdict
from itertools import product

from mindformers_core.pipeline.tables.execution import run_orders
from mindformers_core.pipeline.tables.step import COMPUTE, FORWARD, OTHER_ENDS, MetaStep, MetaStepType, step_parts

_MOST_RANKS = 4  # number of ranks that an error describes


def validate(table, buffered=True, training=True):
    """Check that a table is complete and in a possible order, and that no rank waits for ever.

    Every micro-batch has for every stage, on the stage's rank, one FWD and one backward pass: BWD, or BWD_INPUT and
    later BWD_WEIGHT. Every step comes after the steps that it needs, on its own rank, or after the receive of their
    results; a send comes after the step that computes the message. Every message has one send and one receive; there
    are none between stages of one rank. No part of an `OVERLAP` needs another part. There is no deadlock.

    The running time is linear in the number of steps.

    Args:
        table: a lowered `ScheduleTable`.
        buffered: whether a send returns at once. Otherwise it waits for its receive, and two ranks must have the same
            order of all messages between them.
        training: False for a table of forward steps only.

    Raises:
        ValueError: the first fault, with rank, number of the step in the rank's order (from 0), and step.
    """
    check_head(table)
    kinds = tuple(MetaStepType)[:-1] if training else FORWARD
    _check_complete(table, kinds, [_check_order(table, rank, kinds) for rank in range(table.rank_num)])
    if not buffered:
        _check_message_orders(table)
    _, stuck = run_orders(table, defaultdict(float), (0.0,) * table.stage_num, buffered)
    if stuck:
        raise ValueError(_deadlock(table, stuck))


def check_head(table):
    """Raise `ValueError` for a fault in the number of micro-batches or the stages' ranks."""
    count, ranks = table.micro_batch_num, range(table.rank_num)
    if type(count) is not int or count < 1:
        raise ValueError(f"micro_batch_num: {count!r} should be a whole number from 1 on")
    if not table.stage_ranks:
        raise ValueError("stage_ranks: there are no stages")
    for stage, rank in enumerate(table.stage_ranks):
        if type(rank) is not int or rank not in ranks:
            raise ValueError(
                f"stage_ranks: stage {stage} is on rank {rank!r}, but the table has orders of {len(ranks)} rank(s)"
            )


def _check_order(table, rank, kinds):
    """Raise `ValueError` for the first fault of a compute step in one rank's order, then of any step.

    (Faults of sends and receives may be consequences: `lowered` may have added them.)

    Args:
        kinds: the types of steps that are allowed.

    Returns:
        {(micro-batch, type, stage): the step that completes it, see `step_parts`}.
    """
    micro_batches, steps = range(table.micro_batch_num), list(_numbered(table.orders[rank]))
    known = _known_steps(table, rank, kinds)
    for computes_only in (True, False):
        done = {}
        for number, step in steps:
            micro, kind, stage, _ = step
            if computes_only and kind not in COMPUTE:
                continue
            fault = None
            if (kind, stage) not in known or type(micro) is not int or micro not in micro_batches:
                fault = _place_fault(table, rank, step, kinds)
            else:
                parts, needs = known[kind, stage]
                earlier = done.get((micro, *parts[0]))
                if earlier:
                    fault = f"that was already done by step {_number(table, rank, earlier)}, {earlier}"
                for need in () if computes_only or fault else needs:
                    if (micro, *need) not in done:
                        fault = fault or _need_fault(table, rank, micro, need)
                for part in parts:
                    done[(micro, *part)] = step
            if fault:
                raise ValueError(f"step {number} of rank {rank}, {step}: {fault}")
    for number, step in enumerate(table.orders[rank]):
        clashes = ((part, other) for part in step.sub_steps for other in _needed_parts(table, part, step.sub_steps))
        for part, other in clashes:
            raise ValueError(f"step {number} of rank {rank}, {step}: {part} needs {other}, so they can't overlap")
    return done


def _known_steps(table, rank, kinds):
    """{(type, stage) of a step that the rank may have: its (`step_parts`, `ScheduleTable.needs`)}."""
    return {
        (kind, stage): (step_parts(kind, stage), table.needs(kind, stage))
        for stage, holder in enumerate(table.stage_ranks)
        for kind in kinds
        if holder == rank and (kind in COMPUTE or table.is_message(kind, stage))
    }


def _place_fault(table, rank, step, kinds):
    """The reason why a rank can't have a step."""
    micro, kind, stage, _ = step
    if kind == MetaStepType.OVERLAP:
        return "the sub_steps of an OVERLAP are one or more steps of other types"
    if type(stage) is not int or not 0 <= stage < table.stage_num:
        return f"there is no stage {stage!r}; stages are 0 to {table.stage_num - 1}"
    if table.stage_ranks[stage] != rank:
        return f"stage {stage} is on rank {table.stage_ranks[stage]}"
    if type(micro) is not int or not 0 <= micro < table.micro_batch_num:
        return f"there is no micro-batch {micro!r}; they are 0 to {table.micro_batch_num - 1}"
    if kind not in kinds:
        return f"in a forward-only table there are {', '.join(known.name for known in kinds)}"
    distance = OTHER_ENDS[kind][1]
    if table.neighbour(stage, distance) is not None:
        return f"stages {stage} and {stage + distance} are both on rank {rank}, which sends itself nothing"
    return f"stage {stage} is the {'last' if distance > 0 else 'first'}: there is nothing to send or receive"


def _need_fault(table, rank, micro, need):
    """The fault of a step that needs (type, stage): its step comes later or is missing."""
    for number, part in _numbered(table.orders[rank]):
        if part.micro_index == micro and need in step_parts(part.type, part.stage_index):
            return f"it needs {part}, which comes only as step {number}"
    bare = all(step.type in COMPUTE for step in table.steps)
    hint = "; the table has no sends and receives: lowered(table) adds them" if bare else ""
    return f"it needs {_names(micro, need)}, which rank {rank} hasn't{hint}"


def _needed_parts(table, part, parts):
    """The parts of an `OVERLAP` that a part needs."""
    needs = table.needs(part.type, part.stage_index)
    same_micro_batch = [other for other in parts if other.micro_index == part.micro_index]
    return [o for need, o in product(needs, same_micro_batch) if need in step_parts(o.type, o.stage_index)]


def _check_complete(table, kinds, done):
    """Raise `ValueError` for a missing compute step or send (`_check_order` finds missing receives)."""
    computes = (MetaStepType.FWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT)
    for kind, stage in [*((kind, stage) for kind in computes for stage in range(table.stage_num)), *table.sends()]:
        rank = table.stage_ranks[stage]
        for micro in range(table.micro_batch_num) if kind in kinds else ():
            if (micro, kind, stage) not in done[rank]:
                missing = f"rank {rank} has no {_names(micro, (kind, stage))}"
                if kind in computes:
                    raise ValueError(f"{missing}: the {kind.name} of micro-batch {micro} on stage {stage} is missing")
                other = MetaStep(micro, kind, stage).other_end
                other_rank = table.stage_ranks[other.stage_index]
                place = f"step {_number(table, other_rank, other)} of rank {other_rank}, {other}"
                raise ValueError(f"{missing}, the other end of {place}")


def _check_message_orders(table):
    """Raise `ValueError` where two ranks have different orders of the messages between them."""
    sequences = {}  # (rank, other rank) -> the sends and receives between them, as the rank orders them
    for rank, order in enumerate(table.orders):
        for _, step in _numbered(order):
            if step.type in OTHER_ENDS:
                other = table.stage_ranks[step.other_end.stage_index]
                sequences.setdefault((rank, other), []).append(step)
    for (rank, other), sequence in sequences.items():
        for own, others in zip(sequence, sequences[other, rank]):
            if own != others.other_end:
                raise ValueError(
                    f"ranks {rank} and {other} have different orders of the messages between them, but sends wait for "
                    f"their receives: where rank {rank} has {own} (its step {_number(table, rank, own)}), rank {other} "
                    f"has {others} (its step {_number(table, other, others)})"
                )


def _deadlock(table, stuck):
    """The text of a deadlock: the ranks that wait for each other in a cycle, then others; `stuck`: see `run_orders`."""
    texts, awaited = {}, {}
    for rank, place in stuck.items():
        _, own = list(_numbered(table.orders[rank]))[place]
        other = own.other_end
        awaited[rank] = table.stage_ranks[other.stage_index]
        texts[rank] = (
            f"stuck at step {_number(table, rank, own)}, {own}, waiting for {other} of rank {awaited[rank]} "
            f"(its step {_number(table, awaited[rank], other)})"
        )
    circle = [min(stuck)]
    while awaited[circle[-1]] not in circle:
        circle.append(awaited[circle[-1]])
    circle = circle[circle.index(awaited[circle[-1]]) :]
    behind = [rank for rank in sorted(stuck) if rank not in circle]
    text = f"deadlock: rank {circle[0]} is " + ", which is ".join(texts[rank] for rank in circle[:_MOST_RANKS])
    if len(circle) > _MOST_RANKS:
        text += f", and so on, in a circle of {len(circle)} ranks"
    return text + "".join(f"; rank {rank} is {texts[rank]}" for rank in behind[:_MOST_RANKS])


def _numbered(order):
    """(number in the order, step) of all steps; the parts of an `OVERLAP` have its number."""
    for number, step in enumerate(order):
        for part in step.sub_steps or (step,):
            yield number, part


def _number(table, rank, wanted):
    return next(number for number, part in _numbered(table.orders[rank]) if part == wanted)


def _names(micro, place):
    """The texts of the steps that complete (type, stage)."""
    kind, stage = place
    kinds = (each for each in MetaStepType if each == kind or place in step_parts(each, stage))
    return " or ".join(str(MetaStep(micro, each, stage)) for each in kinds)
