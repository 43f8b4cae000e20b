"""Settings of which one takes back what another one asks for, or that are about nothing. Pure Python."""

__all__ = ["check_gathers", "check_something_left"]


def check_something_left(settings, full, names, cells, selected, excluded):
    """Raise `ValueError` where `exclude` takes out all that `full` and `select` choose.

    Args:
        settings: the `RecomputeSettings`.
        full: paths of the layers that are recomputed wholly.
        names, cells: see `select`.
        selected, excluded: the `Selection`s of the two keys.
    """
    if not settings.exclude:
        return
    paths = dict(cells)

    def keys(selection, layers=()):
        within, operators = {*layers, *(paths[key] for key in selection.cells)}, {*selection.operators}
        found = (name for name in names if name.place.key in operators or not within.isdisjoint(_around(name.path)))
        return {name.place.key for name in found}

    chosen = keys(selected, full)
    if chosen and chosen <= keys(excluded):
        given = {"full": settings.full, "select": list(settings.select)}
        asked = " and ".join(f"{key} ({value})" for key, value in given.items() if value)
        raise ValueError(
            f"recompute.exclude: {list(settings.exclude)} takes out all that is asked for by {asked}, so nothing is "
            "recomputed: exclude less, or leave recompute out"
        )


def _around(path):
    """A Cell's path and those of all Cells around it: of `a.b` also `a`, and nothing."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def check_gathers(settings, sharding):
    """Raise `ValueError` where weights that are gathered are spoken of, and none are.

    Args:
        settings: the `RecomputeSettings`.
        sharding: the `HsdpSettings` of the tree, or None.
    """
    given, level = settings.parallel_optimizer_comm_recompute, sharding and sharding.level
    if given is not None and level != "level3":
        instead = f"optimizer_level is '{level}'" if level else "hsdp() wasn't called"
        raise ValueError(
            f"recompute.parallel_optimizer_comm_recompute: {given} is about the gathered weights of "
            f"hsdp(optimizer_level='level3'), but {instead}: leave it out, or use that level"
        )
