"""The main job on a running demo: orders over HTTP, carried out by an engine that generates."""

from __future__ import annotations

import asyncio

import pytest

from app.inference_client import FinishReason, GenerationRefused
from tests.e2e.conftest import Bridge
from tests.e2e.driving import WAIT_S, Heard, admin, sequences, server_sent

pytestmark = pytest.mark.anyio

# Several blocks of the KV cache long.
PROMPT = "the captain orders the helm hard to port and the pilot repeats the order, " * 4


class TestDrain:
    async def test_what_runs_ends_whole_and_what_comes_waits(self, bridge: Bridge) -> None:
        running = await bridge.talk("the bridge rings", max_tokens=150).begun()
        answer = await bridge.order("pause", {"mode": "drain"})
        assert answer.status_code == 202, answer.text
        operation = answer.json()
        assert operation["state"] in {"accepted", "running"}
        assert not running.is_over  # it said so long before the drain was over
        assert answer.headers["location"].endswith(f"/v1/operations/{operation['id']}")
        assert "monitor" in answer.headers["link"]

        heard = await bridge.gateway.hear(operation["id"])
        types = [event.type for event in heard if event.id is not None]
        assert (types[0], types[-1]) == ("accepted", "completed")
        assert "progress" in types
        assert sequences(event.data for event in heard if event.id) == list(
            range(1, len(types) + 1)
        )
        await running.over()
        assert running.finished is not None
        assert running.finished.reason is FinishReason.LENGTH
        assert running.finished.completion_tokens == 150

        ended = await bridge.gateway.ended(operation["id"])
        assert ended["state"] == "succeeded"
        assert ended["result"]["changed"] is True
        assert ended["result"]["requests_finished"] == 1

        held = bridge.talk("full ahead", max_tokens=5)
        await asyncio.sleep(0.5)
        assert held.pieces == []
        epoch = ended["result"]["pause_epoch"]
        await bridge.does("resume", {"pause_epoch": epoch})
        await held.over()
        assert held.finished is not None
        assert held.finished.completion_tokens == 5

    async def test_requests_can_be_turned_back_instead(self, bridge: Bridge) -> None:
        await bridge.does("pause", {"mode": "drain", "new_requests": "refuse"})
        turned_back = await bridge.talk("full ahead", max_tokens=5).over()
        assert isinstance(turned_back.error, GenerationRefused)

    async def test_a_second_pause_that_changes_nothing_says_so(self, bridge: Bridge) -> None:
        first = await bridge.does("pause", {"mode": "drain"})
        second = await bridge.does("pause", {"mode": "drain"})
        assert (first["result"]["changed"], second["result"]["changed"]) == (True, False)
        assert first["result"]["pause_epoch"] == second["result"]["pause_epoch"]
        assert first["revision"] == second["revision"]

    async def test_everybody_hears_of_it_on_the_fleets_stream(self, bridge: Bridge) -> None:
        heard: list[Heard] = []
        begun = asyncio.Event()

        async def listen() -> None:
            async with bridge.gateway.stream("/v1/events") as response:
                async for event in server_sent(response.aiter_lines()):
                    heard.append(event)
                    begun.set()
                    if event.type == "completed":
                        return

        listening = asyncio.create_task(listen())
        await asyncio.wait_for(begun.wait(), WAIT_S)
        operation = await bridge.accepted("pause", {"mode": "drain"})
        await asyncio.wait_for(listening, WAIT_S)
        assert heard[0].type == "snapshot"
        ours = [event for event in heard[1:] if event.data["operation"] == operation["id"]]
        assert sequences(event.data for event in ours) == list(range(1, len(ours) + 1))


class TestOneKey:
    async def test_fifty_calls_are_one_order(self, bridge: Bridge) -> None:
        address, token = bridge.ready["admin_address"], bridge.ready["tokens"]["engine"]
        async with admin(address, token) as engine:
            before = await engine.profile()
            body = {"mode": "drain"}
            answers = await asyncio.gather(
                *(bridge.order("pause", body, key="fifty") for _ in range(50))
            )
            assert {answer.status_code for answer in answers} <= {200, 202}
            ids = {answer.json()["id"] for answer in answers}
            assert len(ids) == 1
            operation = await bridge.gateway.ended(ids.pop())
            assert operation["state"] == "succeeded"

            after = await engine.profile()
            assert after.revision == before.revision + 1
            assert after.pause_epoch == before.pause_epoch + 1
            # The gateway's operation id is the key at the engine, never the caller's.
            known = await engine.operation(operation["id"])
            assert known.completed.pause.pause_epoch == after.pause_epoch
            assert after.state.pause.idempotency_key == operation["id"]

        other = await bridge.order("pause", {"mode": "abort"}, key="fifty")
        assert (other.status_code, other.json()["reason"]) == (409, "IDEMPOTENCY_KEY_REUSED")
        assert other.json()["operation"] == operation["id"]

    async def test_no_key_is_no_order(self, bridge: Bridge) -> None:
        path = f"/v1/engines/{bridge.engine}/pause"
        answer = await bridge.gateway.client.post(path, json={"mode": "drain"})
        assert answer.status_code == 400
        assert answer.json()["reason"] == "IDEMPOTENCY_KEY_MISSING"


