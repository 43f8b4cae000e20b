"""Device models: quantities with units, links by level, names and files in recipes."""

import pytest

from mindformers_core.mesh import init_device_mesh
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.redistribution import GPU
from mindformers_core.redistribution.quantities import device_model_of, named_device_model

SMALL = {
    "name": "pair", "operations_per_second": "50 GFLOP/s", "launch": "20 us",
    "link": {"latency": "3 us", "bandwidth": "196 GB/s"},
}  # fmt: skip
LARGE = SMALL | {
    "operator_launch": "5us", "memory": "64 GiB", "memory_bandwidth": "1.6 TB/s",
    "host": {"latency": "10 us", "bandwidth": "25 GB/s"},
    "levels": [{"ranks": 8, "latency": "10 us", "bandwidth": "25e9 B/s"}],
    "axes": {"tp": {"latency": "0 s", "bandwidth": "1 TB/s"}},
}  # fmt: skip


def test_quantities_have_units():
    model = device_model_of(LARGE)
    assert (model.name, model.launch, model.operator_launch) == ("pair", pytest.approx(20e-6), pytest.approx(5e-6))
    assert (model.memory, model.memory_bandwidth) == (64 * 2**30, pytest.approx(1.6e12))
    assert model.operations_per_second == pytest.approx(50e9) and model.host.bandwidth == pytest.approx(25e9)
    links = [model.link_over((axis,)) for axis in ("dp", "tp")]
    assert [link.latency for link in links] == pytest.approx([3e-6, 0])
    assert [link.bandwidth for link in links] == pytest.approx([196e9, 1e12])
    assert device_model_of(SMALL).host is None


def test_a_level_is_the_link_of_the_axes_that_reach_beyond_it():
    """Of 4 x 8 ranks dp runs between machines, tp, 8 in a row, within one, both between machines."""
    model = GPU.on_mesh(init_device_mesh((4, 8), ("dp", "tp")))
    (_, between), within = GPU.levels[0], GPU.link
    assert [model.link_over(axes) for axes in (("dp",), ("tp",), ("dp", "tp"))] == [between, within, between]
    assert GPU.with_links(dp=within).on_mesh(init_device_mesh((4, 8), ("dp", "tp"))).link_over(("dp",)) == within
    assert GPU.on_mesh(init_device_mesh((2, 4), ("dp", "tp"))) == GPU


def test_a_missing_key_is_named():
    with pytest.raises(ValueError, match="a device model lacks the key launch"):
        device_model_of({key: value for key, value in SMALL.items() if key != "launch"})


def test_a_recipe_names_a_model_or_a_file(tmp_path):
    path = tmp_path / "pair.yaml"
    path.write_text(
        "operations_per_second: 50 GFLOP/s\nlaunch: 20 us\nlink: {latency: 3 us, bandwidth: 0.1 GB/s}\n",
        encoding="utf-8",
    )
    assert named_device_model("GPU") is GPU
    assert named_device_model(str(path)).link.bandwidth == pytest.approx(1e8)
    assert load_recipe("configs/llama_tiny_cpu.yaml", [f"context.device_model={path}"]).context.device_model == str(
        path
    )
    for given, text in (
        (
            "ascend",
            "context.device_model: 'ascend' is neither a file nor one of CPU, GPU, Ascend (did you mean 'Ascend'?)",
        ),
        (f"{tmp_path}/none.yaml", "none.yaml' is neither a file nor one of CPU, GPU, Ascend"),
    ):
        with pytest.raises(ValueError) as caught:
            load_recipe("configs/llama_tiny_cpu.yaml", [f"context.device_model={given}"])
        assert text in str(caught.value)
    path.write_text("launch: [", encoding="utf-8")
    with pytest.raises(ValueError, match=r"context.device_model: .*pair.yaml: "):
        load_recipe("configs/llama_tiny_cpu.yaml", [f"context.device_model={path}"])
