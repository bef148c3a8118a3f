"""Connections: where they lead, what is shown there, and that they are found again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.backends.channels import UNARY_TIMEOUT_S, DeadlineInterceptor
from app.backends.credentials import Credentials, CredentialSettings, TlsFiles
from app.backends.port import EngineRefused, EngineSilent, OutcomeLost, Silence
from app.backends.reach import ReachPolicy
from app.backends.registry import Backends
from app.clock import SystemClock
from app.domain.engine import Dialect, Member, TlsNames
from app.domain.errors import InvalidArgument, UnsupportedDialect
from app.domain.transitions import Completed
from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc
from tests.backends.certificates import Authority
from tests.backends.scripted_engine import ScriptedEngine, accepted, paused, status_with_info
from tests.backends.ways import LOOPBACK, QUICK, backends, order, registration, told

pytestmark = pytest.mark.anyio


def resolving(*answers: tuple[str, ...]) -> tuple[list[str], object]:
    """A resolver that gives one answer after the other, the last one for ever."""
    asked: list[str] = []
    left = list(answers)

    async def resolve(host: str, _port: int) -> tuple[str, ...]:
        asked.append(host)
        return left.pop(0) if len(left) > 1 else left[0]

    return asked, resolve


def named(reach: ReachPolicy, resolver: object) -> Backends:
    clock = SystemClock()
    return Backends(
        reach,
        Credentials({}, clock),
        clock,
        limits=QUICK,
        resolver=resolver,  # type: ignore[arg-type]
    )


class TestNames:
    async def test_a_name_leads_to_what_it_resolves_to(self, engine: ScriptedEngine) -> None:
        asked, resolver = resolving(("127.0.0.1",))
        reach = replace(LOOPBACK, hosts=("localhost",))
        known = named(reach, resolver)
        backend = known.of(registration(f"localhost:{engine.port}"))
        assert (await backend.discover(2.0)).facts.revision == 7
        await backend.discover(2.0)
        assert asked == ["localhost", "localhost"]  # once for each of the two listeners
        await known.close()

    async def test_a_name_that_leads_out_of_reach_is_not_followed(
        self, engine: ScriptedEngine
    ) -> None:
        _, resolver = resolving(("127.0.0.1", "169.254.169.254"))
        known = named(replace(LOOPBACK, hosts=("localhost",)), resolver)
        backend = known.of(registration(f"localhost:{engine.port}"))
        with pytest.raises(EngineSilent) as silent:
            await backend.discover(1.0)
        assert silent.value.reason is Silence.REFUSED
        with pytest.raises(EngineRefused):
            await told(backend, order())
        assert engine.calls == []
        await known.close()

    async def test_a_name_that_moves_out_of_reach_later_is_not_followed_there(self) -> None:
        first = ScriptedEngine()
        await first.start()
        _, resolver = resolving(("127.0.0.1",), ("127.0.0.1",), ("192.0.2.1",))
        known = named(replace(LOOPBACK, hosts=("localhost",)), resolver)
        backend = known.of(registration(f"localhost:{first.port}"))
        await backend.discover(2.0)
        await first.stop()
        with pytest.raises(EngineSilent):
            await backend.discover(0.2)
        with pytest.raises(EngineSilent) as silent:
            await backend.discover(0.2)
        assert silent.value.reason is Silence.REFUSED
        await known.close()

    async def test_a_name_that_moves_within_reach_is_followed(self) -> None:
        first, second = ScriptedEngine(), ScriptedEngine(instance_id="i-2")
        await first.start()
        await second.start(address=f"127.0.0.2:{first.port}")
        _, resolver = resolving(("127.0.0.1",), ("127.0.0.1",), ("127.0.0.2",))
        known = named(replace(LOOPBACK, hosts=("localhost",)), resolver)
        backend = known.of(registration(f"localhost:{first.port}"))
        assert (await backend.discover(2.0)).facts.instance_id == "i-1"
        await first.stop()
        with pytest.raises(EngineSilent):
            await backend.discover(0.2)
        assert (await backend.discover(2.0)).facts.instance_id == "i-2"
        await known.close()
        await second.stop()

    async def test_a_name_without_an_answer_is_unreachable(self) -> None:
        async def resolve(_host: str, _port: int) -> tuple[str, ...]:
            raise OSError("no such name")

        known = named(replace(LOOPBACK, hosts=("localhost",)), resolve)
        with pytest.raises(EngineSilent) as silent:
            await known.of(registration("localhost:1")).discover(1.0)
        assert silent.value.reason is Silence.UNREACHABLE
        await known.close()

    async def test_the_proxy_of_the_environment_is_no_way_round(
        self, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
        known = backends()
        backend = known.of(registration(f"127.0.0.1:{engine.port}"))
        assert (await backend.discover(2.0)).facts.revision == 7
        await known.close()


class TestSockets:
    async def test_a_socket_in_an_allowed_folder(self, tmp_path: Path) -> None:
        engine = ScriptedEngine()
        address = await engine.start(address=f"unix:{tmp_path}/e.sock")
        known = backends(reach=ReachPolicy(socket_dirs=(str(tmp_path),)))
        assert (await known.of(registration(address)).discover(2.0)).facts.revision == 7
        await known.close()
        await engine.stop()

    async def test_one_that_was_replaced_by_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        engine = ScriptedEngine()
        await engine.start(address=f"unix:{tmp_path}/out.sock")
        known = backends(reach=ReachPolicy(socket_dirs=(str(tmp_path / "in"),)))
        backend = known.of(registration(f"unix:{tmp_path}/in/e.sock"))
        (tmp_path / "in" / "e.sock").symlink_to(tmp_path / "out.sock")
        with pytest.raises(EngineSilent) as silent:
            await backend.discover(1.0)
        assert silent.value.reason is Silence.REFUSED
        await known.close()
        await engine.stop()

    @pytest.mark.parametrize("path", ["in/%2e%2e/out.sock", "in/%2E%2E/out.sock", "in/e?x"])
    async def test_a_path_is_used_as_it_was_judged(self, tmp_path: Path, path: str) -> None:
        """gRPC takes URIs: what was judged to be a file's name must not become a way out."""
        (tmp_path / "in").mkdir()
        engine = ScriptedEngine()
        await engine.start(address=f"unix:{tmp_path}/out.sock")
        (tmp_path / "in" / "e").symlink_to(tmp_path / "out.sock")
        known = backends(reach=ReachPolicy(socket_dirs=(str(tmp_path / "in"),)))
        with pytest.raises(EngineSilent):
            await known.of(registration(f"unix:{tmp_path}/{path}")).discover(1.0)
        assert engine.metadata == []
        await known.close()
        await engine.stop()

    async def test_a_socket_of_an_odd_name(self, tmp_path: Path) -> None:
        engine = ScriptedEngine()
        address = await engine.start(address=f"unix:{tmp_path}/plain.sock")
        (tmp_path / "plain.sock").rename(tmp_path / "50%?#.sock")
        known = backends(reach=ReachPolicy(socket_dirs=(str(tmp_path),)))
        odd = address.replace("plain", "50%?#")
        assert (await known.of(registration(odd)).discover(2.0)).facts.revision == 7
        await known.close()
        await engine.stop()


