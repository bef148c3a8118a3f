"""What is done with the plant, and what has to be so afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.e2e.driving import Gateway, Heard, Json, admin, server_sent, talk
from tests.topology.load import Load, Watch, gaps
from tests.topology.plant import DISCOVERY, Plant

Say = Callable[[str], None]


@dataclass
class Course:
    plant: Plant
    say: Say
    engines: list[str]
    gateway: Gateway = field(init=False)
    """Through the proxy."""
    load: Load = field(init=False)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.gateway = self.plant.through_the_proxy()
        self.load = Load(self.gateway)
        self.watch = Watch(self.plant.through_the_proxy())

    async def close(self) -> None:
        for one in (self.gateway, self.watch.gateway):
            await one.client.aclose()

    # ---- steps ----

    async def engines_are_found(self) -> None:
        """They are on the list, and nobody registered them."""
        for name in self.engines:
            engine = await self.gateway.until(
                "/v1/engines?page_size=100",
                lambda page, name=name: any(  # type: ignore[misc]
                    one["id"] == name and one["health"]["state"] == "serving"
                    for one in page["items"]
                ),
            )
            (one,) = (each for each in engine["items"] if each["id"] == name)
            assert one["labels"] == {"rack": "a", DISCOVERY: "file"}, one["labels"]
        audit = await self.gateway.get("/v1/audit?action=register_engine")
        who = Counter((one["principal"] or {}).get("subject") for one in audit["items"])
        assert who == {"discovery:file": len(self.engines)}, who
        self.say(f"engines found by the list, registered once each by two gateways: {self.engines}")

    async def one_key_is_one_order(self) -> None:
        """Given to each gateway by itself, and through the proxy."""
        first, second = self.plant.directly(0), self.plant.directly(1)
        try:
            body = {"caches": ["prefix"], "when_busy": "queue"}
            answers = []
            for gateway in (first, second, self.gateway, second, first):
                answer = await gateway.order(self.engines[0], "flush-caches", body, key="one-key")
                assert answer.status_code in (200, 202), answer.text
                answers.append(answer.json()["id"])
            assert len(set(answers)) == 1, answers
            other = {**body, "reason": "another"}
            reused = await second.order(self.engines[0], "flush-caches", other, key="one-key")
            assert reused.json()["reason"] == "IDEMPOTENCY_KEY_REUSED", reused.text
            self.load.taken[answers[0]] = self.engines[0]
            await self.load.ended(answers[0])
        finally:
            for gateway in (first, second):
                await gateway.client.aclose()
        self.say("one key, sent five times to two gateways: one operation; another body: 409")

    async def a_stream_comes_as_it_happens(self) -> None:
        """An operation's events come through the proxy while it runs: what is held back there would
        come with its end."""
        name = self.engines[0]
        generation = await talk(
            self.plant.ready[name]["inference_address"],
            self.plant.ready["tokens"]["inference"],
            "the bridge rings",
            max_tokens=150,
        ).begun()
        operation = await self.load.order(name, "pause", {"mode": "drain"})
        before: list[str] = []
        async with self.gateway.stream(f"/v1/operations/{operation}/events") as response:
            assert response.status_code == 200
            heard: list[Heard] = []
            async for one in server_sent(response.aiter_lines()):
                heard.append(one)
                if not generation.is_over:
                    before.append(one.type)
        assert "accepted" in before, "nothing came before the generation had ended"
        assert heard[-1].type == "completed", heard[-1]
        assert "completed" not in before, "it was drained while something ran"
        await generation.over()
        assert generation.finished is not None, generation.error
        epoch = heard[-1].data["data"]["result"]["pause_epoch"]
        resumed = await self.load.order(name, "resume", {"pause_epoch": epoch})
        assert (await self.load.ended(resumed))["state"] == "succeeded"
        self.say(
            f"drain through the proxy: {', '.join(before)} came while a generation ran; "
            f"it ended whole, then {heard[-1].type}; resumed"
        )

    async def begin_load(self, workers: int) -> None:
        await self.watch.begin()
        self.load.start(self.engines, workers)

    async def gateways_are_rolled(self, orders: int) -> None:
        """One after the other is ended and started again, with orders coming all the time."""
        for number, process in enumerate(self.plant.gateways):
            await self.load.some_more(orders)
            before = len(self.load.taken)
            ending = asyncio.create_task(asyncio.to_thread(process.stop))
            await self.load.some_more(orders)  # while it ends, and is away
            code = await ending
            assert code == 0, f"gateway {number} ended with {code}"
            self.plant.start_gateway(number)
            await asyncio.to_thread(self.plant.gateway_is_ready, number)
            taken = len(self.load.taken) - before
            self.say(f"gateway {number} ended with 0 and started again; {taken} orders meanwhile")
        await self.load.some_more(orders)

    async def a_gateway_is_killed(self, orders: int) -> None:
        """Not ended: gone, with whatever it was at."""
        await self.load.some_more(orders)
        before = len(self.load.taken)
        process = self.plant.gateways[0]
        await asyncio.to_thread(process.kill)
        await self.load.some_more(orders)
        self.plant.start_gateway(0)
        await asyncio.to_thread(self.plant.gateway_is_ready, 0)
        taken = len(self.load.taken) - before
        self.say(f"gateway 0 was killed and started again; {taken} orders meanwhile")
        await self.load.some_more(orders)

    async def an_engine_is_rolled(self, orders: int) -> None:
        name = self.engines[-1]
        before = len(self.load.taken)
        code = await asyncio.to_thread(self.plant.engines[name].stop)
        self.plant.start_engine(name)
        await asyncio.to_thread(self.plant.engine_is_ready, name)
        await self.load.some_more(orders)
        taken = len(self.load.taken) - before
        self.say(f"engine {name} ended with {code} and started again; {taken} orders meanwhile")

    async def end_load(self) -> None:
        await self.load.stop()
        given, broken = dict(self.load.answers), dict(self.load.broken)
        self.say(f"{len(self.load.taken)} operations taken; answers {given}, broken {broken}")

    async def nothing_is_lost(self) -> Counter[str]:
        """Every operation that was taken ended once, says every witness. How many ended how."""
        taken = self.load.taken
        ends: dict[str, Json] = {}
        for operation in taken:
            ends[operation] = await self.load.ended(operation)
            events = await self.gateway.events(operation)
            found = gaps(operation, [(one["sequence"], one["type"]) for one in events])
            assert not found, found
        assert {one["id"] for one in await self._all()} == set(taken), "others than were taken"
        watched = {one.data["operation"] for one in self.watch.heard if one.type == "accepted"}
        await self.watch.until(watched)
        faults = self.watch.faults(watched)
        assert not faults, faults
        await self.watch.end()
        self.say(
            f"the fleet's stream: {len(self.watch.heard)} events of {len(watched)} operations, "
            f"none missing, none twice; {self.watch.goodbyes} goodbyes on the way"
        )
        states = Counter(str(one["state"]) for one in ends.values())
        self.say(f"each ended once: {dict(states)}")
        failures = Counter(
            one["error"]["reason"] for one in ends.values() if one["state"] == "failed"
        )
        if failures:
            self.say(f"failed: {dict(failures)}")
        return failures

    async def engines_agree(self) -> None:
        """What the engine carried out is what the ledger says, of each operation."""
        asked: Counter[str] = Counter()
        for name in self.engines:
            token = self.plant.ready["tokens"]["engine"]
            async with admin(self.plant.addresses[name], token) as engine:
                for operation in (one for one, its in self.load.taken.items() if its == name):
                    ended = await self.gateway.get(f"/v1/operations/{operation}")
                    if ended["state"] != "succeeded":
                        continue
                    told = await engine.operation(operation)
                    assert told.WhichOneof("outcome") == "completed", (operation, told)
                    asked[name] += 1
        self.say(f"the engines know each of those that succeeded: {dict(asked)}")

    async def an_engine_leaves_and_comes_back(self) -> None:
        """Taken off the list, and put on it again."""
        name = self.engines[-1]
        self.plant.list_engines(*self.engines[:-1])
        await self.gateway.until(
            "/v1/engines", lambda page: name not in {one["id"] for one in page["items"]}
        )
        self.plant.list_engines(*self.engines)
        back = await self.gateway.until(
            "/v1/engines", lambda page: name in {one["id"] for one in page["items"]}
        )
        assert len(back["items"]) == len(self.engines)
        old = next(one for one, its in self.load.taken.items() if its == name)
        assert (await self.gateway.get(f"/v1/operations/{old}"))["engine"] == name
        await self.gateway.until(
            f"/v1/engines/{name}", lambda found: found["health"]["state"] == "serving"
        )
        self.say(f"engine {name} taken off the list and put back: the same engine")

    async def a_broken_list_changes_nothing(self) -> None:
        """But it is said, by both gateways."""
        path = self.plant.folder / "engines.json"
        whole = path.read_text()
        direct = [self.plant.directly(number) for number in range(len(self.plant.gateways))]
        try:
            for text, status in ((whole[:-20], "degraded"), (whole, "ready")):
                path.write_text(text)
                for one in direct:
                    await one.until("/readyz", lambda told, to=status: told["status"] == to)  # type: ignore[misc]
                page = await self.gateway.get("/v1/engines")
                assert {one["id"] for one in page["items"]} == set(self.engines)
        finally:
            for one in direct:
                await one.client.aclose()
        audit = await self.gateway.get("/v1/audit?action=load_engine_list")
        outcomes = Counter(one["outcome"] for one in audit["items"])
        assert outcomes == {"refused": len(direct), "accepted": len(direct)}, outcomes
        self.say(
            "half a list: both gateways said so, and no engine was touched; whole again: ready"
        )

    async def _all(self) -> list[Json]:
        found: list[Json] = []
        path: str | None = "/v1/operations?page_size=200"
        while path is not None:
            page = await self.gateway.get(path)
            found += page["items"]
            token = page["next_page_token"]
            path = f"/v1/operations?page_size=200&page_token={token}" if token else None
        return found
