"""Process groups of a mesh: created once, when a collective first needs them, and shared by all meshes.

The creation of a group is a call of all its members. A group is created with the first collective over its axes: its
members run the same program, so they create their groups in the same order, independently of other ranks (as those of
another pipeline stage). Nothing is created for axes of size 1, and the group of all ranks is MindSpore's own.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from mindspore import communication as ms_communication

from mindformers_core.communication.world import process_state, world
from mindformers_core.hints import first_of


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective, seen from one of them.

    Attributes:
        axes: mesh axes of size above 1, major to minor.
        ranks: the global ranks, in the order in which the axes count them.
        index: this rank's place in `ranks`.
        name: MindSpore's name of the process group; None where nothing communicates.
    """

    axes: tuple
    ranks: tuple
    index: int
    name: str | None

    @property
    def size(self):
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def places(self):
        """For every entry of `ranks` its place in the process group, which counts ranks in ascending order."""
        ascending = sorted(self.ranks)
        return tuple(ascending.index(rank) for rank in self.ranks)

    def __str__(self):
        return f"{' and '.join(self.axes)} (ranks {first_of(self.ranks)})"


def make_group(mesh, axes):
    """This rank's `Group` over `axes` of `mesh`, major to minor.

    Raises:
        ValueError: an unknown axis, one that is named twice, a mesh that this rank isn't in or that has ranks beyond
            the world.
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    mesh.check_axes(axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"a collective over axes {axes} of {mesh}: an axis is named twice")
    here = world()
    _check_mesh(mesh, here)
    axes = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
    ranks = mesh.group(here.rank, axes)
    is_local = here.backend in ("fake", "simulated") or len(ranks) == 1
    name = None if is_local else _process_group(tuple(sorted(ranks)), here)
    return Group(axes, ranks, ranks.index(here.rank), name)


def _check_mesh(mesh, here):
    needed = max(mesh.rank_list) + 1
    if needed > here.size:
        raise ValueError(
            f"mesh {mesh} has {mesh.size} ranks, up to rank {needed - 1}, but {here.size} run: "
            f"start {needed} (msrun --worker_num={needed} …), or make a mesh of {here.size}"
        )
    if here.rank not in mesh:
        raise ValueError(f"this process is rank {here.rank}, which is not in {mesh!r}: it can't communicate on it")


def _process_group(ranks, here):
    """MindSpore's name of the process group of `ranks` (ascending), which is created at the first call."""
    if len(ranks) == here.size:
        return here.group
    names = process_state().memo(__name__)
    if ranks not in names:
        name = "ranks_" + hashlib.sha1(repr(ranks).encode()).hexdigest()[:16]
        ms_communication.create_group(name, list(ranks))
        names[ranks] = name
    return names[ranks]
