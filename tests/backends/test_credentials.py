"""What is shown to an engine, where it may be shown, and how it is renewed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from app.backends.credentials import (
    Credentials,
    CredentialSettings,
    CredentialUnavailable,
    FileBearer,
    OAuthBearer,
    OAuthClientSettings,
    TlsFiles,
)
from app.clock import SystemClock
from app.domain.errors import InvalidArgument

pytestmark = pytest.mark.anyio


class SetClock:
    def __init__(self) -> None:
        self.at = datetime(2026, 3, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.at

    def go(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


class TokenEndpoint:
    """HTTP just enough for a client credentials grant. `answers` are used up from the front."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, list[str]]]] = []
        self.answers: list[tuple[int, dict[str, object]]] = []
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(
            line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line
        )
        raw_headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = (await reader.readexactly(int(headers.get("content-length", "0")))).decode()
        shown = next((v for k, v in raw_headers.items() if k.lower() == "authorization"), "")
        self.requests.append((shown, parse_qs(body)))
        status, answer = self.answers.pop(0)
        payload = json.dumps(answer).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n".encode()
            + payload
        )
        await writer.drain()
        writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[TokenEndpoint]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/token"
        async with server:
            yield self


def token(value: str, **more: object) -> tuple[int, dict[str, object]]:
    return 200, {"access_token": value, "token_type": "Bearer", "expires_in": 600, **more}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("s3cret\n")
    return path


