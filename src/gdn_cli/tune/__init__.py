"""Which constants of a kernel are fastest: candidates, the tournament between them, and its journal."""
