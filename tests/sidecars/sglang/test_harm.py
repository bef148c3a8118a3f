"""What ends an SGLang server is never sent to it. After each try it is alive, and generates."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import httpx2
import pytest

from app.conformance.tensors import misnamed, misshapen, mistyped, written
from app.rpc.openengine.v1 import lora_pb2
from tests.doubles.engine_http import After, Hang
from tests.doubles.sglang_http import running_sglang
from tests.enginekit.client import Client, client_of, pb, refused, until
from tests.sidecars.checkpoints import NAMES, adapter, checkpoint, weights
from tests.sidecars.sglang.running import Served, asked, served, trainer

pytestmark = pytest.mark.anyio

FLOAT32 = pb.TENSOR_DTYPE_FLOAT32


async def unhurt(it: Served) -> None:
    assert not it.model.dead
    with suppress(AssertionError):
        if await it.client.admission() == "paused":
            await it.client.completed(it.client.resume((await it.client.profile()).pause_epoch))
    assert await it.generates()


def inline(
    *tensors: tuple[str, tuple[int, ...], bytes], dtype: pb.TensorDtype.ValueType = FLOAT32
) -> pb.TensorWeights:
    return pb.TensorWeights(
        inline=pb.InlineWeights(
            tensors=[
                pb.InlineTensor(spec=pb.TensorSpec(name=n, dtype=dtype, shape=s), data=data)
                for n, s, data in tensors
            ]
        )
    )


# ---- the double does end of them ----


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/resume_memory_occupation", {}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/update_weights_from_disk", {"model_path": "corrupt"}),
        ("/update_weights_from_disk", {"model_path": "misshapen"}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["Z2FyYmFnZQ=="]}),
        ("/init_weights_update_group", {"master_address": "127.0.0.1", "master_port": 1,
                                        "rank_offset": 1, "world_size": 2, "group_name": ""}),
    ],
)  # fmt: skip
async def test_what_ends_the_server(tmp_path: Path, path: str, body: dict[str, object]) -> None:
    for name, content in (("corrupt", b"x" * 64), ("misshapen", written(misshapen(weights(2))))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    if "model_path" in body:
        body = {"model_path": str(tmp_path / str(body["model_path"]))}
    async with (
        running_sglang(checkpoint(tmp_path / "model", 1)) as sglang,
        httpx2.AsyncClient(base_url=sglang.url, trust_env=False) as http,
    ):
        await http.post("/begin_weight_update", json={})
        with pytest.raises(httpx2.TransportError):
            await http.post(path, json=body)
        await until(lambda: sglang.model.dead)


# ---- memory ----


async def test_a_restore_of_what_is_not_away(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        client = it.client
        await client.completed(client.release("kv_cache", content="discard"))
        epoch = (await client.profile()).release_epoch
        unchanged = await client.completed(client.restore("weights", epoch=epoch))
        assert not unchanged.changed
        await client.completed(client.restore("kv_cache", "weights", epoch=epoch))
        assert it.sglang.bodies("/resume_memory_occupation") == [{"tags": ["kv_cache"]}]
        again = await client.completed(client.restore("kv_cache", epoch=epoch))
        assert not again.changed
        assert len(it.sglang.orders("/resume_memory_occupation")) == 1
        await unhurt(it)


async def test_a_release_while_something_runs(tmp_path: Path) -> None:
    """Frozen in place it would end the server: it is put back into the queue first."""
    async with served(tmp_path, backup=True) as it:
        client = it.client
        request = await asked(it.sglang, "a")
        await client.completed(client.pause("keep"))
        failed = await client.failed(client.release("weights", content="discard"))
        assert failed.reason == "REQUESTS_FROZEN"
        await client.completed(client.release("weights"))
        assert [one["mode"] for one in it.sglang.bodies("/pause_generation")] == [
            "in_place",
            "retract",
        ]
        epoch = (await client.profile()).release_epoch
        await client.completed(client.restore("weights", epoch=epoch))
        await client.completed(client.resume((await client.profile()).pause_epoch))
        it.model.abort("a")
        assert await request == "abort"
        await unhurt(it)


async def test_a_release_that_got_no_answer(tmp_path: Path) -> None:
    """Whether it is away nobody knows: neither call may be sent any more."""
    async with served(tmp_path) as it:
        client = it.client
        it.sglang.next("/release_memory_occupation", After(200, {"not": "null"}))
        order = client.release("kv_cache", content="discard", deadline_ms=5_000)
        failed = await client.failed(order)
        assert failed.reason == "WRONG_ANSWER"
        sent = len(it.sglang.orders())
        profile = await client.profile()
        assert list(profile.state.released) == [pb.RESOURCE_KIND_KV_CACHE]
        for more in (
            client.restore("kv_cache", epoch=profile.release_epoch),
            client.release("weights", content="discard"),
        ):
            await client.failed(more)
        assert await refused(client.stream(client.resume(profile.pause_epoch)))
        assert not {"/resume_memory_occupation", "/continue_generation"} & set(
            it.sglang.orders()[sent:]
        )
        assert not it.model.dead


@pytest.mark.long
async def test_a_release_outlives_the_sidecar(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.client.completed(it.client.release("kv_cache", content="discard"))
        await it.sidecar.stop()
        await it.sidecar.start()
        async with client_of(it.sidecar) as client:
            profile = await client.profile()
            assert list(profile.state.released) == [pb.RESOURCE_KIND_KV_CACHE]
            await client.completed(client.restore("kv_cache", epoch=profile.release_epoch))
            await client.completed(client.resume((await client.profile()).pause_epoch))
        assert not it.model.dead


# ---- weights from files ----


async def test_files_that_do_not_fit(tmp_path: Path) -> None:
    good = weights(2)
    whole = written(good)
    bad = {
        "misnamed": written(misnamed(good)),
        "misshapen": written(misshapen(good)),
        "mistyped": written(mistyped(good)),
        "lacking": written(good[1:]),
        "truncated": whole[:-3],
        "corrupt": b"x" * 200,
        "empty": b"",
    }
    async with served(tmp_path) as it:
        for name, content in bad.items():
            folder = it.root / name
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(content)
            disk = pb.DiskWeights(path=str(folder))
            failed = await it.client.failed(it.client.update("v2", pause="abort", disk=disk))
            assert (failed.reason, failed.effect) == ("WEIGHTS_UNFIT", pb.FAILURE_EFFECT_NONE), name
        file = pb.DiskWeights(path=f"{it.disk.path}/model.safetensors")
        hub = pb.DiskWeights(path="org/model")
        for disk in (file, hub, pb.DiskWeights(path="/etc")):
            failed = await it.client.failed(it.client.update("v2", pause="abort", disk=disk))
            assert failed.reason == "PATH_NOT_ALLOWED"
        assert not it.sglang.orders("/update_weights_from_disk")
        await unhurt(it)


@pytest.mark.long
async def test_files_that_were_changed_meanwhile(tmp_path: Path) -> None:
    """Looked at again just before they are sent."""
    async with served(tmp_path) as it:
        file = Path(it.disk.path) / "model.safetensors"
        request = await asked(it.sglang, "a")
        observing = await it.client.begin(it.client.update("v2", pause="drain", disk=it.disk))
        await until(_draining(it.client))
        file.write_bytes(written(misshapen(weights(2))))
        it.model.abort("a")
        await request
        assert (await observing.end()).failed.reason == "WEIGHTS_UNFIT"
        assert not it.sglang.orders("/update_weights_from_disk")
        await unhurt(it)


def _draining(client: Client) -> Callable[[], Awaitable[bool]]:
    async def looks() -> bool:
        return await client.admission() == "draining"

    return looks


@pytest.mark.long
async def test_nothing_is_sent_blindly(tmp_path: Path) -> None:
    """A model whose files are not seen here is not updated, unless they are named."""
    async with served(tmp_path) as it:
        it.model.path = "org/model"
        await it.sidecar.stop()
        (it.sidecar.settings.kit.data_dir / "engine.json").unlink()
        await it.sidecar.start()
        async with client_of(it.sidecar) as client:
            assert not (await client.profile()).weight_sources
            refusal = await refused(client.stream(client.update("v2", disk=it.disk)))
            assert refusal.reason == "UNSUPPORTED_OPERATION"


# ---- weights as tensors ----


async def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    name = NAMES[0]
    async with served(tmp_path) as it:
        client = it.client
        for tensors in (
            inline((name, (4,), b"\0" * 16)),
            inline(("nobody", (2, 2), b"\0" * 16)),
            inline((name, (2, 2), b"\0" * 16), (NAMES[1], (3,), b"\0" * 12)),
            inline((name, (2, 2), b"\0" * 16), dtype=pb.TENSOR_DTYPE_INT32),
            inline((name, (16,), b"\0" * 16), dtype=pb.TENSOR_DTYPE_FLOAT8_E4M3FN),
        ):
            failed = await client.failed(client.update("v2", pause="abort", tensors=tensors))
            assert (failed.reason, failed.effect) == ("WEIGHTS_UNFIT", pb.FAILURE_EFFECT_NONE)
        assert not it.sglang.orders("/begin_weight_update", "/update_weights_from_tensor")
        await unhurt(it)


async def test_tensors_reach_the_engine_once(tmp_path: Path) -> None:
    """A retry of the order attaches to it, also when the answer to the call was lost; and what is
    sent is never what a trainer's process has to keep alive."""
    async with served(tmp_path) as it:
        client = it.client
        order = client.update("v2", pause="abort", tensors=inline((NAMES[0], (2, 2), b"\1" * 16)))
        first = await client.completed(order)
        again = await client.completed(order)
        assert first == again
        assert it.sglang.orders("/begin_weight_update", "/update_weights_from_tensor",
                                "/end_weight_update") == [
            "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update",
        ]  # fmt: skip
        assert it.model.version == "v2"
        before = dict(it.model.sums)
        it.sglang.next("/update_weights_from_tensor", Hang())
        order = client.update(
            "v3", pause="abort", deadline_ms=1_500,
            tensors=inline((NAMES[0], (2, 2), b"\2" * 16)),
        )  # fmt: skip
        assert (await client.failed(order)).effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        await client.failed(order)
        assert len(it.sglang.orders("/update_weights_from_tensor")) == 2
        assert it.model.sums != before  # it had been taken
        assert (await client.profile()).state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
        # The way back: a whole update, though one is still open.
        await client.completed(client.update("v4", disk=it.disk))
        assert not it.model.dead


