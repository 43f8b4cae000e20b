"""Checks that the stages of a pipeline fit together, by their descriptions. Pure Python, on plain data."""

from mindformers_core.grouping import grouped
from mindformers_core.hints import nearest
from mindformers_core.layout import layout


def check_stage_numbers(described):
    """Raise `ValueError` unless every stage of one pipeline has one description.

    Args:
        described: the descriptions of all stages (see `RankStages`), in ascending order of stages.
    """
    indices = [each["stage"] for each in described]
    numbers = sorted({each["stage_num"] for each in described})
    if len(numbers) > 1 or indices != list(range(numbers[0])):
        raise ValueError(f"these are the stages {indices} of pipelines with {numbers} stages: should be all of one")


def check_argument_names(names, described):
    """Raise `TypeError` for a keyword argument of a run that no stage takes.

    Args:
        names: the keyword arguments' names.
        described: see `check_stage_numbers`.
    """
    if any(each["takes_any"] for each in described):
        return
    known = sorted({name for each in described for name in each["takes"]})
    for name in sorted({*names} - {*known}):
        takers = "; ".join(f"stage {e['stage']} ({e['cell']}): {', '.join(e['takes'])}" for e in described)
        raise TypeError(f"no stage takes a keyword argument {name!r}{nearest(name, known)}; they take: {takers}")


def check_boundary(layouts, producer, consumer):
    """Raise `ValueError` where the layout of an output isn't that of the next stage's input.

    Stages exchange local tensors, so no redistribution takes place between them.

    Args:
        layouts: of the outputs; None for an output that isn't distributed.
        producer, consumer: the descriptions of the two stages, see `check_stage_numbers`.
    """
    for place, (given, (name, entries)) in enumerate(zip(layouts, consumer["inputs"] or ())):
        if given is None:
            continue
        entries = (tuple(entry) if isinstance(entry, list) else ... if entry == "..." else entry for entry in entries)
        wanted = layout(*entries).bind(given.mesh, given.ndim)
        if wanted.dims != given.dims:
            raise ValueError(
                f"stage {producer['stage']} ({producer['cell']}) gives output {place} as {given}, but stage "
                f"{consumer['stage']} ({consumer['cell']}) takes its input '{name}' as {wanted}: declare both alike, "
                "in the Cells' shard() or in a plan, for stages exchange local tensors"
            )


def tied_parameters(described):
    """The trained parameters of several stages: path -> `(stage, place)` of each, in ascending order of stages.

    The place is a number among the stage's trainable parameters, from 0.

    Raises:
        ValueError: a path on several stages is not in `tied` of one of them; or its parameters differ in shape, dtype,
            layout, in whether they are trained, or in values: the stages would train several ones.
    """
    holders = grouped((path, (each, kind)) for each in described for path, *kind in each["parameters"])
    tied = {}
    for path, found in sorted(holders.items()):
        if len(found) == 1:
            continue
        (first, kind), *others = found
        silent = [each for each, _ in found if path not in each["tied"]]
        if silent:
            where = " and ".join(f"stage {each['stage']} ({each['cell']})" for each, _ in found)
            raise ValueError(
                f"parameter '{path}' is on {where}: if it is one parameter, whose gradients are to be summed, say "
                f"PipelineStage(..., tied=('{path}',)) on all of them; else give its Cells paths of their own, such as "
                "the layer's number in the whole model"
            )
        for other, its in others:
            if its != kind:
                raise ValueError(
                    f"parameter '{path}' is on stage {first['stage']} ({first['cell']}), {_kind(*kind)}, and on stage "
                    f"{other['stage']} ({other['cell']}), {_kind(*its)}: a path is one parameter, so it has to be the "
                    "same on all stages; give parameters that are none another path, such as the layer's global number"
                )
        if kind[-1]:
            trained = {each["stage"]: [name for name, *_, flag in each["parameters"] if flag] for each, _ in found}
            tied[path] = [(stage, names.index(path)) for stage, names in trained.items()]
    values = {each["stage"]: each["values"] for each in described}
    for path, ((first, _), *others) in tied.items():
        for stage, _ in others:
            if values[stage][path] != values[first][path]:
                raise ValueError(
                    f"parameter '{path}' has other values on stage {stage} than on stage {first}, but a path is one "
                    "parameter: give both the same initial values (shard() and materialize() draw them from seed and "
                    "path), or, if they are to be two parameters, two paths"
                )
    return tied


def _kind(shape, dtype, dims, trained):
    placed = f", cut along its dims by {dims}" if dims and any(dims) else ""
    return f"{'trained' if trained else 'frozen'}, {dtype} of shape {tuple(shape)}{placed}"
