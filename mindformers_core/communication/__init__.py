"""Process groups and differentiable collectives, with one small backend each for HCCL/NCCL, CPU and dry runs."""

from mindformers_core.communication.collectives import (
    AllGather,
    AllGatherVarying,
    AllReduce,
    AllReduceVarying,
    AllToAll,
    Broadcast,
    MarkVarying,
    PadToPartial,
    Permute,
    ReduceScatter,
    SliceToShard,
    SliceVarying,
    ToPartial,
    ToPartialVarying,
    UnmarkVarying,
)
from mindformers_core.communication.communicator import Communicator, communicator
from mindformers_core.communication.counter import CollectiveCounts, count_collectives
from mindformers_core.communication.world import World, init_distributed, read_launch, shutdown, world

__all__ = [
    "AllGather",
    "AllGatherVarying",
    "AllReduce",
    "AllReduceVarying",
    "AllToAll",
    "Broadcast",
    "CollectiveCounts",
    "Communicator",
    "MarkVarying",
    "PadToPartial",
    "Permute",
    "ReduceScatter",
    "SliceToShard",
    "SliceVarying",
    "ToPartial",
    "ToPartialVarying",
    "UnmarkVarying",
    "World",
    "communicator",
    "count_collectives",
    "init_distributed",
    "read_launch",
    "shutdown",
    "world",
]
