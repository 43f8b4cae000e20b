"""`DeviceMesh.split_axis`."""

import pytest

from mindformers_core.mesh import init_device_mesh


def test_an_axis_is_split_into_several():
    """Ranks stay where they are; a group over the new axes together is that over the old one."""
    mesh = init_device_mesh((8, 2), ("dp", "tp"))
    split = mesh.split_axis("dp", dp_replicate=2, dp_shard=4)
    assert (split.shape, split.axis_names) == ((2, 4, 2), ("dp_replicate", "dp_shard", "tp"))
    for rank in range(16):
        assert split.group(rank, ("dp_replicate", "dp_shard")) == mesh.group(rank, ("dp",))
        assert split.coordinate(rank, ("tp",)) == mesh.coordinate(rank, ("tp",))
        replica, shard = split.coordinate(rank, ("dp_replicate", "dp_shard"))
        assert mesh.coordinate(rank, ("dp",)) == (4 * replica + shard,)
    with pytest.raises(ValueError, match=r"split_axis\('dp'\): a 3 x b 2 is not the axis's size 8 in \(dp=8, tp=2\)"):
        mesh.split_axis("dp", a=3, b=2)
    with pytest.raises(ValueError, match="mesh axis 'tp' is named twice"):
        mesh.split_axis("dp", tp=4, b=2)
    with pytest.raises(ValueError, match=r"unknown mesh axis 'ep'.*did you mean"):
        mesh.split_axis("ep", a=4, b=2)
