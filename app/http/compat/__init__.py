"""Engines' own administrative HTTP, for clients that speak nothing else: a base URL is all that
changes for them. What they order goes through the same use cases as every other order."""
