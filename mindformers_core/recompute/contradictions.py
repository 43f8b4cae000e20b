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
        given = {"full": settings.full, "select": settings.select}
        shown = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
        asked = " and ".join(f"{key} ({value})" for key, value in shown.items() if value)
        raise ValueError(
            f"recompute.exclude: {list(settings.exclude)} takes out all that is asked for by {asked}, so nothing is "
            "recomputed: exclude less, or leave recompute out"
        )


def _around(path):
    """A Cell's path and those of all Cells around it: of `a.b` also `a`, and nothing."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def check_gathers(settings, gathers, wanted, instead):
    """Raise `ValueError` where weights are to be gathered again, and none are gathered.

    That they stay (False) is true then, too, so it may be said.

    Args:
        settings: the `RecomputeSettings`.
        gathers: whether weights are gathered: level 3 of `hsdp()`.
        wanted: how one says that they should be: `"parallelism.zero_level=3"`.
        instead: what was said: `"zero_level is 2"`.
    """
    if settings.parallel_optimizer_comm_recompute and not gathers:
        raise ValueError(
            "recompute.parallel_optimizer_comm_recompute: True is about the gathered weights of "
            f"{wanted}, but {instead}: leave it out, or use {wanted}"
        )
