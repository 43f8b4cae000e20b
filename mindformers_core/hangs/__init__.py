"""Hangs and desynchronised ranks: a board in shared memory, a watcher in every rank, one report for all."""
