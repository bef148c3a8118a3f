"""The REST edge: parse, call, render."""
