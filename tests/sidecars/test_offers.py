"""What is offered of which engine, adapters and profiles, and ending requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.sidecars.allowed import Allowed
from app.sidecars.serving import CannotServe
from app.sidecars.sglang.dialect import SglangDialect
from app.sidecars.vllm.dialect import VllmDialect
from tests.doubles.dynamo_http import running_worker
from tests.doubles.vllm_http import running_vllm
from tests.enginekit.client import pb, refused, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.sidecar import Sidecar, administered, asked

from app.rpc.openengine.v1 import lifecycle_pb2, lora_pb2  # isort: skip

pytestmark = pytest.mark.anyio


def _kinds(profile: pb.AdminProfile) -> set[str]:
    names = (pb.AdminOperationKind.Name(one.kind) for one in profile.operations)
    return {name.removeprefix("ADMIN_OPERATION_KIND_").lower() for name in names}


@pytest.mark.long
async def test_without_development_mode_there_are_no_orders(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1), dev=False, adapters=False) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        assert not _kinds(await client.profile())
        one = client.generate(stopping={"max_tokens": 3})
        assert await one.finish_reason() == "LENGTH"
        assert not vllm.orders()


async def test_an_engine_with_everything(tmp_path: Path) -> None:
    allowed = Allowed(weights_roots=(tmp_path,), lora_roots=(tmp_path,))
    model = checkpoint(tmp_path / "model", 1)
    options: dict[str, Any] = {"profile_dir": tmp_path / "profiles", "elastic": True, "draft": True}
    async with (
        running_vllm(model, **options) as vllm,
        administered(vllm, tmp_path / "data", allowed=allowed) as (_, client),
    ):
        profile = await client.profile()
        assert _kinds(profile) == {
            "flush_caches", "pause", "resume", "release_resources", "restore_resources",
            "update_weights", "profile", "reconfigure_serving", "load_lora", "unload_lora",
            "abort_requests",
        }  # fmt: skip
        assert list(profile.new_requests) == [pb.NEW_REQUESTS_HOLD]
        assert set(profile.drain_rules) == {pb.DRAIN_RULE_WAIT, pb.DRAIN_RULE_ABORT}
        assert len(profile.components) == 2
        assert not vllm.orders()  # looking changed nothing
        await client.completed(client.reconfigure(data_parallel_size=2))
        assert (await client.profile()).world_size == 2
        assert vllm.model.pause_state == "open"
        again = await client.completed(client.reconfigure(data_parallel_size=2))
        assert not again.changed


@pytest.mark.long
async def test_the_key_of_the_engine(tmp_path: Path) -> None:
    key = "0123456789abcdef"
    async with running_vllm(checkpoint(tmp_path / "model", 1), api_key=key) as vllm:
        async with administered(vllm, tmp_path / "data", dialect=VllmDialect(key=key)) as (
            _,
            client,
        ):
            one = client.generate(stopping={"max_tokens": 3})
            assert await one.finish_reason() == "LENGTH"
        with pytest.raises(CannotServe, match="Unauthorized"):
            await Sidecar(vllm, tmp_path / "data").start()


@pytest.mark.long
async def test_adapters(tmp_path: Path) -> None:
    root = tmp_path / "loras"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
    allowed = Allowed(lora_roots=(root,))
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1), max_loras=1) as vllm,
        administered(vllm, tmp_path / "data", allowed=allowed) as (_, client),
    ):

        def load(name: str, path: Path) -> lora_pb2.LoadLoraRequest:
            adapter = lora_pb2.LoraAdapter(lora_name=name, source_path=str(path))
            return lora_pb2.LoadLoraRequest(adapter=adapter)

        loaded = await client.control.LoadLora(load("a", root / "a"))
        assert loaded.adapter.lora_name == "a"
        assert (await client.control.LoadLora(load("a", root / "a"))).already_loaded
        assert len(vllm.orders("/v1/load_lora_adapter")) == 1
        full = await refused(client.control.LoadLora(load("b", root / "b")))
        assert full.reason == "LORA_SLOTS_FULL"
        (root / "c").mkdir()
        (root / "c" / "adapter_config.json").symlink_to(tmp_path / "model" / "model.safetensors")
        for path in (tmp_path / "model", root / "c"):
            outside = await refused(client.control.LoadLora(load("c", path)))
            assert outside.reason == "PATH_NOT_ALLOWED"

        running = client.generate(lora_name="a", stopping={"max_tokens": 2000})
        await running.first()
        gone = lora_pb2.UnloadLoraRequest(lora_name="a")
        assert (await refused(client.control.UnloadLora(gone))).reason == "LORA_IN_USE"
        running.hang_up()
        await until(lambda: not vllm.model.requests)
        await client.control.UnloadLora(gone)
        assert not vllm.model.loras


@pytest.mark.long
async def test_a_profile_with_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1), profile_dir=folder) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        started = await client.start_profile()
        assert vllm.model.profiling
        await client.stop_profile(started.profile_id)

        async def ready() -> bool:
            return (await client.operation(operation_id=started.operation_id)).HasField("completed")

        await until(ready)
        ended = await client.operation(operation_id=started.operation_id)
        (artifact,) = ended.completed.profile.artifacts
        assert (folder / artifact.path).read_bytes() == b"trace"
        assert (artifact.rank, artifact.size_bytes) == (0, 5)


async def test_ending_requests_says_no_more_than_is_known(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        abort = client.control.Abort
        unknown = await refused(abort(lifecycle_pb2.AbortRequest(request_id="cmpl-nobody")))
        assert unknown.code.name == "NOT_FOUND"
        assert not vllm.orders("/abort_requests")

        request = await asked(vllm, "a")
        told = await abort(lifecycle_pb2.AbortRequest(request_id="cmpl-a"))
        assert told.status == lifecycle_pb2.ABORT_STATUS_UNSPECIFIED  # not verified
        assert vllm.bodies("/abort_requests") == [{"request_ids": ["cmpl-a", "cmpl-a-0"]}]
        assert await request == "abort"

        mine = client.generate(stopping={"max_tokens": 2000})
        await mine.first()
        ended = await abort(lifecycle_pb2.AbortRequest(request_id=mine.request_id))
        assert ended.status == lifecycle_pb2.ABORT_STATUS_ABORTED
        assert await mine.finish_reason() == "CANCELLED"

        mine = client.generate(stopping={"max_tokens": 2000})
        await mine.first()
        request = await asked(vllm, "b")
        every = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
        answer = await abort(every)
        assert answer.message == "2 requests aborted"
        assert await request == "abort"


@pytest.mark.long
async def test_load_and_where_events_are_told(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        request = await asked(vllm, "a")
        load = await client.load()
        assert (load.running_requests, load.used_kv_blocks, load.total_kv_blocks) == (1, 102, 1024)
        vllm.model.abort_ids([])
        await request


async def test_a_server_of_another_kind(tmp_path: Path) -> None:
    async with running_worker() as worker:
        sidecar = Sidecar(worker, tmp_path / "data", dialect=SglangDialect())
        with pytest.raises(CannotServe, match=r"no server that `sidecar sglang` is for.*404"):
            await sidecar.start()
