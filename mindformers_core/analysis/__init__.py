"""Costs of a plan: saved tensors, peak memory, operations, traffic. Pure Python."""
