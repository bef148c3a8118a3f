"""Weight updates of a serving vLLM from safetensors files: the weight-transfer backend `disk`."""


def register() -> None:
    """Make the backend known to vLLM (entry point group `vllm.general_plugins`).

    vLLM calls this in each of its processes, and may call it twice in one. Nothing but the factory
    is imported: the backend's own module is loaded when an engine is made of it.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if "disk" not in Factory._registry:
        Factory.register_engine("disk", "chadburn_vllm.backend", "DiskWeightTransferEngine")
