"""What a plan costs: saved tensors, peak memory, operations, traffic. Pure Python."""
