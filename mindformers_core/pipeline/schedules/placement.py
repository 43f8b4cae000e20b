"""Which pipeline rank holds which stage. Pure Python."""

__all__ = ["PLACEMENTS", "loop_ranks", "v_ranks"]


def loop_ranks(stage_num, rank_num):
    """Stages go round the ranks: rank r holds r, r + p, r + 2p, … (Narayanan et al. 2021).

    Raises:
        ValueError: not equally many stages on every rank.
    """
    if stage_num % rank_num:
        raise ValueError(
            f"{stage_num} stages on {rank_num} ranks: every rank holds equally many, so it should be a multiple of "
            f"{rank_num}"
        )
    return tuple(stage % rank_num for stage in range(stage_num))


def v_ranks(stage_num, rank_num):
    """Stages go to the last rank and back: rank r holds r and 2p - 1 - r (Qi et al. 2024, the V-schedule).

    Raises:
        ValueError: other than two stages on every rank.
    """
    if stage_num != 2 * rank_num:
        raise ValueError(f"{stage_num} stages on {rank_num} ranks: a V-shaped schedule has two on every rank")
    return tuple(min(stage, stage_num - 1 - stage) for stage in range(stage_num))


PLACEMENTS = {"loop": loop_ranks, "v": v_ranks}
