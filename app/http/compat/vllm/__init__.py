"""The administrative HTTP of vLLM."""
