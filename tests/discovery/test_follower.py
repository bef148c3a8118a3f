"""The register follows the list: through the one door, by one gateway at a time, for its own
engines alone."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from app.discovery.file import FileSource
from app.discovery.follower import ISSUER, Follower, Rhythm
from app.discovery.plan import LABEL
from app.domain.errors import EngineExists
from app.domain.kinds import OperationState
from app.finding import finding_of, sources_of
from app.ledger.values import AuditFilter
from app.observability.metrics import Metrics
from app.operations.registering import EngineChange
from app.settings import SettingsError, load_settings
from tests.discovery.conftest import Told, audited, draft, follower, listing, registered
from tests.doubles.engine import running_engine
from tests.enginekit.minimal_engine import until as released_by
from tests.operations.gateway import CALLER, FLUSH, Gateway, until
from tests.robustness.fault_proxy import fault_proxy

pytestmark = pytest.mark.anyio


def problems(follows: Follower) -> tuple[str, ...]:
    return follows.problems


async def test_engines_come_change_and_go(gateway: Gateway) -> None:
    source = Told(listed=listing(draft("a"), draft("b", "127.0.0.1:2")))
    follows = follower(gateway, source)
    await follows.round()
    assert {one: set(it.labels) for one, it in (await registered(gateway)).items()} == {
        "a": {LABEL},
        "b": {LABEL},
    }
    source.listed = listing(draft("a", "127.0.0.1:3"))
    await follows.round()
    (left,) = (await registered(gateway)).values()
    assert (left.id, left.members[0].admin, left.generation) == ("a", "127.0.0.1:3", 2)
    source.listed = {}
    await follows.round()
    assert await registered(gateway) == {}
    assert problems(follows) == ()
    for action, times in (("register_engine", 2), ("change_engine", 1), ("remove_engine", 2)):
        assert await audited(gateway, action) == [("accepted", None, "discovery:file")] * times


async def test_who_did_it_stands_in_the_audit(gateway: Gateway) -> None:
    await follower(gateway, Told("rack", listing(draft("a")))).round()
    page = await gateway.ledger.audit.page(AuditFilter(action="register_engine"), None, 5)
    (entry,) = (stored.entry for stored in page.items)
    assert entry.actor is not None
    assert (entry.actor.issuer, entry.actor.subject) == (ISSUER, "discovery:rack")
    assert (entry.engine_id, entry.note) == ("a", "listed by discovery:rack")


async def test_an_engine_that_is_listed_again_is_the_same_one(gateway: Gateway) -> None:
    source = Told(listed=listing(draft("a")))
    follows = follower(gateway, source)
    await follows.round()
    created = (await registered(gateway))["a"].created_at
    source.listed = {}
    await follows.round()
    source.listed = listing(draft("a", "127.0.0.1:2"))
    await follows.round()
    back = (await registered(gateway))["a"]
    assert (back.generation, back.created_at) == (2, created)
    assert back.members[0].admin == "127.0.0.1:2"
    assert problems(follows) == ()


async def test_the_id_of_somebody_elses_removed_engine_stays_used(gateway: Gateway) -> None:
    await gateway.fleet.register(draft("a"), CALLER)
    await gateway.fleet.remove("a", 1, CALLER)
    follows = follower(gateway, Told(listed=listing(draft("a"))))
    await follows.round()
    assert await registered(gateway) == {}
    assert follows.problems[0].startswith("a: ENGINE_ALREADY_EXISTS: ")
    # And nobody but the source gets back what the source took off.
    source = Told("rack", listing(draft("b")))
    rack = follower(gateway, source)
    await rack.round()
    source.listed = {}
    await rack.round()
    with pytest.raises(EngineExists):
        await gateway.fleet.register(draft("b"), CALLER)


async def test_what_was_registered_by_hand_is_left_alone(gateway: Gateway) -> None:
    await gateway.fleet.register(draft("a"), CALLER)
    await gateway.fleet.register(draft("b"), CALLER)
    source = Told(listed=listing(draft("a", "127.0.0.1:9")))
    follows = follower(gateway, source)
    await follows.round()
    assert problems(follows) == ("a: is registered by hand",)
    assert (await registered(gateway))["a"].members[0].admin == "127.0.0.1:1"
    # Handed over by its label, it is the source's.
    await gateway.fleet.change("a", EngineChange(labels={LABEL: "file"}), 1, CALLER)
    await follows.round()
    assert problems(follows) == ()
    assert (await registered(gateway))["a"].members[0].admin == "127.0.0.1:9"
    # And taken over by taking it off, it stays when the list forgets it.
    await gateway.fleet.change("a", EngineChange(labels={}), 3, CALLER)
    source.listed = {}
    await follows.round()
    assert set(await registered(gateway)) == {"a", "b"}


async def test_what_somebody_changes_by_hand_is_put_back(gateway: Gateway) -> None:
    source = Told(listed=listing(draft("a")))
    follows = follower(gateway, source, rhythm=Rhythm(whole_s=30, duty_s=60))
    await follows.round()
    await gateway.fleet.change("a", EngineChange(labels={LABEL: "file", "x": "y"}), 1, CALLER)
    await follows.round()
    assert (await registered(gateway))["a"].generation == 2, "it is looked at every 30 s"
    gateway.clock.go(31)
    await follows.round()
    assert dict((await registered(gateway))["a"].labels) == {LABEL: "file"}


async def test_what_somebody_removes_by_hand_comes_back(gateway: Gateway) -> None:
    source = Told(listed=listing(draft("a")))
    follows = follower(gateway, source)
    await follows.round()
    await gateway.fleet.remove("a", 1, CALLER)
    await follows.round()
    assert (await registered(gateway))["a"].generation == 2
    assert problems(follows) == ()


async def test_an_engine_out_of_reach_holds_back_no_other(gateway: Gateway) -> None:
    source = Told(listed=listing(draft("a", "10.1.2.3:1"), draft("b")))
    follows = follower(gateway, source, rhythm=Rhythm(whole_s=0, duty_s=600))
    for _ in range(3):
        await follows.round()
    assert set(await registered(gateway)) == {"b"}
    assert follows.problems[0].startswith("a: ADDRESS_NOT_ALLOWED: ")
    refused = [("refused", "ADDRESS_NOT_ALLOWED", "discovery:file")]
    done = [("accepted", None, "discovery:file")]
    assert await audited(gateway, "register_engine") == refused + done
    gateway.clock.go(301)
    await follows.round()
    assert (await audited(gateway, "register_engine")).count(refused[0]) == 2
    source.listed = listing(draft("a", "127.0.0.1:4"), draft("b"))
    await follows.round()
    assert set(await registered(gateway)) == {"a", "b"}
    assert problems(follows) == ()


async def test_an_engine_stays_until_its_last_order_has_ended(
    gateway: Gateway, tmp_path: Path
) -> None:
    async with running_engine(tmp_path / "engine") as engine:
        source = Told(listed=listing(draft("e1", engine.admin_address)))
        follows = follower(gateway, source)
        await follows.round()
        await gateway.fleet.reread("e1", 5.0)
        go = asyncio.Event()
        engine.engine.script("prepare", released_by(go))
        operation = await gateway.give(FLUSH)
        source.listed = {}
        for _ in range(3):
            await follows.round()
        assert set(await registered(gateway)) == {"e1"}
        assert problems(follows) == ("e1: is gone, and stays until its last operation has ended",)
        go.set()
        await gateway.end_of(operation)
        await follows.round()
        assert await registered(gateway) == {}
        assert problems(follows) == ()
    # Waiting was not written down as a refusal, time after time.
    assert [one[0] for one in await audited(gateway, "remove_engine")] == ["accepted"]


async def test_an_engine_that_moves_keeps_the_order_that_runs(
    gateway: Gateway, tmp_path: Path
) -> None:
    """As a pod that gets another address: the order is followed there, and given once."""
    async with running_engine(tmp_path / "engine") as engine:
        async with fault_proxy(engine.admin_address, 1) as here:
            source = Told(listed=listing(draft("e1", here.address)))
            follows = follower(gateway, source)
            await follows.round()
            await gateway.fleet.reread("e1", 5.0)
            go = asyncio.Event()
            engine.engine.script("prepare", released_by(go))
            operation = await gateway.give(FLUSH)
            await until(lambda: engine.orders)
            source.listed = listing(draft("e1", engine.admin_address))
            await follows.round()
            here.cut()
        go.set()
        ended = await gateway.end_of(operation)
        assert ended.state is OperationState.SUCCEEDED
        assert len(engine.orders) == 1
    assert (await registered(gateway))["e1"].generation == 2


async def test_one_that_is_missing_for_a_moment_is_not_removed(gateway: Gateway) -> None:
    source = Told(listed=listing(draft("a")))
    follows = follower(gateway, source, remove_after_s=60, rhythm=Rhythm(whole_s=0, duty_s=600))
    await follows.round()
    source.listed = {}
    await follows.round()
    gateway.clock.go(59)
    await follows.round()
    assert set(await registered(gateway)) == {"a"}
    source.listed = listing(draft("a"))
    await follows.round()
    source.listed = {}
    await follows.round()
    gateway.clock.go(59)
    await follows.round()
    assert set(await registered(gateway)) == {"a"}
    gateway.clock.go(2)
    await follows.round()
    assert await registered(gateway) == {}


async def test_of_two_gateways_one_does_it(gateway: Gateway) -> None:
    """Their lists differ, as while a new one is rolled out; they do not undo each other's."""
    old, new = Told(listed=listing(draft("a"))), Told(listed=listing(draft("b")))
    first, second = follower(gateway, old, "first"), follower(gateway, new, "second")
    for _ in range(3):
        await first.round()
        await second.round()
    assert set(await registered(gateway)) == {"a"}
    await first.stop()
    gateway.clock.go(6)
    await second.round()
    await first.round()
    assert set(await registered(gateway)) == {"b"}
    # One that says nothing any more is waited for, and not for ever.
    gateway.clock.go(16)
    await first.round()
    assert set(await registered(gateway)) == {"a"}
    gateway.clock.go(6)
    await second.round()
    assert set(await registered(gateway)) == {"a"}


