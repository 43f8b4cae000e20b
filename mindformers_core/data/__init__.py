"""Data: tokens of files, and datasets of users, as sequences by index."""
