"""A sidecar that administers a TensorRT-LLM server over its own HTTP endpoints."""
