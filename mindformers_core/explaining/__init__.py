"""What a plan does, for people: as data, as text for a terminal, and as a page for a browser. Pure Python."""
