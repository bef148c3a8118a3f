"""Chadburn: the engine-order telegraph for LLM inference engines."""

__version__ = "0.1.0"
