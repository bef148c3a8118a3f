"""LoadLora, UnloadLora and ListLoras of the core service: orders without keys or events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from app.domain.capabilities import Capabilities
from app.domain.commands import LoadLora, UnloadLora
from app.domain.errors import UnsupportedOperation
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Actor, Operation
from app.enginekit.desk import OrderDesk
from app.enginekit.refusals import OrderDidNotSucceed
from app.enginekit.requests import refuse_unknown_fields
from app.enginekit.state import EngineState
from app.rpc.openengine.v1 import lora_pb2


class AdapterCalls:
    """The same load while one runs is that one; any other order of the engine's is refused until
    it has ended."""

    def __init__(
        self, desk: OrderDesk, state: EngineState, capabilities: Callable[[], Capabilities]
    ) -> None:
        self._desk = desk
        self._state = state
        self._capabilities = capabilities

    async def load(
        self, request: lora_pb2.LoadLoraRequest, actor: Actor
    ) -> lora_pb2.LoadLoraResponse:
        self._check_offered(OperationKind.LOAD_LORA)
        refuse_unknown_fields(request)
        wanted = request.adapter
        command = LoadLora(name=wanted.lora_name, path=wanted.source_path, id=wanted.lora_id)
        result = _result(await self._desk.carry(command, actor))
        return lora_pb2.LoadLoraResponse(
            adapter=_adapter(result), already_loaded=not result["changed"]
        )

    async def unload(
        self, request: lora_pb2.UnloadLoraRequest, actor: Actor
    ) -> lora_pb2.UnloadLoraResponse:
        self._check_offered(OperationKind.UNLOAD_LORA)
        refuse_unknown_fields(request)
        command = UnloadLora(name=request.lora_name)
        result = _result(await self._desk.carry(command, actor))
        return lora_pb2.UnloadLoraResponse(adapter=_adapter(result))

    async def list(self) -> lora_pb2.ListLorasResponse:
        self._check_offered(OperationKind.LOAD_LORA)
        await self._state.refresh()
        return lora_pb2.ListLorasResponse(
            adapters=[
                lora_pb2.LoraAdapter(lora_id=lora.id, lora_name=lora.name, source_path=lora.path)
                for lora in self._state.observation.loras
            ]
        )

    def _check_offered(self, kind: OperationKind) -> None:
        if kind not in self._capabilities().operations:
            raise UnsupportedOperation("this engine does not offer adapters")


def _result(operation: Operation) -> dict[str, Any]:
    if operation.state is not OperationState.SUCCEEDED:
        raise OrderDidNotSucceed(operation)
    return cast("dict[str, Any]", operation.result)


def _adapter(result: dict[str, Any]) -> lora_pb2.LoraAdapter:
    lora = result["lora"]
    return lora_pb2.LoraAdapter(
        lora_id=lora["id"], lora_name=lora["name"], source_path=lora["path"]
    )
