"""Comparisons of what ranks hold alike: replicated weights and their moments, and results that are declared whole."""

from zlib import crc32

import numpy as np

from mindformers_core.capture.open_call import contents_of
from mindformers_core.communication import world
from mindformers_core.communication.messages import check_equal, gather_values
from mindformers_core.communication.tensor_bytes import as_bytes

_PRECISION = 1e-3  # relative difference up to which results of ranks that sum in another order are equal


def check_replicas(cells, optimizer=None):
    """Raise `ValueError` where ranks have other values of a Parameter, or of its optimizer state, that they hold alike.

    Call it every so many steps, between two of them; all ranks call it. A rank reads its tensors once, and sends a
    digest; nothing is summed. A Parameter is compared along the mesh axes that don't shard it.

    Args:
        cells: a Cell after `shard()` or `hsdp()`, or a list of those of pipeline stages.
        optimizer: its state is compared where its names end with those of Parameters, as of `mindspore.nn.Optimizer`.

    Raises:
        ValueError: on the ranks that differ from each other: names Parameter, axes and ranks.
    """
    if world().backend == "fake":
        return
    cells = cells if isinstance(cells, (tuple, list)) else (cells,)
    held = [(path, p, p) for cell in cells for path, p in cell.parameters_and_names() if getattr(p, "persistent", True)]
    placed = {parameter.name: parameter for _, parameter, _ in held}
    for state in () if optimizer is None else optimizer.get_parameters():
        segments = state.name.split(".")
        of = [placed.get(".".join(segments[start:])) for start in range(1, len(segments))]
        held += [(state.name, state, each) for each in of if each is not None and each.shape == state.shape][:1]
    groups = {}
    for name, tensor, parameter in held:
        layout = getattr(parameter, "layout", None)
        if layout is not None and (axes := replicated_axes(layout)):
            what = f"the checksum of '{name}', which lies as {layout}, so alike along {', '.join(axes)},"
            groups.setdefault((layout.mesh, axes), {})[what] = f"{crc32(as_bytes(tensor)):08x}"
    for (mesh, axes), facts in groups.items():
        check_equal(
            mesh.sub_mesh(axes, world().rank), facts, "these ranks compute with different weights: look for a step "
            "that differs among them, as a norm of a rank's part, a gradient that isn't summed, data or a seed"
        )  # fmt: skip


def replicated_axes(layout):
    """The mesh axes along which ranks hold equal values of a tensor, if the layout is right."""
    mesh, placed = layout.mesh, layout.placed_axes
    return tuple(axis for axis in mesh.axis_names if axis not in placed and mesh.axis_size(axis) > 1)


def check_result(tensor, layout, what):
    """Raise `ValueError` where a local tensor isn't the same on the ranks that hold it alike; these ranks call this."""
    axes, rank = replicated_axes(layout), world().rank
    if not axes:
        return
    values = contents_of(tensor).reshape(-1)
    values = np.abs(values) if values.dtype.kind == "c" else values
    weighted = values * np.random.default_rng(0).uniform(0.5, 1.5, values.size)
    mesh = layout.mesh.sub_mesh(axes, rank)
    found = gather_values(mesh, [float(weighted.sum()), float(np.abs(weighted).sum())])
    for other, (total, scale) in sorted(found.items()):
        if abs(total - found[rank][0]) > _PRECISION * max(scale, found[rank][1]):
            raise ValueError(
                f"{what}, of local shape {tuple(tensor.shape)}, is declared as {layout}, the same along "
                f"{', '.join(axes)}, but rank {rank} has other values than rank {other}: if ranks have terms of a sum, "
                "declare it partial, Layout.on(mesh, dims, {axis: 'sum'}), or all-reduce it; if they have parts, say so"
            )
