"""Random pipeline tables, and what they do worked out in the plainest way, from the meaning of steps alone."""

from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType, overlapped
from mindformers_core.pipeline.tables.table import ScheduleTable

FWD, BWD, BWD_INPUT, BWD_WEIGHT = (
    MetaStepType.FWD,
    MetaStepType.BWD,
    MetaStepType.BWD_INPUT,
    MetaStepType.BWD_WEIGHT,
)
COMPUTE = (FWD, BWD, BWD_INPUT, BWD_WEIGHT)
PARTNERS = {  # of a send or receive: the type at the other end, and how many stages further on that is
    MetaStepType.FWD_SEND: (MetaStepType.FWD_RECV, 1),
    MetaStepType.FWD_RECV: (MetaStepType.FWD_SEND, -1),
    MetaStepType.BWD_SEND: (MetaStepType.BWD_RECV, -1),
    MetaStepType.BWD_RECV: (MetaStepType.BWD_SEND, 1),
}
SENDS = (MetaStepType.FWD_SEND, MetaStepType.BWD_SEND)


def random_stage_ranks(rng):
    """Any placement at all, with a stage on every rank."""
    rank_num = rng.randint(1, 4)
    ranks = [*range(rank_num), *(rng.randrange(rank_num) for _ in range(rng.randint(0, 4)))]
    rng.shuffle(ranks)
    return tuple(ranks)


def produced_by(micro, kind, stage, stage_num):
    """The compute steps, each with those that may take its place, which a compute step has to wait for."""
    if kind == FWD:
        return [[(micro, FWD, stage - 1)]] if stage else []
    if kind == BWD_WEIGHT:
        return [[(micro, BWD_INPUT, stage)]]
    later = [[(micro, BWD, stage + 1), (micro, BWD_INPUT, stage + 1)]] if stage + 1 < stage_num else []
    return [[(micro, FWD, stage)], *later]


def random_table(rng, overlap=0.2):
    """A table without sends and receives that can work: ready steps in a random order, some of them as `OVERLAP`s."""
    ranks, micro_batch_num = random_stage_ranks(rng), rng.randint(1, 5)
    remaining = set()
    for micro in range(micro_batch_num):
        for stage in range(len(ranks)):
            kinds = rng.choice(((FWD, BWD), (FWD, BWD_INPUT, BWD_WEIGHT)))
            remaining |= {(micro, kind, stage) for kind in kinds}
    orders, done = [[] for _ in range(max(ranks) + 1)], set()
    while remaining:
        ready = sorted(
            step
            for step in remaining
            if all(any(option in done for option in options) for options in produced_by(*step, len(ranks)))
        )
        chosen = [rng.choice(ready)]
        others = [step for step in ready if step != chosen[0] and ranks[step[2]] == ranks[chosen[0][2]]]
        if others and rng.random() < overlap:
            chosen.append(rng.choice(others))
        steps = [MetaStep(*step) for step in chosen]
        orders[ranks[chosen[0][2]]].append(steps[0] if len(steps) == 1 else overlapped(*steps))
        remaining -= set(chosen)
        done |= set(chosen)
    return ScheduleTable(tuple(map(tuple, orders)), ranks, micro_batch_num)


def parts(step):
    return step.sub_steps or (step,)


def flat(order):
    return [part for step in order for part in parts(step)]


def may_run(step, done, ranks):
    """Whether what a step needs on its own rank has been done, and the step makes sense there."""
    micro, kind, stage, _ = step
    if kind in PARTNERS:
        partner = stage + PARTNERS[kind][1]
        if not 0 <= partner < len(ranks) or ranks[partner] == ranks[stage]:
            return False
        if kind not in SENDS:
            return True
        producers = (FWD,) if kind == MetaStepType.FWD_SEND else (BWD, BWD_INPUT)
        return any((micro, maker, stage) in done for maker in producers)
    for options in produced_by(micro, kind, stage, len(ranks)):
        from_stage = options[0][2]
        if ranks[from_stage] == ranks[stage]:
            if not any(option in done for option in options):
                return False
        elif (micro, MetaStepType.FWD_RECV if kind == FWD else MetaStepType.BWD_RECV, stage) not in done:
            return False
    return True