async def test_nothing_is_done_before_the_list_was_whole_once(gateway: Gateway) -> None:
    await follower(gateway, Told(listed=listing(draft("a"))), "first").round()
    gateway.clock.go(60)
    after_a_restart = follower(gateway, Told(faults=("is not valid TOML",)), "second")
    await after_a_restart.round()
    assert set(await registered(gateway)) == {"a"}
    assert not after_a_restart.ok


async def test_a_refused_list_is_written_down_once(gateway: Gateway) -> None:
    states: list[tuple[str, int]] = []
    source = Told(listed=listing(draft("a")))
    follows = follower(gateway, source, on_state=lambda name, count: states.append((name, count)))
    await follows.round()
    source.faults = ("engines[0].id: Field required",)
    for _ in range(3):
        await follows.round()
    assert (follows.ok, states[-1]) == (False, ("file", 1))
    assert set(await registered(gateway)) == {"a"}
    source.faults = ()
    await follows.round()
    assert (follows.ok, states[-1]) == (True, ("file", 0))
    assert await audited(gateway, "load_engine_list") == [
        ("refused", "ENGINE_LIST_REFUSED", "discovery:file"),
        ("accepted", None, "discovery:file"),
    ]


async def test_remarks_are_problems_of_single_engines(gateway: Gateway) -> None:
    source = Told(listed=listing(draft("a")), remarks={"B.1": "can't be an id"})
    follows = follower(gateway, source)
    await follows.round()
    assert (follows.ok, follows.problems) == (True, ("B.1: can't be an id",))
    assert set(await registered(gateway)) == {"a"}