@pytest.mark.long
async def test_tensors_in_shared_memory(tmp_path: Path) -> None:
    name = f"chadburn-test-{uuid4().hex}"
    segment = Path("/dev/shm") / name
    spec = pb.TensorSpec(name=NAMES[1], dtype=FLOAT32, shape=[2, 2])
    shared = pb.SharedMemoryTensor(spec=spec, offset_bytes=16, length_bytes=16)

    def memory(**fields: object) -> pb.TensorWeights:
        known = {"object_name": name, "size_bytes": 32, "tensors": [shared], **fields}
        return pb.TensorWeights(shared_memory=pb.SharedMemoryWeights(**known))  # type: ignore[arg-type]

    try:
        segment.write_bytes(b"\0" * 16 + b"\3" * 16)
        async with served(tmp_path) as it:
            client = it.client
            await client.completed(client.update("v2", pause="abort", tensors=memory()))
            assert it.model.version == "v2"
            for wrong in (
                memory(object_name="passwd"),
                memory(size_bytes=64),
                memory(sha256=bytes(32)),
                memory(object_name=f"{name}-x"),
            ):
                failed = await client.failed(client.update("v3", pause="abort", tensors=wrong))
                assert failed.reason == "WEIGHTS_UNFIT"
            await unhurt(it)
    finally:
        segment.unlink(missing_ok=True)


