"""Families of decoders, a page each: the config, what layers are made of, and where parameters lie in files."""
