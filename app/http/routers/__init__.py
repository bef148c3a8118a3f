"""Routes by noun. A handler parses, calls and renders; what it needs stands in its signature."""
