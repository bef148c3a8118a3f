"""Credentials against an engine with an issuer of its own: right ones, and each way to be wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.auth.principal import AudienceKind, Principal
from app.auth.tokens.errors import TokenInvalid
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.verifier import TokenVerifier
from app.conformance.case import Verdict
from app.conformance.connection import Listener
from app.conformance.tampering import forgeries
from app.conformance.trial import Options
from app.devidp.issuer import DevIssuer
from tests.auth.conftest import Origin
from tests.conformance.judging import failures, ids_of, judged, options_for, paced_engine
from tests.doubles.engine import EngineDouble

pytestmark = pytest.mark.anyio
ADMIN, INFERENCE = "engine-admin", "engine-inference"


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Judged:
    """An engine with an issuer, and options with good tokens and with bad ones."""

    double: EngineDouble
    options: Options


@asynccontextmanager
async def engine_of_an_issuer(
    folder: Path,
    admin: Callable[[Any], Any] = lambda verifier: verifier,
    inference: Callable[[Any], Any] = lambda verifier: verifier,
) -> AsyncIterator[Judged]:
    """`admin`, `inference`: what each listener has instead of the verifier."""
    origin = Origin()
    await origin.start()
    issuer = DevIssuer(origin.url, now=utc_now)
    origin.publish(issuer)
    stranger = DevIssuer(origin.url, now=utc_now)
    async with httpx2.AsyncClient(timeout=10) as http:
        config = IssuerConfig(
            issuer=issuer.issuer, audience=ADMIN, inference_audiences=(INFERENCE,)
        )
        verifier = TokenVerifier([config], http=http, now=utc_now)
        try:
            async with paced_engine(
                folder, admin_verifier=admin(verifier), inference_verifier=inference(verifier)
            ) as double:
                yield Judged(double, _options(double, issuer, stranger))
        finally:
            await verifier.aclose()
            await origin.stop()


def _options(double: EngineDouble, issuer: DevIssuer, stranger: DevIssuer) -> Options:
    def minted(audience: str, of: DevIssuer = issuer, **claims: Any) -> str:
        return of.mint("gateway", "gateway", ["admin:pause"], audience, **claims)

    return options_for(
        double,
        admin=Listener(address=double.admin_address, token=minted(ADMIN)),
        inference=Listener(address=double.inference_address, token=minted(INFERENCE)),
        refused_tokens=(
            ("expired", minted(ADMIN, ttl_s=-3600)),
            ("for another audience", minted("somewhere-else")),
            ("of another issuer", minted(ADMIN, of=stranger)),
            ("of another issuer by name", minted(ADMIN, iss="https://elsewhere.example")),
            ("for inference", minted(INFERENCE)),
            ("garbage", "garbage"),
        ),
    )


async def test_an_engine_with_an_issuer_passes(tmp_path: Path) -> None:
    async with engine_of_an_issuer(tmp_path) as judging:
        report = await judged(judging.options, "credentials.*", "listener.*", "pause.*", "health.*")
    assert not failures(report)
    # The minimal engine has no adapters, and is asked for none.
    assert not ids_of(report, Verdict.NOT_APPLICABLE)


class Believing:
    """Takes a token at its own word where the refusal's reason is among `forgiven`."""

    forgiven: tuple[str, ...]

    def __init__(self, verifier: TokenVerifier) -> None:
        self._verifier = verifier

    async def verify(self, token: str) -> Principal:
        try:
            return await self._verifier.verify(token)
        except TokenInvalid as refused:
            if refused.reason not in self.forgiven:
                raise
            body = token.split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
            return Principal(
                issuer=claims["iss"],
                subject=claims["sub"],
                client_id="",
                scopes=frozenset(),
                expires_at=utc_now(),
                audience=AudienceKind.ADMIN,
            )


class Unsigned(Believing):
    forgiven = ("TOKEN_SIGNATURE_INVALID", "TOKEN_ALGORITHM_REFUSED", "TOKEN_MALFORMED")


class NeverExpires(Believing):
    forgiven = ("TOKEN_EXPIRED",)


class AnyAudience:
    """Whoever has a token of the issuer's may do everything."""

    def __init__(self, verifier: TokenVerifier) -> None:
        self._verifier = verifier

    async def verify(self, token: str) -> Principal:
        return replace(await self._verifier.verify(token), audience=AudienceKind.ADMIN)


async def test_an_engine_that_does_not_check_signatures_is_caught(tmp_path: Path) -> None:
    async with engine_of_an_issuer(tmp_path, admin=Unsigned) as judging:
        report = await judged(judging.options, "credentials.forged", "credentials.refused")
    assert ids_of(report, Verdict.FAIL) == {"credentials.forged", "credentials.refused"}


async def test_an_engine_that_takes_every_audience_is_caught(tmp_path: Path) -> None:
    async with engine_of_an_issuer(tmp_path, admin=AnyAudience) as judging:
        report = await judged(judging.options, "credentials.*")
    assert ids_of(report, Verdict.FAIL) == {"credentials.of-inference", "credentials.refused"}


async def test_an_engine_that_takes_expired_tokens_is_caught(tmp_path: Path) -> None:
    async with engine_of_an_issuer(tmp_path, admin=NeverExpires) as judging:
        report = await judged(judging.options, "credentials.refused")
    assert ids_of(report, Verdict.FAIL) == {"credentials.refused"}


async def test_an_inference_listener_that_asks_for_nothing_is_caught(tmp_path: Path) -> None:
    async with engine_of_an_issuer(tmp_path) as judging, paced_engine(tmp_path / "open") as other:
        inference = Listener(address=other.inference_address, token="a.b.c")
        options = options_for(other, inference=inference)
        report = await judged(options, "credentials.inference-required")
        assert ids_of(report, Verdict.FAIL) == {"credentials.inference-required"}
        assert judging.options.inference is not None


async def test_one_listener_for_everything_is_caught(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double:
        everything = Listener(address=double.admin_address)
        report = await judged(options_for(double, inference=everything), "listener.no-orders")
    assert ids_of(report, Verdict.FAIL) == {"listener.no-orders"}


async def test_a_token_that_is_no_jwt_cannot_be_tampered_with(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double:
        admin = Listener(address=double.admin_address, token="opaque")
        report = await judged(options_for(double, admin=admin), "credentials.forged")
    (finding,) = report.findings
    assert finding.verdict is Verdict.NOT_APPLICABLE
    assert "no signed JWT" in finding.reason


def test_each_forgery_differs_from_the_token() -> None:
    token = DevIssuer("http://127.0.0.1:1", now=utc_now).mint("a", "b", [], "c")
    counterfeits = forgeries(token)
    assert token not in counterfeits
    assert len(set(counterfeits)) == len(counterfeits)


@pytest.mark.parametrize("token", ["", "a", "a.b", "a.b.c", "e30.e30.", "W10.W10.YQ", "é.é.é"])
def test_what_is_no_jwt_is_not_tampered_with(token: str) -> None:
    with pytest.raises(ValueError, match="not a signed JWT"):
        forgeries(token)