class TestStale:
    async def test_nothing_stale_reaches_the_engine(self, bridge: Bridge) -> None:
        paused = await bridge.does("pause", {"mode": "drain"})
        epoch, revision = paused["result"]["pause_epoch"], paused["revision"]
        address, token = bridge.ready["admin_address"], bridge.ready["tokens"]["engine"]
        async with admin(address, token) as engine:
            before = await engine.profile()
            resume = {"pause_epoch": epoch}
            stale = {"if-match": f'"r{revision - 1}"'}
            refusals = [
                await bridge.order("resume", {"pause_epoch": epoch - 1}),
                await bridge.order("resume", {"pause_epoch": epoch + 1}),
                await bridge.order("resume", resume | {"expected_revision": revision - 1}),
                await bridge.order("resume", resume, **stale),
            ]
            after = await engine.profile()
        found = [(answer.status_code, answer.json()["reason"]) for answer in refusals]
        assert found == [
            (409, "STALE_PAUSE_EPOCH"),
            (409, "STALE_PAUSE_EPOCH"),
            (409, "REVISION_MISMATCH"),
            (412, "REVISION_MISMATCH"),
        ]
        assert after == before
        fresh = await bridge.accepted("resume", resume, **{"if-match": f'"r{revision}"'})
        assert (await bridge.gateway.ended(fresh["id"]))["state"] == "succeeded"


class TestKeep:
    async def test_the_text_is_as_if_there_had_been_no_pause(self, bridge: Bridge) -> None:
        wanted = {"max_tokens": 250, "temperature": 0.9, "seed": 7}
        await bridge.does("flush-caches", {"caches": ["prefix"]})
        undisturbed = await bridge.talk(PROMPT, **wanted).over()
        await bridge.does("flush-caches", {"caches": ["prefix"]})
        frozen = await bridge.talk(PROMPT, **wanted).begun(10)
        pause = await bridge.does("pause", {"mode": "keep"})
        assert pause["result"]["requests_kept"] == 1
        said = frozen.text
        assert not frozen.is_over
        await asyncio.sleep(0.5)
        assert frozen.text == said  # frozen indeed
        resumed = await bridge.does("resume", {"pause_epoch": pause["result"]["pause_epoch"]})
        assert resumed["result"]["requests_continued"] == 1
        await frozen.over()
        assert frozen.finished is not None
        assert frozen.text == undisturbed.text
        assert len(undisturbed.text) > len(said) > 0


class TestFlush:
    async def test_cached_prompt_tokens_are_gone(self, bridge: Bridge) -> None:
        async def cached() -> int | None:
            said = await bridge.talk(PROMPT, max_tokens=2).over()
            assert said.finished is not None
            return said.finished.cached_prompt_tokens

        await cached()
        assert await cached()
        flushed = await bridge.does("flush-caches", {"caches": ["prefix"]})
        (prefix,) = flushed["result"]["caches"]
        assert prefix["kind"] == "prefix"
        assert prefix["blocks_freed"] > 0
        assert await cached() == 0
        assert await cached()


class TestCacheEvents:
    async def test_where_they_are_to_be_had(self, bridge: Bridge) -> None:
        answer = await bridge.gateway.client.get(f"/v1/engines/{bridge.engine}/kv-event-sources")
        assert answer.status_code == 200, answer.text
        (source,) = answer.json()["items"]
        assert (source["transport"], source["data_parallel_rank"]) == ("grpc", 0)
        assert source["buffer_steps"] > 0


class TestAbort:
    async def test_a_pause_can_end_what_runs_and_says_why(self, bridge: Bridge) -> None:
        running = await bridge.talk("the bridge rings", max_tokens=2000).begun()
        pause = await bridge.does("pause", {"mode": "abort"})
        assert pause["result"]["requests_aborted"] == 1
        await running.over()
        assert (running.finished and running.finished.message) or running.error
        said = running.finished.message if running.finished else str(running.error)
        assert "paused" in said

    async def test_one_request_is_ended_and_its_neighbour_is_not(self, bridge: Bridge) -> None:
        one = await bridge.talk("the bridge rings", max_tokens=2000, request_id="one").begun()
        other = await bridge.talk("full ahead", max_tokens=40, request_id="other").begun()
        ended = await bridge.does("abort-requests", {"request_ids": ["one", "nobody"]})
        outcomes = {item["request_id"]: item["outcome"] for item in ended["result"]["requests"]}
        assert outcomes == {"one": "aborted", "nobody": "not_found"}
        await one.over()
        await other.over()
        assert other.finished is not None
        assert other.finished.completion_tokens == 40
