"""How far ranks get that exchange the messages of a pipeline table, and when. Pure Python."""

__all__ = ["exchanged", "met"]


def exchanged(rank_messages, rank_works, delays, micro_batch_num):
    """Let ranks exchange messages by buffered sends: a send never waits.

    Args:
        rank_messages: for every rank the messages that it takes, and with a minus those that it sends, in order
            (numbers of `message_bases`). 0 stands for something that is no message.
        rank_works: for every rank and each of these the time that the rank works for it, before it sends or waits.
        delays: for every pair of `message_pairs` the time that a message is on its way.
        micro_batch_num: number of micro-batches.

    Returns:
        `(arrivals, waiting)`: by message the time of its arrival, None if it was never sent; and for every rank that
        can't go on {rank: the message that it waits for}.
    """
    arrivals = [0.0] + [None] * (len(delays) * micro_batch_num)
    clocks = [0.0] * len(rank_messages)
    remaining = [zip(messages, works) for messages, works in zip(rank_messages, rank_works)]
    waiting, runnable = {}, list(range(len(rank_messages)))
    while runnable:
        rank = runnable.pop()
        clock = clocks[rank]
        for message, work in remaining[rank]:
            clock += work
            if message < 0:
                arrival = clock + delays[(-message - 1) // micro_batch_num]
                arrivals[-message] = arrival
                if -message in waiting:
                    taker = waiting.pop(-message)
                    clocks[taker] = max(clocks[taker], arrival)
                    runnable.append(taker)
            elif arrivals[message] is None:
                clocks[rank], waiting[message] = clock, rank
                break
            elif arrivals[message] > clock:
                clock = arrivals[message]
    return arrivals, {rank: message for message, rank in waiting.items()}


def met(rank_messages):
    """Let ranks exchange messages by sends that wait until they are taken (rendezvous).

    Args:
        rank_messages: as for `exchanged`.

    Returns:
        For every rank that can't go on {rank: the message at which it waits, with a minus if it sends it}.
    """
    remaining = [iter(messages) for messages in rank_messages]
    waiting, runnable = {}, list(range(len(rank_messages)))
    while runnable:
        rank = runnable.pop()
        for message in remaining[rank]:
            if -message not in waiting:
                waiting[message] = rank
                break
            runnable.append(waiting.pop(-message))
    return {rank: message for message, rank in waiting.items()}
