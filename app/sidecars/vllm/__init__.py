"""vLLM, over the HTTP endpoints of its own server."""