class TestCredentials:
    async def test_a_bearer_is_shown_with_every_call(
        self, engine: ScriptedEngine, tmp_path: Path
    ) -> None:
        (tmp_path / "token").write_text("t0ken")
        known = backends({"e": CredentialSettings(bearer_file=tmp_path / "token")})
        tls = TlsNames(credential="e")
        backend = known.of(registration(f"127.0.0.1:{engine.port}", tls=tls))
        await backend.discover(2.0)
        engine.answers = lambda _: (accepted(), paused())
        await told(backend, order())
        assert {seen["authorization"] for seen in engine.metadata} == {"Bearer t0ken"}
        await known.close()

    async def test_a_token_that_was_refused_is_read_again(
        self, engine: ScriptedEngine, tmp_path: Path
    ) -> None:
        (tmp_path / "token").write_text("old")
        known = backends({"e": CredentialSettings(bearer_file=tmp_path / "token")})
        tls = TlsNames(credential="e")
        backend = known.of(registration(f"127.0.0.1:{engine.port}", tls=tls))
        engine.read_refusal = status_with_info(grpc.StatusCode.UNAUTHENTICATED, "TOKEN_EXPIRED")
        with pytest.raises(EngineSilent):
            await backend.discover(2.0)
        engine.read_refusal = None
        (tmp_path / "token").write_text("new")
        await backend.discover(2.0)
        assert engine.metadata[-1]["authorization"] == "Bearer new"
        await known.close()

    async def test_without_a_token_nothing_is_sent(
        self, engine: ScriptedEngine, tmp_path: Path
    ) -> None:
        known = backends({"e": CredentialSettings(bearer_file=tmp_path / "missing")})
        tls = TlsNames(credential="e")
        backend = known.of(registration(f"127.0.0.1:{engine.port}", tls=tls))
        with pytest.raises(EngineSilent) as silent:
            await backend.discover(1.0)
        assert silent.value.reason is Silence.AUTH_REFUSED
        with pytest.raises(EngineRefused) as refused:
            await told(backend, order())
        assert refused.value.error.reason == "ENGINE_AUTH_REFUSED"
        assert engine.calls == []
        await known.close()

    async def test_both_sides_show_certificates(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        server_cert, server_key = authority.issue("engine.example")
        client_cert, client_key = authority.issue("gateway.example")
        engine = ScriptedEngine()
        await engine.start(
            credentials=grpc.ssl_server_credentials(
                [(server_key.read_bytes(), server_cert.read_bytes())],
                root_certificates=authority.path.read_bytes(),
                require_client_auth=True,
            )
        )
        tls = TlsFiles(authorities=authority.path, certificate=client_cert, key=client_key)
        known = backends(
            {
                "e": CredentialSettings(tls=tls, server_name="engine.example"),
                "bare": CredentialSettings(
                    tls=TlsFiles(authorities=authority.path), server_name="engine.example"
                ),
                "other": CredentialSettings(tls=tls, server_name="other.example"),
            }
        )
        address = f"127.0.0.1:{engine.port}"
        backend = known.of(registration(address, tls=TlsNames(credential="e")))
        assert (await backend.discover(5.0)).facts.revision == 7
        for generation, name in enumerate(("bare", "other"), start=2):
            wrong = registration(address, tls=TlsNames(credential=name), generation=generation)
            with pytest.raises(EngineSilent) as silent:
                await known.of(wrong).discover(1.0)
            assert silent.value.reason is Silence.UNREACHABLE
        await known.close()
        await engine.stop()

    async def test_a_replaced_certificate_is_shown_and_what_runs_goes_on(
        self, tmp_path: Path
    ) -> None:
        authority, later = Authority(tmp_path / "a"), Authority(tmp_path / "b")
        server_cert, server_key = authority.issue("engine.example")
        cert, key = authority.issue("gateway.example")
        engine = ScriptedEngine()
        trusted = tmp_path / "trusted.pem"
        trusted.write_bytes(authority.path.read_bytes())
        pair = (server_key.read_bytes(), server_cert.read_bytes())
        await engine.start(
            credentials=grpc.dynamic_ssl_server_credentials(
                grpc.ssl_server_certificate_configuration([pair], trusted.read_bytes()),
                lambda: grpc.ssl_server_certificate_configuration([pair], trusted.read_bytes()),
                require_client_authentication=True,
            )
        )
        tls = TlsFiles(authorities=authority.path, certificate=cert, key=key)
        known = backends({"e": CredentialSettings(tls=tls, server_name="engine.example")})
        address = f"127.0.0.1:{engine.port}"
        backend = known.of(registration(address, tls=TlsNames(credential="e")))
        wanted = order()
        running = backend.carry_out(wanted)
        await anext(running)
        await backend.discover(5.0)
        # From now on the engine takes the later authority's only: of new connections.
        trusted.write_bytes(later.path.read_bytes())
        new_cert, new_key = later.issue("gateway.example")
        new_cert.replace(cert)
        assert (await backend.discover(5.0)).facts.revision == 7, "half replaced: as before"
        new_key.replace(key)
        assert (await backend.discover(5.0)).facts.revision == 7
        engine.orders[wanted.operation_id].tell(paused())
        assert isinstance([fact async for fact in running][-1], Completed)
        await known.close()
        await engine.stop()


class TestRegistry:
    async def test_one_backend_serves_a_registration_until_it_changes(
        self, engine: ScriptedEngine
    ) -> None:
        known = backends()
        address = f"127.0.0.1:{engine.port}"
        first = known.of(registration(address))
        assert known.of(registration(address)) is first
        second = known.of(registration(address, generation=2))
        assert second is not first
        assert (await second.discover(2.0)).facts.revision == 7
        await known.close()

    @pytest.mark.parametrize(
        ("member", "pointer"),
        [
            (Member(0, "10.0.0.1:1", "127.0.0.1:1"), "/members/0/admin"),
            (Member(0, "127.0.0.1:1", "nonsense"), "/members/0/control"),
        ],
    )
    async def test_a_fault_names_its_field(self, member: Member, pointer: str) -> None:
        with pytest.raises(InvalidArgument) as refused:
            backends().check(Dialect.OPENENGINE, (member,), TlsNames())
        assert [fault.pointer for fault in refused.value.faults] == [pointer]

    async def test_what_is_not_supported_is_said(self) -> None:
        member = Member(0, "127.0.0.1:1", "127.0.0.1:1")
        with pytest.raises(UnsupportedDialect):
            backends().check(Dialect.VLLM, (member,), TlsNames())
        for members in ((), (member, replace(member, rank=1))):
            with pytest.raises(InvalidArgument):
                backends().check(Dialect.OPENENGINE, members, TlsNames())


class TestDeadlines:
    async def test_a_call_without_a_deadline_gets_one(self, engine: ScriptedEngine) -> None:
        seen: list[float] = []
        answer = engine.GetAdminProfile

        async def look(request: object, context: Any) -> object:
            seen.append(context.time_remaining())
            return await answer(request, context)

        engine.GetAdminProfile = look  # type: ignore[method-assign]
        await engine.stop()
        await engine.start()
        channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{engine.port}", interceptors=[DeadlineInterceptor()]
        )
        stub = admin_pb2_grpc.OpenEngineAdminStub(channel)
        await stub.GetAdminProfile(admin_pb2.GetAdminProfileRequest())
        await stub.GetAdminProfile(admin_pb2.GetAdminProfileRequest(), timeout=1000.0)
        assert 0 < seen[0] < 2 * UNARY_TIMEOUT_S < seen[1]
        await channel.close()

    def test_two_loops_have_each_their_own(self) -> None:
        """Nothing of a connection outlives its event loop or is shared with another. In a process
        of its own: gRPC's poller is one for all loops of a process and outlives them."""
        script = f"from {__name__} import in_two_loops; in_two_loops()"
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def in_two_loops() -> None:
    async def once() -> int:
        engine = ScriptedEngine()
        await engine.start()
        known = backends()
        backend = known.of(registration(f"127.0.0.1:{engine.port}"))
        revision = (await backend.discover(5.0)).facts.revision
        await known.close()
        await engine.stop()
        return revision

    assert asyncio.run(once()) == 7
    assert asyncio.run(once()) == 7