# ---- groups ----


def group(port: int, **fields: object) -> pb.DistributedWeights:
    known: dict[str, object] = {
        "backend": pb.COLLECTIVE_BACKEND_GLOO, "address": "127.0.0.1", "port": port,
        "world_size": 2, "rank_offset": 1, "group": "g",
        "tensors": [pb.TensorSpec(name=NAMES[0], dtype=FLOAT32, shape=[2, 2])], **fields,
    }  # fmt: skip
    return pb.DistributedWeights(**known)  # type: ignore[arg-type]


async def test_a_group_that_ends_the_server_or_holds_it_for_good(tmp_path: Path) -> None:
    async with served(tmp_path) as it, trainer(it.sglang) as port:
        client = it.client
        for way, reason in (
            (group(port, group=""), "TRANSFER_NOT_OFFERED"),
            (group(port, rank_offset=0, source_rank=1), "TRANSFER_NOT_OFFERED"),
            (group(port, world_size=3, source_rank=2), "TRANSFER_NOT_OFFERED"),
            (group(port, address="10.0.0.1"), "RENDEZVOUS_NOT_ALLOWED"),
            (group(1), "TRAINER_NOT_THERE"),
        ):
            order = client.update("v2", pause="abort", distributed=way, deadline_ms=2_500)
            failed = await client.failed(order)
            assert (failed.reason, failed.effect) == (reason, pb.FAILURE_EFFECT_NONE), reason
        misfit = pb.TensorSpec(name=NAMES[0], dtype=FLOAT32, shape=[3])
        order = client.update("v2", pause="abort", distributed=group(port, tensors=[misfit]))
        assert (await client.failed(order)).reason == "WEIGHTS_UNFIT"
        assert not it.sglang.orders("/init_weights_update_group")
        await unhurt(it)


async def test_a_trainer_that_listens_and_never_joins(tmp_path: Path) -> None:
    """Nothing at the server ends that: it is told as what it is, and no order is sent into it."""
    async with served(tmp_path) as it, trainer(it.sglang) as port:
        client = it.client
        it.model.members.clear()
        order = client.update("v2", pause="abort", distributed=group(port), deadline_ms=1_500)
        failed = await client.failed(order)
        assert failed.reason in ("GROUP_NOT_COMPLETE", "DEADLINE_EXCEEDED", "ROLLBACK_FAILED")

        async def lost() -> bool:
            return bool((await client.profile()).state.ranks)

        await until(lost, 20)
        ranks = (await client.profile()).state.ranks
        assert ranks[0].message == "the engine's scheduler does not answer"
        sent = len(it.sglang.orders())
        await client.failed(client.flush())
        assert it.sglang.orders()[sent:] == []


