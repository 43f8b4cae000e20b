"""The top floor: YAML recipe -> typed sections -> training loop, data, metrics; the command line."""
