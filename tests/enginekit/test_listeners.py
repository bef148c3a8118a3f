"""Who may call which listener; and what may be listened on at all."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.verifier import TokenVerifier
from app.devidp.issuer import DevIssuer
from app.enginekit.server import EngineServer, KitSettings, SettingsError, TlsFiles
from app.rpc.openengine.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lifecycle_pb2,
    openengine_pb2_grpc,
    server_pb2,
)
from tests.auth.conftest import Origin
from tests.enginekit.client import Client, client_of, refusal_of, refused
from tests.enginekit.minimal_engine import MinimalEngine

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
ADMIN, INFERENCE = "engine:admin", "engine:inference"


def utc_now() -> datetime:
    return datetime.now(UTC)


class Guarded:
    """An engine that asks for tokens, and the issuer that gives them."""

    def __init__(self, server: EngineServer, engine: MinimalEngine, issuer: DevIssuer) -> None:
        self.server = server
        self.engine = engine
        self.issuer = issuer

    def token(self, audience: str, subject: str = "trainer", **claims: Any) -> str:
        return self.issuer.mint(subject, "client", ["admin:pause"], audience, **claims)

    @asynccontextmanager
    async def client(
        self, admin: str | None = None, inference: str | None = None
    ) -> AsyncIterator[Client]:
        async with client_of(
            self.server, admin_token=admin, inference_token=inference
        ) as connected:
            yield connected


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    origin = Origin()
    await origin.start()
    issuer = DevIssuer(origin.url, now=utc_now)
    origin.publish(issuer)
    async with httpx2.AsyncClient(timeout=10) as http:
        config = IssuerConfig(
            issuer=issuer.issuer, audience=ADMIN, inference_audiences=(INFERENCE,)
        )
        verifier = TokenVerifier([config], http=http, now=utc_now)
        engine = MinimalEngine()
        settings = KitSettings(
            data_dir=tmp_path, admin_verifier=verifier, inference_verifier=verifier
        )
        server = EngineServer(engine, settings)
        await server.start()
        try:
            yield Guarded(server, engine, issuer)
        finally:
            await server.stop(0)
            await verifier.aclose()
            await origin.stop()


async def test_each_listener_takes_tokens_of_its_own_audience(guarded: Guarded) -> None:
    async with guarded.client(guarded.token(ADMIN), guarded.token(INFERENCE)) as client:
        events = await client.order(client.pause(idempotency_key="k"))
        assert events[-1].HasField("completed")
        epoch = events[-1].completed.pause.pause_epoch
        assert (await client.completed(client.resume(epoch))).changed
        assert await client.generate().finish_reason() == "LENGTH"
        assert (await client.load()).running_requests == 0


async def test_a_token_for_the_other_listener_is_denied(guarded: Guarded) -> None:
    async with guarded.client(guarded.token(INFERENCE), guarded.token(ADMIN)) as client:
        seen = await refused(client.stream(client.pause()))
        assert (seen.code, seen.reason, seen.domain) == (
            Code.PERMISSION_DENIED,
            "WRONG_AUDIENCE",
            "chadburn",
        )
        seen = await client.generate().refused()
        assert (seen.code, seen.reason) == (Code.PERMISSION_DENIED, "WRONG_AUDIENCE")
    assert guarded.engine.calls == []
    assert guarded.engine.started == []


async def test_no_valid_token_is_unauthenticated(guarded: Guarded) -> None:
    stranger = DevIssuer(guarded.issuer.issuer, now=utc_now)
    late = DevIssuer(guarded.issuer.issuer, now=lambda: utc_now() - timedelta(hours=3))
    late._key = guarded.issuer._key
    tokens = {
        None: "TOKEN_MISSING",
        "nonsense": "TOKEN_MALFORMED",
        stranger.mint("x", "y", [], ADMIN): "TOKEN_KEY_UNKNOWN",
        late.mint("x", "y", [], ADMIN): "TOKEN_EXPIRED",
        guarded.token("somebody else"): "TOKEN_AUDIENCE_FOREIGN",
    }
    for token, reason in tokens.items():
        async with guarded.client(token, token) as client:
            for seen in (
                await refused(client.stream(client.pause())),
                await client.generate().refused(),
                await refused(
                    client.control.GetServerInfo(
                        server_pb2.GetServerInfoRequest(),
                        timeout=10,
                        metadata=client.admin_metadata,
                    )
                ),
            ):
                assert (seen.code, seen.reason) == (Code.UNAUTHENTICATED, reason)
                assert seen.domain == "chadburn"
    assert guarded.engine.calls == []


async def test_two_tokens_are_as_good_as_none(guarded: Guarded) -> None:
    token = guarded.token(ADMIN)
    async with guarded.client() as client:
        both = (("authorization", f"Bearer {token}"), ("authorization", f"Bearer {token}"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.admin.GetAdminProfile(
                admin_pb2.GetAdminProfileRequest(), timeout=10, metadata=both
            )
        assert caught.value.code() is Code.UNAUTHENTICATED


async def test_a_stranger_does_not_learn_what_is_served(guarded: Guarded) -> None:
    async with guarded.client() as client:
        astray = admin_pb2_grpc.OpenEngineAdminStub(client.inference_channel)
        seen = await refused(astray.GetAdminProfile(admin_pb2.GetAdminProfileRequest(), timeout=10))
        assert seen.code is Code.UNAUTHENTICATED


async def test_health_needs_no_token(guarded: Guarded) -> None:
    async with guarded.client() as client:
        for admin in (True, False):
            assert await client.health("", admin=admin) == "SERVING"
            assert await client.health("openengine.v1.Inference", admin=admin) == "SERVING"
        seen = await refused(client.reading.Health(lifecycle_pb2.HealthRequest(), timeout=10))
        assert seen.code is Code.UNAUTHENTICATED


async def test_who_ordered_is_kept(guarded: Guarded) -> None:
    async with guarded.client(guarded.token(ADMIN, "gateway")) as client:
        events = await client.order(client.pause())
        journal = guarded.server._served.state.journal  # type: ignore[union-attr]
        record = await journal.by_id(events[0].operation_id)
        assert record is not None
        actor = record.operation.actor
        assert (actor.issuer, actor.subject, actor.client_id) == (
            guarded.issuer.issuer,
            "gateway",
            "client",
        )


async def test_requests_are_their_owners_to_abort(guarded: Guarded) -> None:
    mine, other = guarded.token(INFERENCE, "me"), guarded.token(INFERENCE, "somebody")
    async with (
        guarded.client(guarded.token(ADMIN), mine) as me,
        guarded.client(inference=other) as somebody,
    ):
        guarded.engine.stall()
        running = me.generate()
        await running.first()

        async def abort(client: Client, request_id: str) -> Any:
            return await client.reading.Abort(
                lifecycle_pb2.AbortRequest(request_id=request_id),
                timeout=10,
                metadata=client.inference_metadata,
            )

        # Somebody else's request and one that is not there look the same.
        refusals = []
        for name in (running.request_id, "not there"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await abort(somebody, name)
            refusals.append(refusal_of(caught.value))
        assert refusals[0] == refusals[1]
        assert (refusals[0].code, refusals[0].reason) == (Code.NOT_FOUND, "REQUEST_NOT_FOUND")
        assert not running.done
        await abort(me, running.request_id)
        assert await running.finish_reason() == "CANCELLED"
        with pytest.raises(grpc.aio.AioRpcError):
            await abort(somebody, running.request_id)
        again = await abort(me, running.request_id)
        assert again.status == lifecycle_pb2.AbortStatus.ABORT_STATUS_ALREADY_FINISHED

        # An administrator may end anybody's.
        running = me.generate()
        await running.first()
        await me.control.Abort(
            lifecycle_pb2.AbortRequest(request_id=running.request_id),
            timeout=10,
            metadata=me.admin_metadata,
        )
        assert await running.finish_reason() == "CANCELLED"


async def test_a_verifier_that_breaks_lets_nobody_in(tmp_path: Path) -> None:
    class Broken:
        async def verify(self, token: str) -> Any:
            raise ZeroDivisionError("secret detail")

    settings = KitSettings(data_dir=tmp_path, admin_verifier=Broken(), inference_verifier=Broken())
    server = EngineServer(MinimalEngine(), settings)
    await server.start()
    async with client_of(server, admin_token="token", inference_token="token") as client:
        for seen in (
            await refused(client.stream(client.pause())),
            await client.generate().refused(),
        ):
            assert (seen.code, seen.reason) == (Code.INTERNAL, "INTERNAL")
            assert "secret" not in seen.message
    await server.stop(0)


def test_a_server_that_is_not_started_has_no_address(tmp_path: Path) -> None:
    server = EngineServer(MinimalEngine(), KitSettings(data_dir=tmp_path, insecure_loopback=True))
    with pytest.raises(RuntimeError, match="not started"):
        _ = server.admin_address


# ---- where one may listen ----


class Anyone:
    async def verify(self, token: str) -> Any:
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "without a verifier"),
        ({"insecure_loopback": True, "admin_address": "0.0.0.0:0"}, "without a verifier"),
        ({"insecure_loopback": True, "inference_address": "engine.test:0"}, "without a verifier"),
        ({"admin_verifier": Anyone(), "insecure_loopback": False}, "inference listener"),
        (
            {
                "admin_verifier": Anyone(),
                "insecure_loopback": True,
                "admin_address": "0.0.0.0:0",
            },
            "need TLS",
        ),
        ({"insecure_loopback": True, "admin_address": "unix:relative"}, "absolute"),
        ({"insecure_loopback": True, "admin_address": "127.0.0.1"}, "host:port"),
        ({"insecure_loopback": True, "admin_address": "127.0.0.1:99999"}, "host:port"),
        ({"insecure_loopback": True, "key_retention_ms": 1}, "24 hours"),
        ({"insecure_loopback": True, "default_deadline_ms": 0}, "default_deadline_ms"),
        (
            {"insecure_loopback": True, "default_hold_limit_ms": 10, "max_hold_limit_ms": 5},
            "default_hold_limit_ms",
        ),
        ({"insecure_loopback": True, "max_held_requests": 0}, "max_held_requests"),
    ],
)
def test_settings_that_must_not_be_started_with(
    fields: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        KitSettings(data_dir=tmp_path, **fields)


def test_settings_that_are_safe(tmp_path: Path) -> None:
    for fields in (
        {"admin_address": "[::1]:0"},
        {"admin_address": "localhost:0"},
        {"admin_address": "unix:/tmp/x"},
        {
            "admin_verifier": Anyone(),
            "admin_address": "0.0.0.0:0",
            "plaintext_beyond_loopback": True,
        },
    ):
        more: dict[str, Any] = {"insecure_loopback": True, **fields}
        assert KitSettings(data_dir=tmp_path, **more)


async def test_a_unix_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    settings = KitSettings(
        data_dir=tmp_path / "data", admin_address=f"unix:{path}", insecure_loopback=True
    )
    server = EngineServer(MinimalEngine(), settings)
    await server.start()
    assert server.admin_address == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with client_of(server) as client:
        assert (await client.completed(client.pause())).changed
    await server.stop(0)
    assert not path.exists()


async def test_reflection_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    for asked in (False, True):
        settings = KitSettings(
            data_dir=tmp_path / str(asked), insecure_loopback=True, reflection=asked
        )
        server = EngineServer(MinimalEngine(), settings)
        await server.start()
        async with grpc.aio.insecure_channel(server.admin_address) as channel:
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            call: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([ask]), timeout=10
            )
            if asked:
                (answer,) = [answer async for answer in call]
                names = {service.name for service in answer.list_services_response.service}
                assert "openengine.v1.OpenEngineAdmin" in names
                assert "openengine.v1.Inference" not in names
            else:
                assert (await refused(call)).code is Code.UNIMPLEMENTED
        await server.stop(0)


# ---- TLS ----


def make_certificate(folder: Path, name: str, ca: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """A certificate, self-signed or by `ca`, in `name.crt` and `name.key`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer, signing_key = (subject, key) if ca is None else (ca[0].subject, ca[1])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(utc_now() - timedelta(hours=1))
        .not_valid_after(utc_now() + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("engine.test")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=ca is None, path_length=None), critical=True)
        .sign(signing_key, hashes.SHA256())
    )
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, key