async def test_running_it_follows_a_file(gateway: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    line = 'id = "a"\nmembers = [{ admin = "127.0.0.1:1", control = "127.0.0.1:1" }]\n'
    follows = follower(
        gateway, FileSource("file", path, look_s=0.01, settle_s=0), rhythm=Rhythm(tick_s=60)
    )
    running = asyncio.create_task(follows.run())
    try:
        await until(lambda: not follows.ok)
        path.write_text(f"[[engines]]\n{line}")

        async def there(*ids: str) -> bool:
            return set(await registered(gateway)) == set(ids)

        await until(lambda: there("a"))
        path.write_text("engines = []")
        await until(lambda: there())
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await follows.stop()


async def test_a_source_that_breaks_is_followed_again(gateway: Gateway) -> None:
    class Breaking(Told):
        times = 0

        async def follow(self, changed: object) -> None:
            self.times += 1
            raise OSError("broken")

    source = Breaking(listed=listing(draft("a")))
    follows = follower(gateway, source, rhythm=Rhythm(tick_s=0.01))
    running = asyncio.create_task(follows.run())

    async def followed() -> bool:
        return source.times > 2 and set(await registered(gateway)) == {"a"}

    await until(followed)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_all_gateways_sources_are_run_and_left(gateway: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "chadburn.toml"
    (tmp_path / "rack.json").write_text('{"engines": []}')
    path.write_text(
        f"""
        [[discovery]]
        file = "{tmp_path / "engines.toml"}"
        [[discovery]]
        name = "rack"
        file = "{tmp_path / "rack.json"}"
        """
    )
    settings, metrics = load_settings(path), Metrics()
    assert sources_of(settings.model_copy(update={"read_only": True})) == ()
    parts = (gateway.ledger, gateway.fleet, gateway.clock, "a", metrics)
    finding = finding_of(sources_of(settings), *parts)
    running = asyncio.create_task(finding.run())
    await until(lambda: not finding.ok)
    await until(lambda: b'chadburn_discovery_problems{source="file"} 1.0' in metrics.render())
    assert b'chadburn_discovery_problems{source="rack"} 0.0' in metrics.render()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await finding.stop()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[discovery]]", "takes one of file and kubernetes"),
        ("[[discovery]]\nfile='a'\n[[discovery]]\nfile='b'", "a name of its own"),
        ("[[discovery]]\nfile='a'\nname='A'", "should match pattern"),
        ("[[discovery]]\nfile='a'\n[discovery.kubernetes]\nselector='a'", "takes one of"),
        (
            "[[discovery]]\n[discovery.kubernetes]\nselector='a'\nlabels={'é'='b'}",
            "one that no engine can have",
        ),
    ],
)
def test_settings_that_say_nothing_clear_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "chadburn.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=why):
        load_settings(path)


def test_patience(tmp_path: Path) -> None:
    path = tmp_path / "chadburn.toml"
    path.write_text(
        "[[discovery]]\nfile='a'\n[[discovery]]\n[discovery.kubernetes]\nselector='a'\n"
        "[[discovery]]\nname='slow'\nfile='c'\nremove_after_s=5"
    )
    found = [(one.known_as, one.patience_s) for one in load_settings(path).discovery]
    assert found == [("file", 0.0), ("kubernetes", 60.0), ("slow", 5.0)]
