"""Which pipeline rank holds which stage. Pure Python."""


def loop_ranks(stage_num, rank_num):
    """Cyclic placement: of p ranks, rank r holds the stages r, r + p, r + 2p, … (Narayanan et al. 2021).

    Raises:
        ValueError: the number of stages isn't a multiple of the number of ranks.
    """
    if stage_num % rank_num:
        raise ValueError(
            f"{stage_num} stages on {rank_num} ranks: every rank holds equally many, so it should be a multiple of "
            f"{rank_num}"
        )
    return tuple(stage % rank_num for stage in range(stage_num))


def v_ranks(stage_num, rank_num):
    """Placement in a V: of p ranks, rank r holds the stages r and 2p - 1 - r (Qi et al. 2024, the V-schedule).

    Raises:
        ValueError: the number of stages isn't twice the number of ranks.
    """
    if stage_num != 2 * rank_num:
        raise ValueError(f"{stage_num} stages on {rank_num} ranks: a V-shaped schedule has two on every rank")
    return tuple(min(stage, stage_num - 1 - stage) for stage in range(stage_num))


PLACEMENTS = {"loop": loop_ranks, "v": v_ranks}
