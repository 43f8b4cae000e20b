"""The newest state of a job in the memory of two machines, so that a restart reads no disk: docs/recovery.md."""
