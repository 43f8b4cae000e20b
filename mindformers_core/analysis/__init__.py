"""Costs of a plan: saved tensors, peak memory, forward time, traffic. Pure Python."""
