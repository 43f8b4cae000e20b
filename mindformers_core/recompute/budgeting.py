"""What is computed again of a program under a budget: the choice of `budget.py` with all that it is made of."""

from functools import cache

from mindformers_core.analysis.operations import operations
from mindformers_core.capture.algorithm_steps import algorithm_steps
from mindformers_core.program.links import links_of
from mindformers_core.program.places import operators_in_order
from mindformers_core.recompute.algorithms import algorithm_of
from mindformers_core.recompute.budget import choose
from mindformers_core.recompute.choosing import kept_in_any_case
from mindformers_core.recompute.explained import bytes_not_kept
from mindformers_core.recompute.prediction import Prediction

__all__ = ["choice_within"]


def choice_within(
    settings, frame, path="", boundaries=(), lenient=False, swapped=frozenset(), arguments_need=True, is_part=False
):
    """The `Choice` of a program.

    Args:
        settings: the `RecomputeSettings`, with a budget.
        frame: the `FramePlan` of the program.
        path: of the Cell whose call it is.
        boundaries: paths of Cells whose results are kept in any case.
        lenient: whether patterns may be for what isn't in this program.
        swapped: keys of instructions whose results wait on the host: they aren't chosen, and their bytes count.
        arguments_need: as for `saved_activations`.
        is_part: whether the program is one of a stage.

    Raises:
        ValueError: nothing needs so little, see `choose`; or a pattern of `exclude` that matches nothing.
    """
    algorithm, places = cache(algorithm_of), {place.key: place for place in operators_in_order(frame)}
    steps, prediction = cache(algorithm_steps), Prediction(frame, algorithm, arguments_need)

    def not_kept(dropped):
        again = prediction.recomputed(dropped)
        return bytes_not_kept(links_of(frame), again, prediction.saved(), prediction.saved(dropped))

    return choose(
        frame,
        settings.budget,
        prediction.saved_bytes,
        prediction.recomputed,
        not_kept,
        lambda key: operations(places[key], steps),
        keep=kept_in_any_case(settings, frame, algorithm, path, boundaries, lenient) | swapped,
        is_part=is_part,
    )
