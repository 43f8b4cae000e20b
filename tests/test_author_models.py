"""Models as their authors write them, cut over two axes: every tensor of every rank against one card, by `verify()`."""

from itertools import product

import pytest
from models.authors import AUTHORS
from models.example import axes_of
from support.nightly import daily

from mindformers_core import verify
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh


@pytest.mark.parametrize("name", daily([name for name in list(AUTHORS)[::10] if name != "resnet"], AUTHORS))
def test_a_batch_and_weights_are_cut(name):
    mesh, example = DeviceMesh((2, 2), ("dp", "tp")), AUTHORS[name]
    args, kwargs = example.inputs(0)
    check = verify(example.make(), mesh, *args, plan=example.plan(axes_of(mesh)), **kwargs)
    assert not check.faults, check.report()
    assert check.compared


@pytest.mark.parametrize(("name", "dim"), daily([("unet", 2)], [*product(("resnet", "unet"), (2, 3))]))
def test_an_image_is_cut(name, dim):
    mesh, example = DeviceMesh((2, 2), ("dp", "tp")), AUTHORS[name]
    (image, target), _ = example.inputs(0)
    entries = ["dp", None, "tp" if dim == 2 else None, "tp" if dim == 3 else None]
    parts = layout(*entries)
    plan = {"": {"input": (parts, parts if target.ndim == 4 else layout("dp")), "output": layout()}}
    check = verify(example.make(), mesh, image, target, plan=plan)
    assert not check.faults, check.report()