class TestChangesUnderWay:
    """A registration that is changed closes the channel of the one before, also under a call."""

    async def test_a_stream_is_lost_and_nothing_is_cancelled(self, engine: ScriptedEngine) -> None:
        known = backends()
        address = f"127.0.0.1:{engine.port}"
        facts = known.of(registration(address)).carry_out(order())
        await anext(facts)
        waiting = asyncio.ensure_future(anext(facts))
        await asyncio.sleep(0.05)
        known.of(registration(address, generation=2))
        with pytest.raises(OutcomeLost):
            await waiting
        await known.close()

    async def test_a_read_has_no_answer(self, engine: ScriptedEngine) -> None:
        known = backends()
        address = f"127.0.0.1:{engine.port}"
        backend = known.of(registration(address))
        await backend.discover(2.0)
        engine.answering.clear()
        waiting = asyncio.ensure_future(backend.discover(5.0))
        await asyncio.sleep(0.05)
        known.of(registration(address, generation=2))
        with pytest.raises(EngineSilent):
            await waiting
        await known.close()

    async def test_a_backend_that_was_closed_opens_again(self, engine: ScriptedEngine) -> None:
        """Whoever still holds it gets an answer, or at least none that is wrong."""
        known = backends()
        backend = known.of(registration(f"127.0.0.1:{engine.port}"))
        await known.close()
        assert (await backend.discover(2.0)).facts.revision == 7
        await backend.close()
