"""SGLang, administered over its own HTTP server."""
