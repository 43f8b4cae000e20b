"""Capture: a Cell tree runs once on shapes alone, and what it does is written down as a graph that keeps its Cells."""

from mindformers_core.tensor_parallel.capturing.capture import capture
from mindformers_core.tensor_parallel.capturing.graph import CellGraph, structure_key

__all__ = ["CellGraph", "capture", "structure_key"]
