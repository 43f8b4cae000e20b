"""Devices: the cost of a collective along each mesh axis (the alpha-beta model), and of computation. Pure Python."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from mindformers_core.redistribution.steps import CARRIED, COLLECTIVES, STEP_KINDS


@dataclass(frozen=True)
class Link:
    """The way between neighbours along a mesh axis: `latency` in s a hop, `bandwidth` in bytes/s, one way."""

    latency: float
    bandwidth: float

    def __post_init__(self):
        if not self.latency >= 0 or not self.bandwidth > 0:
            raise ValueError(f"{self}: latency is at least 0 seconds, bandwidth more than 0 bytes a second")


@dataclass(frozen=True)
class DeviceModel:
    """Seconds of a collective: `launch + hops * latency + bytes on the wire / bandwidth`, and of an operator:
    `operator_launch + max(operations / operations_per_second, bytes of memory / memory_bandwidth)`.

    Hops and bytes are those that the backend declares (`steps.CARRIED`). A group over several axes runs at the
    highest latency and the lowest bandwidth among them. The roofline is that of Williams, Waterman, Patterson (2009).

    Attributes:
        name: name of the device.
        operations_per_second: floating-point operations of a matrix product, in the dtype that models train in.
        launch: seconds that any collective takes, however small its group: starting it, and meeting the others.
        link: the `Link` along axes that neither `levels` nor `axis_links` speak of.
        axis_links: pairs `(axis, Link)`; see `with_links`.
        levels: pairs `(ranks, Link)` by ascending numbers: groups that reach beyond so many consecutive ranks (those
            of a machine, say) run over this link; see `on_mesh`. Default: none, all ranks are alike.
        host: the `Link` between a device and the memory of its host. Default: none.
        memory: bytes of a device's memory. Default: any number.
        memory_bandwidth: bytes that a device reads or writes in a second. Default: any number.
        operator_launch: seconds that any operator takes, however small. Default: 0.
        backend: which one carries the collectives, a key of `CARRIED`: `"native"` (HCCL, NCCL) or `"cpu"`, in
            PyNative; `"native graph"` or `"cpu graph"`, under `@ms.jit`. Default: `"native"`.
    """

    name: str
    operations_per_second: float
    launch: float
    link: Link
    axis_links: tuple = ()
    levels: tuple = ()
    host: Link | None = None
    memory: float = inf
    memory_bandwidth: float = inf
    operator_launch: float = 0.0
    backend: str = "native"

    def __post_init__(self):
        for name in ("operations_per_second", "memory", "memory_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"device model '{self.name}': {name} is {getattr(self, name)!r}: more than 0")
        for name in ("launch", "operator_launch"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"device model '{self.name}': {name} is {getattr(self, name)!r}: at least 0 seconds")

        if self.backend not in CARRIED:
            raise ValueError(f"device model '{self.name}': backend {self.backend!r} is none of {', '.join(CARRIED)}")

    def with_links(self, **links):
        """This model with another `Link` for the axes named: `GPU.with_links(dp=Link(5e-6, 25e9))`."""
        for axis, link in links.items():
            if not isinstance(link, Link):
                raise TypeError(f"axis '{axis}' of device model '{self.name}': {link!r} is no Link(latency, bandwidth)")
        return replace(self, axis_links=tuple(sorted((dict(self.axis_links) | links).items())))

    @lru_cache(maxsize=4096)  # noqa: B019  (a frozen value, of which there are few)
    def on_mesh(self, mesh):
        """This model with the `Link` of its level for each axis of a `DeviceMesh` that has none of its own yet."""
        groups = {axis: mesh.group(mesh.rank_list[0], (axis,)) for axis in mesh.axis_names}
        reach = {axis: max(ranks) - min(ranks) + 1 for axis, ranks in groups.items()}
        links = {axis: link for axis in groups for size, link in self.levels if reach[axis] > size}
        return self.with_links(**(links | dict(self.axis_links))) if links else self

    def link_over(self, axes):
        """The `Link` that a group over `axes` runs at: the slowest of each figure."""
        known = dict(self.axis_links)
        links = [known.get(axis, self.link) for axis in axes]
        return Link(max(link.latency for link in links), min(link.bandwidth for link in links))

    def seconds(self, name, axes, group_size, whole):
        """Seconds of collective `name` over `axes`; `whole`: bytes of the larger of a rank's input and output."""
        fixed, per_byte = _rates(self, name, axes, group_size)
        return fixed + per_byte * whole

    def computation(self, operations, nbytes):
        """Seconds of an operator with so many floating-point operations, which reads and writes so many bytes."""
        return self.operator_launch + max(operations / self.operations_per_second, nbytes / self.memory_bandwidth)

    def step_rates(self, kind, op, axes, group_size):
        """The cost of step `kind`, forward and backward together: `(seconds, seconds a byte)`."""
        forward, backward = (_rates(self, name, axes, group_size) for name in STEP_KINDS[kind].runs(op))
        return forward[0] + backward[0], forward[1] + backward[1]


@lru_cache(maxsize=4096)
def _rates(model, name, axes, group_size):
    """Fixed seconds, and seconds for every byte of the whole tensor, of collective `name`."""
    if name not in COLLECTIVES:
        return 0.0, 0.0
    hops, share = CARRIED[model.backend][name]
    link = model.link_over(axes)
    return model.launch + hops(group_size) * link.latency, share(group_size) / group_size / link.bandwidth


# Ascend 910B, 354 TFLOP/s of bfloat16, 64 GB of HBM at 1.6 TB/s, 8 cards fully connected by HCCS: 7 links of 56 GB/s,
# both ways together; 200 Gbit/s of RoCE a card between machines, PCIe 4.0 to the host. Launches and latencies are
# planning figures, of the order of HCCL's small collectives.
ASCEND = DeviceModel(
    "Ascend", 354e12, 20e-6, Link(3e-6, 196e9), levels=((8, Link(10e-6, 25e9)),), host=Link(10e-6, 25e9),
    memory=64e9, memory_bandwidth=1.6e12, operator_launch=5e-6,
)  # fmt: skip

# A100, 312 TFLOP/s of bfloat16, 80 GB of HBM at 2 TB/s, over NVLink: 600 GB/s, both ways together; 200 Gbit/s of
# InfiniBand a card between machines of 8, PCIe 4.0 to the host. Launch and latencies are those that NCCL's own tuning
# table (src/graph/tuning.cc) gives for rings: 8.4 us, and 3.4 us a hop over NVLink, 14 us between machines.
GPU = DeviceModel(
    "GPU", 312e12, 8.4e-6, Link(3.4e-6, 300e9), levels=((8, Link(14e-6, 25e9)),), host=Link(10e-6, 25e9),
    memory=80e9, memory_bandwidth=2e12, operator_launch=4e-6,
)  # fmt: skip

# MindSpore's MCCL with blocking launches, 2 ranks on 2 cores, measured: an all-reduce of 4 KB takes 0.4 ms, of 1 MB
# 2.8 ms, of 4 MB 10.6 ms; a float32 product of 1536 x 1536 runs at 50 GFLOP/s of one core, an addition of 64 MB
# runs at 20 GB/s, one of 4 numbers takes 30 us.
CPU = DeviceModel(
    "CPU", 50e9, 0.3e-3, Link(0.05e-3, 0.4e9), host=Link(0.0, 20e9), memory=16e9, memory_bandwidth=20e9,
    operator_launch=30e-6, backend="cpu",
)  # fmt: skip
NAMED = {model.name: model for model in (CPU, GPU, ASCEND)}