async def test_mutual_tls(tmp_path: Path) -> None:
    ca = make_certificate(tmp_path, "ca")
    for name in ("server", "client"):
        make_certificate(tmp_path, name, ca)
    make_certificate(tmp_path, "stranger")
    settings = KitSettings(
        data_dir=tmp_path / "data",
        insecure_loopback=True,
        admin_tls=TlsFiles(
            certificate=tmp_path / "server.crt",
            key=tmp_path / "server.key",
            client_ca=tmp_path / "ca.crt",
        ),
    )
    server = EngineServer(MinimalEngine(), settings)
    await server.start()

    async def profile(name: str | None) -> admin_pb2.AdminProfile:
        files = (
            [(tmp_path / f"{name}.{end}").read_bytes() for end in ("key", "crt")] if name else []
        )
        credentials = grpc.ssl_channel_credentials(
            (tmp_path / "ca.crt").read_bytes(), *(files or (None, None))
        )
        options = (("grpc.ssl_target_name_override", "engine.test"),)
        async with grpc.aio.secure_channel(
            server.admin_address, credentials, options=options
        ) as channel:
            stub = admin_pb2_grpc.OpenEngineAdminStub(channel)
            return await stub.GetAdminProfile(admin_pb2.GetAdminProfileRequest(), timeout=10)

    assert (await profile("client")).instance_id == server.instance_id
    for wrong in (None, "stranger"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await profile(wrong)
        assert caught.value.code() is Code.UNAVAILABLE
    # The other listener has no TLS of its own here, and still answers.
    async with grpc.aio.insecure_channel(server.inference_address) as channel:
        info = await openengine_pb2_grpc.ControlStub(channel).GetServerInfo(
            server_pb2.GetServerInfoRequest(), timeout=10
        )
        assert info.instance_id == server.instance_id
    await server.stop(0)


async def test_a_replaced_certificate_counts_from_the_next_connection(tmp_path: Path) -> None:
    authorities = {name: make_certificate(tmp_path, name) for name in ("ca", "ca2")}
    make_certificate(tmp_path, "server", authorities["ca"])
    files = TlsFiles(certificate=tmp_path / "server.crt", key=tmp_path / "server.key")
    settings = KitSettings(data_dir=tmp_path / "data", insecure_loopback=True, admin_tls=files)
    server = EngineServer(MinimalEngine(), settings)
    await server.start()

    async def shows_one_of(authority: str) -> bool:
        credentials = grpc.ssl_channel_credentials((tmp_path / f"{authority}.crt").read_bytes())
        options = (
            ("grpc.ssl_target_name_override", "engine.test"),
            ("grpc.use_local_subchannel_pool", 1),
        )
        async with grpc.aio.secure_channel(
            server.admin_address, credentials, options=options
        ) as channel:
            stub = admin_pb2_grpc.OpenEngineAdminStub(channel)
            try:
                await stub.GetAdminProfile(admin_pb2.GetAdminProfileRequest(), timeout=10)
            except grpc.aio.AioRpcError as error:
                if error.code() is not Code.UNAVAILABLE:
                    raise
                return False
            return True

    assert await shows_one_of("ca")
    make_certificate(tmp_path, "later", authorities["ca2"])
    (tmp_path / "later.crt").replace(files.certificate)
    # The certificate is new and the key still old: the ones before go on.
    assert await shows_one_of("ca")
    (tmp_path / "later.key").replace(files.key)
    assert await shows_one_of("ca2")
    assert not await shows_one_of("ca")
    await server.stop(0)


async def test_files_of_tls_that_are_not_there(tmp_path: Path) -> None:
    missing = TlsFiles(certificate=tmp_path / "none.crt", key=tmp_path / "none.key")
    settings = KitSettings(data_dir=tmp_path, insecure_loopback=True, admin_tls=missing)
    with pytest.raises(FileNotFoundError):
        await EngineServer(MinimalEngine(), settings).start()
