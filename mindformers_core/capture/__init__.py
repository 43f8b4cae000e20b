"""Capture: a Cell tree runs once on shapes alone, and its operators are recorded as a graph for every Cell."""
