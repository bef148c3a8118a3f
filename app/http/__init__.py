"""The REST edge: routes, their shapes, event streams and problems."""