class TestFromAFile:
    async def test_it_is_read_again_when_it_was_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "token"
        path.write_text("one\n")
        bearer = FileBearer(path)
        assert await bearer.token() == "one"
        other = tmp_path / "other"
        other.write_text("two\n")
        os.replace(other, path)
        assert await bearer.token() == "two"

    @pytest.mark.parametrize("content", [b"", b"\n", b"a b", b"a\nb", b"\xff\xfe"])
    async def test_what_is_no_token_is_not_shown(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "token"
        path.write_bytes(content)
        with pytest.raises(CredentialUnavailable):
            await FileBearer(path).token()

    async def test_a_file_that_comes_later_is_taken(self, tmp_path: Path) -> None:
        bearer = FileBearer(tmp_path / "token")
        with pytest.raises(CredentialUnavailable):
            await bearer.token()
        (tmp_path / "token").write_text("late")
        assert await bearer.token() == "late"


class TestFromAProvider:
    async def test_one_token_serves_until_shortly_before_its_end(self, secret: Path) -> None:
        endpoint, clock = TokenEndpoint(), SetClock()
        endpoint.answers = [token("one"), token("two")]
        async with endpoint.running():
            settings = OAuthClientSettings(
                token_url=endpoint.url,
                client_id="gateway",
                client_secret_file=secret,
                scope="engine.admin",
                parameters={"resource": "https://engines.test"},
            )
            bearer = OAuthBearer(settings, clock)
            assert await asyncio.gather(*(bearer.token() for _ in range(5))) == ["one"] * 5
            clock.go(530)
            assert await bearer.token() == "one"
            clock.go(20)
            assert await bearer.token() == "two"
            await bearer.close()
        shown, body = endpoint.requests[0]
        assert base64.b64decode(shown.removeprefix("Basic ")) == b"gateway:s3cret"
        assert body["grant_type"] == ["client_credentials"]
        assert body["scope"] == ["engine.admin"]
        assert body["resource"] == ["https://engines.test"]
        assert len(endpoint.requests) == 2

    async def test_an_old_token_holds_while_it_can_not_be_renewed(self, secret: Path) -> None:
        endpoint, clock = TokenEndpoint(), SetClock()
        endpoint.answers = [token("one"), (500, {}), (500, {}), token("two")]
        async with endpoint.running():
            settings = OAuthClientSettings(
                token_url=endpoint.url, client_id="gateway", client_secret_file=secret
            )
            bearer = OAuthBearer(settings, clock)
            assert await bearer.token() == "one"
            clock.go(590)
            assert await bearer.token() == "one"
            clock.go(20)
            with pytest.raises(CredentialUnavailable):
                await bearer.token()
            assert await bearer.token() == "two"
            await bearer.close()

    async def test_one_that_was_refused_is_not_shown_again(self, secret: Path) -> None:
        endpoint = TokenEndpoint()
        endpoint.answers = [token("one"), token("two")]
        async with endpoint.running():
            settings = OAuthClientSettings(
                token_url=endpoint.url, client_id="gateway", client_secret_file=secret
            )
            bearer = OAuthBearer(settings, SystemClock())
            assert await bearer.token() == "one"
            bearer.forget()
            assert await bearer.token() == "two"
            await bearer.close()

    @pytest.mark.parametrize(
        "answer",
        [
            (400, {"error": "invalid_client"}),
            (200, {"error": "invalid_scope"}),
            (200, {"access_token": "x", "token_type": "DPoP"}),
            (200, {"token_type": "Bearer"}),
            (200, {"access_token": "a b", "token_type": "Bearer"}),
            (302, {}),
        ],
    )
    async def test_what_is_no_bearer_is_not_shown(
        self, secret: Path, answer: tuple[int, dict[str, object]]
    ) -> None:
        endpoint = TokenEndpoint()
        endpoint.answers = [answer]
        async with endpoint.running():
            settings = OAuthClientSettings(
                token_url=endpoint.url, client_id="gateway", client_secret_file=secret
            )
            bearer = OAuthBearer(settings, SystemClock())
            with pytest.raises(CredentialUnavailable) as missing:
                await bearer.token()
            assert "s3cret" not in str(missing.value)
            await bearer.close()

    async def test_a_provider_that_is_down_is_not_a_crash(self, secret: Path) -> None:
        settings = OAuthClientSettings(
            token_url="http://127.0.0.1:1/token", client_id="gateway", client_secret_file=secret
        )
        bearer = OAuthBearer(settings, SystemClock())
        with pytest.raises(CredentialUnavailable):
            await bearer.token()

    @pytest.mark.parametrize("url", ["http://idp.example/token", "ftp://x", "token", "https://"])
    def test_a_secret_is_not_sent_in_the_clear(self, secret: Path, url: str) -> None:
        with pytest.raises(ValueError, match="https"):
            OAuthClientSettings(token_url=url, client_id="g", client_secret_file=secret)


class TestEntries:
    def entries(self, tmp_path: Path) -> Credentials:
        (tmp_path / "token").write_text("t")
        return Credentials(
            {
                "anywhere": CredentialSettings(bearer_file=tmp_path / "token"),
                "bound": CredentialSettings(
                    bearer_file=tmp_path / "token",
                    bound_to=("engine.example", "10.0.0.1", "/run/e.sock"),
                    server_name="engine.example",
                    tls=TlsFiles(),
                ),
            },
            SystemClock(),
        )

    def test_none_means_plaintext_and_nothing_shown(self, tmp_path: Path) -> None:
        credential = self.entries(tmp_path).of(None, None, ("127.0.0.1:1",))
        assert (credential.encrypted, credential.bearer) == (False, None)

    def test_a_server_name_alone_asks_for_tls(self, tmp_path: Path) -> None:
        credential = self.entries(tmp_path).of(None, "engine.example", ("10.0.0.1:1",))
        assert credential.encrypted
        assert credential.server_name == "engine.example"

    def test_an_entry_goes_where_it_is_bound_to(self, tmp_path: Path) -> None:
        known = self.entries(tmp_path)
        for address in ("engine.example:1", "10.0.0.1:9", "unix:/run/e.sock"):
            credential = known.of("bound", None, (address,))
            assert credential.server_name == "engine.example"
        for address in ("evil.example:1", "10.0.0.2:1", "unix:/run/other.sock"):
            with pytest.raises(InvalidArgument) as refused:
                known.of("bound", None, ("engine.example:1", address))
            assert refused.value.faults[0].pointer == "/tls/credential"

    def test_an_entry_is_shown_to_the_name_it_is_bound_to(self, tmp_path: Path) -> None:
        known = self.entries(tmp_path)
        assert known.of("bound", "engine.example", ("10.0.0.1:1",)).encrypted
        with pytest.raises(InvalidArgument):
            known.of("bound", "other.example", ("10.0.0.1:1",))

    def test_an_unknown_entry_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument):
            self.entries(tmp_path).of("nobody", None, ())

    def test_half_an_entry_is_refused(self, tmp_path: Path, secret: Path) -> None:
        with pytest.raises(ValueError, match="not both"):
            CredentialSettings(
                bearer_file=secret,
                oauth=OAuthClientSettings(
                    token_url="https://idp.example", client_id="g", client_secret_file=secret
                ),
            )
        with pytest.raises(ValueError, match="together"):
            TlsFiles(certificate=secret)
