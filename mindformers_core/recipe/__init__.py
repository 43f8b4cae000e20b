"""Recipes: typed sections, read from YAML and checked, and what follows from them."""
