"""Each provider's tokens, judged with the configuration that the documentation gives for it."""

from __future__ import annotations

import json
import re
import ssl
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.auth.tokens.errors import TokenInvalid
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.verifier import TokenVerifier
from app.settings import Settings
from app.startup import issuers_of
from tests.auth.conftest import Clock
from tests.auth.made_tokens import RSA, signed
from tests.auth.vendors import SHAPES, Shape

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[2] / "docs" / "authorization.md"
_BLOCK = re.compile(r"^#### (?P<name>.+?)\n.*?^```toml\n(?P<toml>.*?)^```", re.M | re.S)


def documented() -> dict[str, IssuerConfig]:
    """The configurations of the page, by their headings, as a gateway would read them."""
    page = PAGE.read_text(encoding="utf-8")
    chapter = page[page.index("### Ready configurations") :]
    chapter = chapter[: chapter.index("\n## ")]
    found = {}
    for block in _BLOCK.finditer(chapter):
        settings = Settings(**tomllib.loads(block["toml"]))
        (found[block["name"]],) = issuers_of(settings)
    return found


CONFIGURATIONS = documented()


class Body(httpx2.AsyncByteStream):
    """Read as it comes, as from a network."""

    def __init__(self, document: Any) -> None:
        self._text = json.dumps(document).encode()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._text


def served(request: httpx2.Request) -> httpx2.Response:
    """The metadata and keys of whichever issuer is asked: one key signs for all of them."""
    if request.url.path.endswith("/keys"):
        return httpx2.Response(200, stream=Body({"keys": [RSA.as_dict(private=False)]}))
    asked = str(request.url).removesuffix("/.well-known/openid-configuration")
    (issuer,) = {c.issuer for c in CONFIGURATIONS.values() if c.issuer.rstrip("/") == asked}
    keys = "https://keys.example/keys"
    return httpx2.Response(200, stream=Body({"issuer": issuer, "jwks_uri": keys}))


@pytest.fixture
async def elsewhere(tls: ssl.SSLContext) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.MockTransport(served)
    async with httpx2.AsyncClient(verify=tls, transport=transport) as client:
        yield client


def made(shape: Shape) -> str:
    claims: dict[str, Any] = {k: v for k, v in shape.claims.items() if v is not ...}
    typ: Any = ... if shape.typ is None else shape.typ
    return signed(json.loads(json.dumps(claims)), alg="RS256", typ=typ)


@pytest.mark.parametrize("case", SHAPES)
async def test_gives_what_it_must_and_no_more(
    case: str, elsewhere: httpx2.AsyncClient, clock: Clock
) -> None:
    shape = SHAPES[case]
    verifier = TokenVerifier(
        [CONFIGURATIONS[shape.settings]],
        http=elsewhere,
        now=clock.now,
        monotonic=clock.monotonic,
    )
    if shape.refused is not None:
        with pytest.raises(TokenInvalid) as caught:
            await verifier.verify(made(shape))
        assert caught.value.reason == shape.refused
        return
    who = await verifier.verify(made(shape))
    assert who.scopes == shape.scopes
    assert (who.kind, who.audience) == (shape.kind, shape.audience)
    assert who.client_id == (shape.client or who.client_id)
    assert who.subject == (shape.subject or who.subject)


def test_every_configuration_of_the_page_has_its_shapes() -> None:
    used = {shape.settings for shape in SHAPES.values()}
    assert used == CONFIGURATIONS.keys()
    for name in used:
        of_it = [shape for shape in SHAPES.values() if shape.settings == name]
        assert any(shape.refused is None and shape.scopes for shape in of_it)
        assert any(shape.refused == "TOKEN_TYPE_REFUSED" for shape in of_it) or (
            name == "Keycloak, by client roles"
        )
