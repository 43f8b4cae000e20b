"""Every number of a recipe has a range, and what is out of it is told in a line, at once."""

import dataclasses
import time
import types
import typing

import pytest
from test_recipe import TINY

from mindformers_core.ranges import bounded
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import MESH_AXES, Recipe, mesh_shape

# checked by functions of their own, since they have several forms
OF_SEVERAL_FORMS = {
    "parallelism.comm_fusion": "parallelism.comm_fusion={}",
    "recompute.full": "recompute.full=[{}]",
    "recompute.budget": "recompute.budget={}",
    "swap.default_prefetch": "swap.default_prefetch={}",
}


def scalars(hint):
    """The plain types in a type hint."""
    arguments = [] if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)
    return set().union(*map(scalars, arguments)) if arguments else {hint}


def numeric_keys():
    """`(path, field)` of every key that takes a number."""
    for section, kind in typing.get_type_hints(Recipe).items():
        if not dataclasses.is_dataclass(kind):
            continue
        hints = typing.get_type_hints(kind)
        for entry in dataclasses.fields(kind):
            if scalars(hints[entry.name]) & {int, float} and entry.init:
                yield f"{section}.{entry.name}", entry, typing.get_origin(hints[entry.name]) is tuple


KEYS = list(numeric_keys())
SPELLED = {
    path: f"{path}=[0.5, {{}}]" if path.endswith("betas") else f"{path}=[{{}}]" for path, _, several in KEYS if several
}
ABSURD = ["1" + "0" * 12, "-1" + "0" * 12, "1" + "0" * 399, "-1" + "0" * 399, "1" + "0" * 5000, ".inf", "-.inf", ".nan"]
BIG_BUT_ALLOWED = {"parallelism.zero_threshold_kb": ABSURD[:1], "train_dataset.max_bytes": ABSURD[:1],
                   "training.max_norm": ABSURD[:1], "model.rope_theta": ABSURD[:1]}  # fmt: skip


def test_every_number_has_a_range():
    assert len(KEYS) > 35
    without = {path for path, entry, _ in KEYS if not {"at_least", "above"} & set(entry.metadata)}
    without |= {path for path, entry, _ in KEYS if not {"at_most", "below"} & set(entry.metadata)}
    assert {path for path in without if not path.startswith(("swap.layer", "swap.op"))} == set(OF_SEVERAL_FORMS)
    with pytest.raises(AssertionError):
        bounded(1, at_least=0)


@pytest.mark.parametrize("path", [path for path, _, _ in KEYS if not path.startswith(("swap.layer", "swap.op"))])
def test_absurd_numbers_are_told_at_once(path):
    spelled = OF_SEVERAL_FORMS.get(path) or SPELLED.get(path, f"{path}={{}}")
    for number in ABSURD:
        if number in BIG_BUT_ALLOWED.get(path, ()):
            continue
        began = time.process_time()
        with pytest.raises((TypeError, ValueError)) as found:
            load_recipe(TINY, [spelled.format(number)])
        told = str(found.value)
        assert path in told and "\n" not in told and len(told) < 600, told
        assert time.process_time() - began < 1


def test_all_sizes_together():
    sizes = types.SimpleNamespace(
        pipeline_parallel=1024, data_parallel_replicate=1, context_parallel=1, tensor_parallel=8, data_parallel_shard=64
    )
    with pytest.raises(ValueError, match="need 524288 ranks altogether: at most 131072 are possible"):
        mesh_shape(types.SimpleNamespace(parallelism=sizes))
    assert len(MESH_AXES) == 4
