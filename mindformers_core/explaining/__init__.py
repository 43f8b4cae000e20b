"""Reports of a plan: as data, as text for a terminal, and as a page for a browser. Pure Python."""
