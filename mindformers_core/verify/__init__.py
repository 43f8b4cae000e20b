"""Verification of generated programs: the choices of a plan at small sizes."""
