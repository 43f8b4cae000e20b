"""Propagation: layouts for all tensors of a captured Cell tree from those declared for a few. Pure Python."""
