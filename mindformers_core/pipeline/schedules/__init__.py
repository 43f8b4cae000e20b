"""The built-in pipeline schedules, one file each, and the base classes for one's own. Pure Python."""
