"""Engines behind services of a cluster: what a slice says, and how its API is followed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.discovery.endpoints import Shape, engines_of
from app.discovery.house import Finding
from app.discovery.kubernetes import Cluster, KubernetesSource, Persistence
from app.domain.engine import Dialect, Member, TlsNames
from app.finding import finding_of, sources_of
from app.main import posture_at
from app.observability.metrics import Metrics
from app.settings import load_settings
from app.startup import StartupRefused
from tests.discovery.conftest import follower, registered
from tests.doubles.kubernetes_api import NAMESPACE, KubernetesApi, endpoint_slice, running_api
from tests.operations.gateway import Gateway, until

QUICK = Persistence(watch_s=60, pause_s=0.0, first_s=0.01, most_s=0.05)


# ---- what a slice says ----


def test_each_pod_is_an_engine() -> None:
    shape = Shape(
        control_port="control",
        dialect=Dialect.VLLM,
        tls=TlsNames("engines.internal", "cluster"),
        labels={"zone": "a"},
    )
    ports = [{"name": "admin", "port": 8443}, {"name": "control", "port": 8444}]
    one = endpoint_slice("s", ("engine-0", "10.0.0.1"), ("engine-1", "10.0.0.2"), ports=ports)
    listed, remarks = engines_of([one], shape)
    assert (list(listed), remarks) == (["engine-0", "engine-1"], {})
    found = listed["engine-1"]
    assert found.members == (Member(0, "10.0.0.2:8443", "10.0.0.2:8444"),)
    assert (found.dialect, found.tls) == (Dialect.VLLM, TlsNames("engines.internal", "cluster"))
    assert found.labels == {
        "zone": "a",
        "kubernetes/namespace": NAMESPACE,
        "kubernetes/service": "engines",
    }


def test_one_that_is_not_ready_is_there_all_the_same() -> None:
    one = endpoint_slice("s", ("engine-0", "10.0.0.1"))
    one["endpoints"][0]["conditions"] = {"ready": False, "serving": False, "terminating": True}
    listed, _ = engines_of([one], Shape())
    assert list(listed) == ["engine-0"]


def test_of_two_addresses_the_older_family_counts_whatever_the_order() -> None:
    four = endpoint_slice("b", ("engine-0", "10.0.0.1"))
    six = endpoint_slice("a", ("engine-0", "fd00::1"), addressType="IPv6")
    for slices in ([four, six], [six, four]):
        (found,) = engines_of(slices, Shape())[0].values()
        assert found.members[0].admin == "10.0.0.1:8443"
    (found,) = engines_of([six], Shape())[0].values()
    assert found.members[0].admin == "[fd00::1]:8443"


def test_of_two_services_of_a_pod_always_the_same_one_counts() -> None:
    slices = [endpoint_slice(name, ("e", "10.0.0.1"), service=name) for name in ("b", "a")]
    for order in (slices, slices[::-1]):
        (found,) = engines_of(order, Shape())[0].values()
        assert found.labels["kubernetes/service"] == "a"


def test_what_can_t_be_an_engine_is_said() -> None:
    nameless = endpoint_slice("s", ("engine-0", "10.0.0.1"), ("engine.1", "10.0.0.2"))
    del nameless["endpoints"][0]["targetRef"]
    nameless["endpoints"].append({"addresses": [], "hostname": "none"})
    nameless["endpoints"].append({"addresses": ["10.0.0.3"], "hostname": "by-hostname"})
    slices = [
        nameless,
        endpoint_slice("portless", ports=[{"name": None, "port": 1}]),
        endpoint_slice("odd", addressType="Pigeon"),
        {"metadata": {"name": "empty"}, "addressType": "IPv4", "endpoints": None, "ports": None},
    ]
    listed, remarks = engines_of(slices, Shape())
    assert list(listed) == ["by-hostname"]
    assert remarks == {
        "10.0.0.1": "has no pod, and no name",
        "engine.1": "an id has 1 to 63 of a-z, 0-9 and -, and no - at either end",
        "portless": "has no port 'admin'",
        "odd": "has addresses of a kind that is not known",
        "empty": "has no port 'admin'",
    }


# ---- how the API is followed ----


@dataclass
class Watching:
    api: KubernetesApi
    source: KubernetesSource
    folder: Path
    heard: Callable[[], object] = lambda: None

    def changed(self) -> None:
        self.heard()

    @property
    def ids(self) -> list[str] | None:
        return None if self.source.listed is None else sorted(self.source.listed)

    async def lists(self, *ids: str) -> None:
        await until(lambda: self.ids == list(ids) and not self.source.faults)

    async def fails(self, why: str) -> None:
        await until(lambda: self.source.faults == (why,))

    async def watches(self) -> None:
        await until(lambda: self.api.watched == 1)


@pytest.fixture
async def watching(tmp_path: Path) -> AsyncIterator[Watching]:
    async with running_api(tmp_path / "tls") as api:
        api.put(endpoint_slice("s", ("engine-0", "10.0.0.1")))
        (tmp_path / "token").write_text("first\n")
        (tmp_path / "namespace").write_text(NAMESPACE)
        cluster = Cluster(
            api_url=api.url,
            namespace=tmp_path / "namespace",
            selector="role=engine",
            token_file=tmp_path / "token",
            ca_file=tmp_path / "tls" / "authority.pem",
        )
        source = KubernetesSource("kubernetes", cluster, Shape(), persistence=QUICK)
        found = Watching(api, source, tmp_path)
        following = asyncio.create_task(source.follow(found.changed))
        try:
            yield found
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following


pytestmark = pytest.mark.anyio


async def test_what_happens_is_heard(watching: Watching) -> None:
    api = watching.api
    await watching.lists("engine-0")
    await watching.watches()
    api.put(endpoint_slice("s", ("engine-0", "10.0.0.9"), ("engine-1", "10.0.0.2")))
    await watching.lists("engine-0", "engine-1")
    assert watching.source.listed is not None
    assert watching.source.listed["engine-0"].members[0].admin == "10.0.0.9:8443"
    api.put(endpoint_slice("t", ("engine-2", "10.0.0.3")))
    await watching.lists("engine-0", "engine-1", "engine-2")
    api.delete("s")
    await watching.lists("engine-2")
    other = endpoint_slice("u", ("other", "10.0.0.4"))
    other["metadata"]["labels"]["role"] = "something"
    api.put(other)
    api.put(endpoint_slice("v", ("engine-3", "10.0.0.5")))
    await watching.lists("engine-2", "engine-3")
    assert len(api.of("list")) == 1
    (asked,) = api.of("watch")
    assert asked["allowWatchBookmarks"] == "true"
    assert asked["timeoutSeconds"] == "60"


async def test_a_list_comes_in_pages(watching: Watching) -> None:
    api = watching.api
    await watching.watches()
    api.page = 2
    for number in range(5):
        api.put(endpoint_slice(f"p{number}", (f"pod-{number}", f"10.0.1.{number}")))
    await watching.lists("engine-0", *(f"pod-{number}" for number in range(5)))
    api.compact()
    api.cut()
    await until(lambda: len(api.of("list")) == 5)  # one, the probe, and three pages
    await watching.lists("engine-0", *(f"pod-{number}" for number in range(5)))


async def test_a_list_that_took_too_long_is_begun_anew(watching: Watching) -> None:
    """Half of it is never taken for the whole."""
    api = watching.api
    await watching.watches()
    for number in range(3):
        api.put(endpoint_slice(f"p{number}", (f"pod-{number}", f"10.0.1.{number}")))
    everything = ("engine-0", "pod-0", "pod-1", "pod-2")
    await watching.lists(*everything)
    seen: list[list[str] | None] = []
    watching.heard = lambda: seen.append(watching.ids)
    api.page = 2
    api.compact()
    api.refusals += [200, 200, 410]  # the watch, which is told 410, and the list's first page
    api.close_watches()
    await until(lambda: not api.refusals and seen)
    await watching.lists(*everything)
    assert seen == [list(everything)] * len(seen)


@pytest.mark.parametrize("end", [KubernetesApi.cut, KubernetesApi.close_watches])
async def test_after_the_end_of_a_watch_nothing_is_missed(
    watching: Watching, end: Callable[[KubernetesApi], None]
) -> None:
    api = watching.api
    await watching.watches()
    api.bookmark()
    api.put(endpoint_slice("t", ("engine-1", "10.0.0.2")))
    await watching.lists("engine-0", "engine-1")
    end(api)
    api.put(endpoint_slice("u", ("engine-2", "10.0.0.3")))
    api.delete("s")
    await watching.lists("engine-1", "engine-2")
    again = api.of("watch")[-1]["resourceVersion"]
    assert int(again) >= int(api.of("watch")[0]["resourceVersion"]) + 11


@pytest.mark.parametrize("as_status", [False, True])
async def test_what_is_too_long_ago_is_listed_anew(watching: Watching, as_status: bool) -> None:
    api = watching.api
    await watching.watches()
    api.gone_as_status = as_status
    api.close_watches()
    api.delete("s")
    api.put(endpoint_slice("t", ("engine-1", "10.0.0.2")))
    api.compact()
    await watching.lists("engine-1")
    await watching.watches()
    api.put(endpoint_slice("u", ("engine-2", "10.0.0.3")))
    await watching.lists("engine-1", "engine-2")


async def test_a_server_that_is_away_leaves_what_was_known(watching: Watching) -> None:
    api = watching.api
    await watching.watches()
    await api.stop()
    await watching.fails("the API server can't be reached (ConnectError)")
    assert watching.ids == ["engine-0"]
    api.put(endpoint_slice("t", ("engine-1", "10.0.0.2")))
    await api.start()
    await watching.lists("engine-0", "engine-1")


async def test_a_token_that_was_renewed_is_shown(watching: Watching) -> None:
    api = watching.api
    await watching.watches()
    api.token = "second"
    api.close_watches()
    await watching.fails("the API server answers 401")
    (watching.folder / "token").write_text("second")
    await watching.lists("engine-0")


async def test_a_busy_server_is_asked_again(watching: Watching) -> None:
    api = watching.api
    await watching.watches()
    api.refusals += [429, 503, 500]
    api.put(endpoint_slice("t", ("engine-1", "10.0.0.2")))
    api.close_watches()
    await until(lambda: not api.refusals)
    await watching.lists("engine-0", "engine-1")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense", "the API server tells of something that is no event"),
        ('{"type": "ADDED"}', "the API server tells of something that is no event"),
        ("[]", "the API server tells of something that is no event"),
        (
            json.dumps(
                {"type": "ODD", "object": {"metadata": {"name": "s", "resourceVersion": 1}}}
            ),
            "the API server tells of a kind of event that is not known",
        ),
        (
            json.dumps({"type": "ERROR", "object": {"code": 500}}),
            "the API server ended the watch (500)",
        ),
    ],
)
async def test_what_is_no_event_is_not_believed(watching: Watching, line: str, why: str) -> None:
    api = watching.api
    await watching.watches()
    said: list[tuple[str, ...]] = []
    watching.heard = lambda: said.append(watching.source.faults)
    api.send(line)
    await until(lambda: (why,) in said)
    await watching.lists("engine-0")
    api.put(endpoint_slice("t", ("engine-1", "10.0.0.2")))
    await watching.lists("engine-0", "engine-1")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("token", None, "the service account can't be read (FileNotFoundError)"),
        ("namespace", "elsewhere", "the API server answers 403"),
        ("tls/authority.pem", "", "ca_file can't be read"),
        ("tls/authority.pem", None, "ca_file can't be read (FileNotFoundError)"),
    ],
)
async def test_a_service_account_that_does_not_do(
    watching: Watching, name: str, content: str | None, why: str
) -> None:
    await watching.watches()
    file = watching.folder / name
    was = file.read_text()
    file.unlink()
    if content is not None:
        file.write_text(content)
    watching.api.cut()
    await until(lambda: any(one.startswith(why) for one in watching.source.faults))
    assert watching.ids == ["engine-0"]
    file.write_text(was)
    await watching.lists("engine-0")


async def test_another_authority_s_server_is_not_asked(watching: Watching) -> None:
    from tests.backends.certificates import Authority

    await watching.watches()
    other = Authority(watching.folder / "other", "another authority")
    trusted = watching.folder / "tls" / "authority.pem"
    was = trusted.read_bytes()
    trusted.write_bytes(other.path.read_bytes())
    asked = len(watching.api.requests)
    watching.api.cut()
    await watching.fails("the API server can't be reached (ConnectError)")
    assert len(watching.api.requests) == asked
    trusted.write_bytes(was)
    await watching.lists("engine-0")


async def test_the_register_follows(watching: Watching, gateway: Gateway) -> None:
    follows = follower(gateway, watching.source)
    await watching.lists("engine-0")
    await follows.round()
    assert follows.problems[0].startswith("engine-0: ADDRESS_NOT_ALLOWED")
    watching.api.put(endpoint_slice("s", ("engine-0", "127.0.0.1")))
    await until(
        lambda: (
            watching.source.listed is not None
            and watching.source.listed["engine-0"].members[0].admin == "127.0.0.1:8443"
        )
    )
    await follows.round()
    labels = (await registered(gateway))["engine-0"].labels
    assert labels["chadburn/discovery"] == "kubernetes"


# ---- from the settings ----


def found(gateway: Gateway, path: Path) -> Finding:
    sources = sources_of(load_settings(path))
    return finding_of(sources, gateway.ledger, gateway.fleet, gateway.clock, "a", Metrics())


async def test_a_pod_is_told_where_the_api_is(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chadburn.toml"
    path.write_text('[[discovery]]\n[discovery.kubernetes]\nselector = "role=engine"\n')
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartupRefused, match="set api_url: this process is in no pod"):
        found(gateway, path)
    issuer = {"issuer": "https://login.test", "audience": "a"}
    told = posture_at(load_settings(path, issuers=[issuer])).warnings
    assert "DOES_NOT_START" in {one.code for one in told}
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert found(gateway, path).ok


async def test_settings_lead_to_the_api(
    watching: Watching, gateway: Gateway, tmp_path: Path
) -> None:
    path = tmp_path / "chadburn.toml"
    values: dict[str, Any] = {
        "api_url": watching.api.url,
        "selector": "role=engine",
        "namespace": NAMESPACE,
        "token_file": str(tmp_path / "token"),
        "ca_file": str(tmp_path / "tls" / "authority.pem"),
    }
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
    path.write_text(f'[[discovery]]\nname = "k"\n[discovery.kubernetes]\n{lines}\n')
    watching.api.put(endpoint_slice("s", ("engine-0", "127.0.0.1")))
    finding = found(gateway, path)
    running = asyncio.create_task(finding.run())

    async def there() -> bool:
        return "engine-0" in await registered(gateway)

    await until(there)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await finding.stop()
