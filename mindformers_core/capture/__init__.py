"""Capture: a Cell tree runs once on shapes alone, and what it does is recorded as a graph that keeps its Cells."""
