"""A captured program and its plan: graph, structures, names, instructions, partitions. Pure Python."""
