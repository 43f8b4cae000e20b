"""Process groups and differentiable collectives, with one small backend each for HCCL/NCCL, CPU and dry runs."""

from mindformers_core.communication import collectives
from mindformers_core.communication.collectives import *  # noqa: F403  (its `__all__`)
from mindformers_core.communication.communicator import Communicator, communicator
from mindformers_core.communication.counter import CollectiveCounts, count_collectives
from mindformers_core.communication.point_to_point import Channel, channel
from mindformers_core.communication.world import World, init_distributed, process_state, read_launch, shutdown, world

__all__ = [
    *collectives.__all__, "Channel", "CollectiveCounts", "Communicator", "World", "channel", "communicator",
    "count_collectives", "init_distributed", "process_state", "read_launch", "shutdown", "world",
]  # fmt: skip
