"""The weight-transfer backend `disk`, as vLLM's workers hold it: one per rank.

Between two calls the model is always whole. `start_weight_update` does not take it apart, as the
backends of vLLM do: requests may run on until the weights come, and a caller who never comes back
leaves a serving engine. All that can be wrong with an order is found before the first layer is
touched; then all layers are exchanged within one call, which vLLM runs between two steps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from .checkpoint import Checkpoint, open_checkpoint
from .fitting import must_fit
from .header import Tensor
from .options import Options, read_options
from .payload import Refused, Update, read_init, read_update

logger = logging.getLogger("vllm.chadburn_vllm")

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


class PartlyUpdated(RuntimeError):
    """Loading broke off between two layers: the model has some of both. It does not crash, but what
    it generates means nothing until a full update succeeds."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            "loading broke off: keep the engine paused until a full update succeeds "
            f"({type(cause).__name__}: {cause}) (weights partly exchanged)"
        )


@dataclass
class DiskInitInfo(WeightTransferInitInfo):
    """Nothing."""


@dataclass
class DiskUpdateInfo(WeightTransferUpdateInfo):
    """`update`: as it was checked."""

    update: Update


class DiskWeightTransferEngine(WeightTransferEngine[DiskInitInfo, DiskUpdateInfo]):
    """Exchanges the whole model for a checkpoint on disk that each rank reads by itself."""

    init_info_cls = DiskInitInfo
    update_info_cls = DiskUpdateInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # An engine without a root does not start: told to the operator, not to the first caller.
        self._options: Options = read_options(self.vllm_config.additional_config, os.environ)
        self._model_tensors: Mapping[str, Tensor] | None = None
        self._received = False

    def parse_init_info(self, init_dict: dict[str, Any]) -> DiskInitInfo:
        read_init(init_dict)
        return DiskInitInfo()

    def parse_update_info(self, update_dict: dict[str, Any]) -> DiskUpdateInfo:
        return DiskUpdateInfo(read_update(update_dict))

    def init_transfer_engine(self, init_info: DiskInitInfo) -> None:  # noqa: ARG002
        """There is nobody to connect to. What the model consists of is read now rather than at the
        first update, so that an engine whose own checkpoint can't be the measure says so early."""
        self._measure()

    def start_weight_update(self) -> None:
        self._received = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: DiskUpdateInfo) -> None:
        """Raises: Refused, with the model as it was; PartlyUpdated."""
        update = update_info.update
        checkpoint = open_checkpoint(update.path, self._options.roots)
        must_fit(checkpoint.tensors, self._measure())
        if update.files is not None:
            checkpoint.verify(update.files)
        if update.check_finite:
            _must_be_finite(checkpoint)
        self._exchange(checkpoint)
        self._received = True
        logger.info("weights exchanged for those of %s", update.path)

    def finish_weight_update(self) -> None:
        if not self._received:
            logger.warning("a weight update was finished that had received no weights")

    def shutdown(self) -> None:
        """Nothing is held between two updates."""

    def _measure(self) -> Mapping[str, Tensor]:
        if self._model_tensors is None:
            path = self._options.reference or _own_checkpoint(self.model_config)
            try:
                self._model_tensors = open_checkpoint(path, None).tensors
            except Refused as refusal:
                raise Refused(
                    "the engine's own checkpoint has no safetensors to compare with "
                    f"({refusal.why}); name one of the same model in CHADBURN_VLLM_REFERENCE"
                ) from None
        return self._model_tensors

    def _exchange(self, checkpoint: Checkpoint) -> None:
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(_tensors(checkpoint))
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException as error:
            # Layers that got nothing yet lie on the meta device: the next step on them would end
            # the engine. vLLM's own way to put them back is to finish the reload.
            finalize_layerwise_reload(self.model, self.model_config)
            raise PartlyUpdated(error) from error


def _own_checkpoint(model_config: Any) -> str:
    """The folder of what the engine was started with; nothing is downloaded."""
    if os.path.isdir(model_config.model):
        return str(model_config.model)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model_config.model, revision=model_config.revision, local_files_only=True
        )
    except OSError as error:
        raise Refused(f"it is not on this machine: {error}") from None
    return str(found)


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for file in checkpoint.files:
        for name, tensor in file.tensors.items():
            if tensor.end == tensor.start:
                yield name, torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
                continue
            raw = torch.frombuffer(
                file.data, dtype=torch.uint8, count=tensor.end - tensor.start, offset=tensor.start
            )
            # Where a header's length is no multiple of eight, the bytes lie crooked for them.
            if tensor.start % raw.new_empty(0, dtype=DTYPES[tensor.dtype]).element_size():
                raw = raw.clone()
            yield name, raw.view(DTYPES[tensor.dtype]).view(tensor.shape)


def _must_be_finite(checkpoint: Checkpoint) -> None:
    for name, tensor in _tensors(checkpoint):
        if not tensor.is_floating_point():
            continue
        # The eight-bit kinds have no isfinite of their own.
        wide = tensor.float() if tensor.element_size() == 1 else tensor
        if not bool(torch.isfinite(wide).all()):
            raise Refused(f"{name} has elements that are not finite")