def works(table, buffered=True):
    """Whether a training table with its sends and receives can be carried out, found by doing it one step at a time."""
    ranks, orders, done = table.stage_ranks, [flat(order) for order in table.orders], set()
    for rank, order in enumerate(orders):
        for micro, _, stage, _ in order:
            if not (0 <= stage < len(ranks) and 0 <= micro < table.micro_batch_num and ranks[stage] == rank):
                return False
    steps = {step[:3] for order in orders for step in order}
    if len(steps) != sum(map(len, orders)):
        return False
    for micro, kind, stage in steps:
        if kind in PARTNERS and (micro, PARTNERS[kind][0], stage + PARTNERS[kind][1]) not in steps:
            return False
    for micro in range(table.micro_batch_num):
        for stage in range(len(ranks)):
            kinds = {kind for kind in COMPUTE if (micro, kind, stage) in steps}
            if kinds not in ({FWD, BWD}, {FWD, BWD_INPUT, BWD_WEIGHT}):
                return False
    return _carried_out(orders, ranks, done, buffered)


def _carried_out(orders, ranks, done, buffered):
    moved = True
    while moved:
        moved = False
        for order in orders:
            if not order or not may_run(order[0], done, ranks):
                continue
            micro, kind, stage, _ = order[0]
            if kind in PARTNERS:
                other_kind, distance = PARTNERS[kind]
                other = (micro, other_kind, stage + distance)
                other_order = orders[ranks[stage + distance]]
                if buffered and kind not in SENDS and other not in done:
                    continue
                if not buffered:
                    if not other_order or other_order[0][:3] != other or not may_run(other_order[0], done, ranks):
                        continue
                    done.add(other_order.pop(0)[:3])
            done.add(order.pop(0)[:3])
            moved = True
    return not any(orders)


def naive_times(table, costs):
    """{(micro, type, stage): (start, end)} of the compute steps of a table without messages: sweeps until all is still.

    A rank takes all that the parts of an `OVERLAP` need before it, and gives away what they make after it.
    """
    ranks, times, given = table.stage_ranks, {}, {}
    before = None
    while before != times:
        before = dict(times)
        for rank, order in enumerate(table.orders):
            clock = 0
            for step in order:
                for micro, kind, stage, _ in parts(step):
                    for options in produced_by(micro, kind, stage, len(ranks)):
                        maker = next(option for option in options if option in given or option == options[-1])
                        away = ranks[maker[2]] != rank
                        clock = max(clock, given.get(maker, 0) + costs.transfer[maker[2]] if away else 0)
                for micro, kind, stage, _ in parts(step):
                    cost = {
                        FWD: costs.forward[stage],
                        BWD: costs.backward_input[stage] + costs.backward_weight[stage],
                        BWD_INPUT: costs.backward_input[stage],
                        BWD_WEIGHT: costs.backward_weight[stage],
                    }[kind]
                    times[micro, kind, stage] = (clock, clock + cost)
                    clock += cost
                given.update({part[:3]: clock for part in parts(step)})
    return times


def naive_peak_live(times, ranks, rank):
    """Most micro-batches of which a rank keeps activations, by looking at every moment at which a step starts."""
    kept = []
    for (micro, kind, stage), (start, _) in times.items():
        if kind == FWD and ranks[stage] == rank:
            ends = [times[micro, last, stage][1] for last in (BWD, BWD_WEIGHT) if (micro, last, stage) in times]
            kept.append((start, ends[0]))
    return max(sum(start <= moment < end for start, end in kept) for moment, _ in kept) / ranks.count(rank)
