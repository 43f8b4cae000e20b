"""Models as their authors write them, cut over two axes: every tensor of every rank against one card, by `verify()`."""

import pytest
from models.authors import AUTHORS
from models.example import axes_of

from mindformers_core import verify
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh

NIGHTLY = ("resnet", 3), ("unet", 2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (place % 2)) for place, name in enumerate(AUTHORS)]
)
def test_a_batch_and_weights_are_cut(name):
    mesh, example = DeviceMesh((2, 2), ("dp", "tp")), AUTHORS[name]
    args, kwargs = example.inputs(0)
    check = verify(example.make(), mesh, *args, plan=example.plan(axes_of(mesh)), **kwargs)
    assert not check.faults, check.report()
    assert check.compared


@pytest.mark.parametrize(
    ("name", "dim"),
    [("resnet", 2), ("unet", 3), *(pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHTLY)],
)
def test_an_image_is_cut(name, dim):
    mesh, example = DeviceMesh((2, 2), ("dp", "tp")), AUTHORS[name]
    (image, target), _ = example.inputs(0)
    entries = ["dp", None, "tp" if dim == 2 else None, "tp" if dim == 3 else None]
    parts = layout(*entries)
    plan = {"": {"input": (parts, parts if target.ndim == 4 else layout("dp")), "output": layout()}}
    check = verify(example.make(), mesh, image, target, plan=plan)
    assert not check.faults, check.report()
