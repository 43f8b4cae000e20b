"""Sharding: `shard()`, the tree of sharded Cells, their programs in PyNative and under `jit`."""
