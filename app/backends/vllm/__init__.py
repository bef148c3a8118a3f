"""vLLM's own gRPC service, `vllm.Control`, spoken to one or several data-parallel members."""
