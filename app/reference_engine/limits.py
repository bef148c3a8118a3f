"""Settings of the engine core, and what follows from them for one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from app.reference_engine.config import ModelConfig

_DEFAULT_KV_TOKENS = 16_384
DEVICES = ("cpu", "cuda", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """``kv_blocks`` and ``max_model_len`` None: chosen for the checkpoint. Sizes in tokens,
    requests or blocks; ``step_delay_ms`` is slept after each step, 0 in earnest.

    ``tensor_parallel_size`` ranks divide the model among themselves, each a process. ``device`` is
    cpu, cuda, or auto: CUDA where each rank can have a device of its own."""

    block_size: int = 16
    kv_blocks: int | None = None
    max_model_len: int | None = None
    max_running: int = 16
    max_waiting: int = 1024
    max_batched_tokens: int = 512
    step_delay_ms: int = 0
    torch_threads: int | None = None
    tensor_parallel_size: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_running",
            "max_waiting",
            "max_batched_tokens",
            "tensor_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive")
        for name in ("kv_blocks", "max_model_len", "torch_threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be positive")
        if self.step_delay_ms < 0:
            raise ValueError("step_delay_ms must not be negative")
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}")
        if self.max_batched_tokens < self.max_running:
            raise ValueError("max_batched_tokens must not be below max_running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one rank can hold. ``max_model_len`` is prompt and output together, in tokens, and
    always fits into the pool: a request that is let in can run to its end when it is alone."""

    kv_blocks: int
    max_model_len: int


def capacity_of(settings: CoreSettings, config: ModelConfig) -> Capacity:
    """Settings applied to a checkpoint. A pool that is too small shortens the longest request.

    Without settings the cache has room for 16 384 tokens: checkpoints with contexts of 100 000 and
    more would otherwise take many gigabytes that nobody asked for.
    """
    most = config.max_position_embeddings
    wanted = min(settings.max_model_len or _DEFAULT_KV_TOKENS, most)
    blocks = settings.kv_blocks
    if blocks is None:
        blocks = -(-max(_DEFAULT_KV_TOKENS, wanted) // settings.block_size)
    return Capacity(kv_blocks=blocks, max_model_len=min(wanted, blocks * settings.block_size))