@pytest.mark.long
async def test_a_broadcast_and_what_is_left_of_it(tmp_path: Path) -> None:
    async with served(tmp_path) as it, trainer(it.sglang) as port:
        client = it.client
        order = client.update("v2", pause="abort", distributed=group(port))
        completed = await client.completed(order)
        assert len(completed.update_weights.evidence) == 1
        assert it.sglang.orders(
            "/init_weights_update_group", "/begin_weight_update",
            "/update_weights_from_distributed", "/end_weight_update", "/update_weight_version",
            "/destroy_weights_update_group",
        ) == [
            "/destroy_weights_update_group",  # of a life of the sidecar that was killed in it
            "/init_weights_update_group", "/begin_weight_update",
            "/update_weights_from_distributed", "/end_weight_update", "/update_weight_version",
            "/destroy_weights_update_group",
        ]  # fmt: skip
        assert it.sglang.bodies("/update_weights_from_distributed")[0]["dtypes"] == ["float32"]
        assert it.sglang.bodies("/update_weight_version") == [
            {"new_version": "v2", "abort_all_requests": False}
        ]
        assert not it.model.groups
        await client.completed(client.update("v3", pause="abort", distributed=group(port)))
        await unhurt(it)


# ---- profiles and adapters ----


async def test_a_profile_that_cannot_be_written(tmp_path: Path) -> None:
    """Told to stop, the server would end over it."""
    async with served(tmp_path) as it:
        client, folder = it.client, tmp_path / "profiles"
        folder.rmdir()
        refusal = await refused(client.start_profile())
        assert refusal.reason == "PROFILE_FOLDER_UNWRITABLE"
        assert not it.sglang.orders("/start_profile")
        folder.mkdir()
        started = await client.start_profile()
        made = next(folder.iterdir())
        assert os.stat(made).st_mode & 0o777 == 0o777
        made.rmdir()  # by whoever tidies up
        await client.stop_profile(started.profile_id)

        async def ready() -> bool:
            found = await client.operation(operation_id=started.operation_id)
            return bool(found.state == pb.ADMIN_OPERATION_STATE_SUCCEEDED)

        await until(ready)
        ended = await client.operation(operation_id=started.operation_id)
        (artifact,) = ended.completed.profile.artifacts
        assert (folder / artifact.path).read_bytes() == b"trace"
        await unhurt(it)


def _load(name: str, path: Path) -> lora_pb2.LoadLoraRequest:
    adapter = lora_pb2.LoraAdapter(lora_name=name, source_path=str(path))
    return lora_pb2.LoadLoraRequest(adapter=adapter)


async def test_adapters_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    async with served(tmp_path, model={"slots": 1}) as it:
        control = it.client.control
        (it.root / "empty").mkdir()
        (it.root / "garbage").mkdir()
        (it.root / "garbage" / "adapter_model.safetensors").write_bytes(b"x" * 50)
        (adapter(it.root / "two") / "more.safetensors").write_bytes(b"x" * 50)
        wrong = [
            adapter(it.root / "wide", A=(8, 3)),
            adapter(it.root / "high", B=(3, 8)),
            adapter(it.root / "low", A=(4, 2), B=(2, 4)),
            adapter(it.root / "real", config={"r": 8.0}),
            adapter(it.root / "elsewhere", config={"target_modules": ["q_proj"]}),
            adapter(it.root / "nan", config={"lora_alpha": float("nan")}),
        ]
        for name, path in (("", it.adapter), ("x:y", it.adapter), ("tiny", it.adapter),
                           ("a", it.root / "empty"), ("a", it.root / "garbage"),
                           ("a", tmp_path), ("a", it.root / "two"),
                           *(("a", folder) for folder in wrong)):  # fmt: skip
            assert await refused(control.LoadLora(_load(name, path)))
        assert not it.sglang.orders("/load_lora_adapter")
        await control.LoadLora(_load("a", it.adapter))
        refusal = await refused(control.LoadLora(_load("b", it.adapter)))
        assert refusal.reason == "LORA_SLOTS_FULL"
        assert list(it.model.loras) == ["a"]
        # Unloaded, it does not come back by a request.
        await control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="a"))
        one = it.client.generate(lora_name="a", stopping={"max_tokens": 2})
        assert (await one.refused()).code.name == "NOT_FOUND"
        assert not it.model.loras
        await unhurt(it)
