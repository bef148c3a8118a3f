"""Ways to reach an engine."""
