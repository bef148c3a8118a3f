"""The administrative HTTP of SGLang."""
