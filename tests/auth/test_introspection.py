"""Asking an issuer about tokens: when, how often, what is made of the answer, and of none."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.auth.principal import AudienceKind, PrincipalKind
from app.auth.tokens.errors import ClaimInvalid, ClaimMissing, IssuerUnavailable, TokenInvalid
from app.auth.tokens.introspection import IntrospectionTimings
from app.auth.tokens.issuers import (
    ClientAuth,
    Introspected,
    IntrospectionConfig,
    IssuerConfigError,
    TokenProfile,
)
from app.auth.tokens.jwks import IssuerState
from app.domain.scopes import Scope
from tests.auth.conftest import ADMIN, INFERENCE, Clock, Origin, Verifiers
from tests.auth.made_tokens import NOW

pytestmark = pytest.mark.anyio

PATH = "/introspect"
TOKEN = "3Yk-opaque_token.of~the+issuer/="


@dataclass
class Asked:
    """A verifier whose issuer takes opaque tokens, and what the issuer says of them."""

    verifiers: Verifiers
    origin: Origin
    secret: Path

    def settings(self, **changes: Any) -> IntrospectionConfig:
        table: dict[str, Any] = {
            "client_id": "chadburn gateway",
            "client_secret_file": self.secret,
            "endpoint": f"{self.origin.url}{PATH}",
            **changes,
        }
        return IntrospectionConfig(**table)

    def make(self, asks: IntrospectionConfig | None = None, **changes: Any) -> Any:
        options = {
            name: changes.pop(name) for name in ("introspection_timings",) if name in changes
        }
        config = self.verifiers.config(introspection=asks or self.settings(), **changes)
        return self.verifiers.make(config, **options)

    def says(self, **claims: Any) -> None:
        self.origin.say(PATH, json.dumps(self.answer(**claims)).encode())

    def answer(self, **claims: Any) -> dict[str, Any]:
        """A good one; an override of ``...`` leaves the claim out."""
        table: dict[str, Any] = {
            "active": True,
            "iss": self.verifiers.issuer.issuer,
            "sub": "ops",
            "aud": ADMIN,
            "client_id": "console",
            "scope": "admin:read admin:pause",
            "exp": NOW + 600,
            "token_type": "Bearer",
            **claims,
        }
        return {name: value for name, value in table.items() if value is not ...}


@pytest.fixture
def asked(verifiers: Verifiers, origin: Origin, tmp_path: Path) -> Asked:
    secret = tmp_path / "secret"
    secret.write_text("s3cret: of +us\n")
    made = Asked(verifiers, origin, secret)
    made.says()
    return made


async def refusal(verifier: Any, token: str = TOKEN) -> str:
    with pytest.raises(TokenInvalid) as caught:
        await verifier.verify(token)
    return caught.value.reason


async def test_takes_what_the_issuer_says(asked: Asked) -> None:
    who = await asked.make().verify(TOKEN)
    assert (who.subject, who.client_id, who.kind) == ("ops", "console", PrincipalKind.PERSON)
    assert who.scopes == {Scope.READ, Scope.PAUSE}
    assert who.expires_at.timestamp() == NOW + 600
    ((headers, form),) = asked.origin.posted
    assert form == {"token": TOKEN, "token_type_hint": "access_token"}
    assert (headers["accept"], headers["accept-encoding"]) == ("application/json", "identity")
    scheme, _, pair = headers["authorization"].partition(" ")
    assert scheme == "Basic"
    assert base64.b64decode(pair) == b"chadburn+gateway:s3cret%3A+of+%2Bus"


async def test_shows_itself_in_the_form_where_so_set(asked: Asked) -> None:
    await asked.make(asked.settings(client_auth=ClientAuth.POST)).verify(TOKEN)
    ((headers, form),) = asked.origin.posted
    assert form == {
        "token": TOKEN,
        "token_type_hint": "access_token",
        "client_id": "chadburn gateway",
        "client_secret": "s3cret: of +us",
    }
    assert "authorization" not in headers


async def test_finds_the_endpoint_in_the_metadata(asked: Asked) -> None:
    metadata = asked.verifiers.issuer.metadata()
    metadata["introspection_endpoint"] = f"{asked.origin.url}{PATH}"
    asked.origin.say("/.well-known/openid-configuration", json.dumps(metadata).encode())
    verifier = asked.make(asked.settings(endpoint=None))
    assert await verifier.verify(TOKEN)
    assert await verifier.verify(TOKEN + "b")
    assert asked.origin.requests["/.well-known/openid-configuration"] == 1


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"active": False}, "TOKEN_INACTIVE"),
        ({"iss": ...}, "TOKEN_CLAIM_MISSING"),
        ({"iss": "https://else.test"}, "TOKEN_ISSUER_FOREIGN"),
        ({"aud": ...}, "TOKEN_CLAIM_MISSING"),
        ({"aud": "else"}, "TOKEN_AUDIENCE_FOREIGN"),
        ({"exp": ...}, "TOKEN_CLAIM_MISSING"),
        ({"exp": NOW - 31}, "TOKEN_EXPIRED"),
        ({"exp": "soon"}, "TOKEN_CLAIM_INVALID"),
        ({"nbf": NOW + 31}, "TOKEN_NOT_YET_VALID"),
        ({"sub": ...}, "TOKEN_CLAIM_MISSING"),
        ({"sub": 7}, "TOKEN_CLAIM_INVALID"),
        ({"client_id": ...}, "TOKEN_CLAIM_MISSING"),
        ({"token_type": ...}, "TOKEN_TYPE_REFUSED"),
        ({"token_type": "refresh_token"}, "TOKEN_TYPE_REFUSED"),
        ({"token_type": 7}, "TOKEN_TYPE_REFUSED"),
        ({"token_use": "refresh_token"}, "TOKEN_TYPE_REFUSED"),
        ({"typ": "Refresh"}, "TOKEN_TYPE_REFUSED"),
        ({"nonce": "n"}, "TOKEN_TYPE_REFUSED"),
        ({"cnf": {"jkt": "x"}}, "TOKEN_BOUND"),
        ({"cnf": {"x5t#S256": "x"}}, "TOKEN_BOUND"),
    ],
)
async def test_refuses(claims: dict[str, Any], reason: str, asked: Asked) -> None:
    asked.says(**claims)
    with pytest.raises(TokenInvalid) as caught:
        await asked.make().verify(TOKEN)
    assert caught.value.reason == reason
    if isinstance(caught.value, ClaimMissing | ClaimInvalid):
        assert {caught.value.claim} == set(claims)


@pytest.mark.parametrize(
    "mark", [{"typ": "Bearer"}, {"token_use": "access_token"}, {"token_use": "access"}]
)
async def test_other_marks_of_an_access_token_do(mark: dict[str, Any], asked: Asked) -> None:
    asked.says(token_type=..., **mark)
    assert await asked.make().verify(TOKEN)


async def test_inference_tokens_are_genuine_and_may_nothing(asked: Asked) -> None:
    asked.says(aud=[INFERENCE])
    who = await asked.make().verify(TOKEN)
    assert (who.audience, who.scopes) == (AudienceKind.INFERENCE, frozenset())


async def test_a_client_can_be_its_own_subject_only_where_so_set(asked: Asked) -> None:
    asked.says(sub=...)
    who = await asked.make(subject_claims=("sub", "client_id")).verify(TOKEN)
    assert (who.subject, who.client_id, who.kind) == ("console", "console", PrincipalKind.CLIENT)


@pytest.mark.parametrize(
    "body", [b"", b"no", b"[]", b"{}", b'{"active":"true"}', b'{"active":true,"active":true}']
)
async def test_an_answer_that_says_nothing_is_none(body: bytes, asked: Asked) -> None:
    asked.origin.say(PATH, body)
    with pytest.raises(IssuerUnavailable):
        await asked.make().verify(TOKEN)


# ---- how often


async def test_remembers_for_its_time_and_never_past_the_tokens_end(
    asked: Asked, clock: Clock
) -> None:
    verifier = asked.make(asked.settings(cache_s=30))
    first = await verifier.verify(TOKEN)
    clock.advance(29)
    assert await verifier.verify(TOKEN) is first
    clock.advance(1)
    asked.says(active=False)  # revoked meanwhile
    assert await refusal(verifier) == "TOKEN_INACTIVE"
    asked.says(exp=NOW + 40)
    clock.advance(5)
    assert await verifier.verify(TOKEN)
    clock.advance(5)
    asked.says(active=False)
    assert await refusal(verifier) == "TOKEN_INACTIVE"
    assert asked.origin.requests[PATH] == 4


async def test_an_inactive_token_costs_one_question_in_a_while(asked: Asked, clock: Clock) -> None:
    asked.says(active=False)
    verifier = asked.make()
    for _ in range(100):
        assert await refusal(verifier) == "TOKEN_INACTIVE"
    assert asked.origin.requests[PATH] == 1
    clock.advance(5)
    asked.says()
    assert await verifier.verify(TOKEN)


async def test_callers_with_one_token_share_one_question(asked: Asked) -> None:
    gate = asyncio.Event()
    body = json.dumps(asked.answer()).encode()
    asked.origin.say(PATH, body, gate=gate)
    verifier = asked.make()
    first = asyncio.create_task(verifier.verify(TOKEN))
    others = [asyncio.create_task(verifier.verify(TOKEN)) for _ in range(50)]
    await until_asked(asked.origin)
    first.cancel()  # hangs up, and takes nobody with it
    gate.set()
    answers = await asyncio.gather(*others)
    assert {who.subject for who in answers} == {"ops"}
    assert asked.origin.requests[PATH] == 1


async def test_only_so_many_questions_at_once(asked: Asked) -> None:
    gate = asyncio.Event()
    asked.origin.say(PATH, json.dumps(asked.answer()).encode(), gate=gate)
    verifier = asked.make(introspection_timings=IntrospectionTimings(most_at_once=2))
    waiting = [asyncio.create_task(verifier.verify(f"{TOKEN}{n}")) for n in range(2)]
    await until_asked(asked.origin)
    with pytest.raises(IssuerUnavailable) as caught:
        await verifier.verify(f"{TOKEN}x")
    assert (caught.value.issuer, caught.value.retry_after_s) == (asked.verifiers.issuer.issuer, 1)
    gate.set()
    await asyncio.gather(*waiting)
    assert await verifier.verify(f"{TOKEN}x")


# ---- when it cannot be asked


async def test_down_from_the_start_is_found_again(asked: Asked, clock: Clock) -> None:
    await asked.origin.stop()
    verifier = asked.make(algorithms=())
    await verifier.warm()
    (state,) = verifier.issuer_states()
    assert (state.ok, state.problem) == (False, "introspection: ConnectError")
    with pytest.raises(IssuerUnavailable) as caught:
        await verifier.verify(TOKEN)
    assert caught.value.retry_after_s == 1
    await asked.origin.start()
    clock.advance(1)
    await verifier.warm()  # nobody has called meanwhile
    assert verifier.issuer_states()[0].ok
    assert await verifier.verify(TOKEN)


async def test_down_later_leaves_what_is_remembered_and_answers_the_rest_at_once(
    asked: Asked, clock: Clock
) -> None:
    verifier = asked.make()
    await verifier.verify(TOKEN)
    await asked.origin.stop()
    waits: list[int] = []
    for number in range(6):
        with pytest.raises(IssuerUnavailable) as caught:
            await verifier.verify(f"{TOKEN}{number}")
        waits.append(caught.value.retry_after_s or 0)
        for _ in range(20):
            with pytest.raises(IssuerUnavailable):
                await verifier.verify(f"{TOKEN}new")
        if number == 0:
            assert await verifier.verify(TOKEN)
        clock.advance(waits[-1])
    assert waits == [1, 2, 4, 8, 15, 15]
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(TOKEN)  # its time is over, and nobody can say


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503, 302])
async def test_an_issuer_that_does_not_answer_us_is_unavailable(status: int, asked: Asked) -> None:
    """Also where it is our own secret that it refuses: the caller's token is not at fault."""
    asked.origin.say(PATH, b"", status=status, headers={"location": "/"})
    verifier = asked.make()
    for _ in range(10):
        with pytest.raises(IssuerUnavailable):
            await verifier.verify(TOKEN)
    assert asked.origin.requests[PATH] == 1
    assert not verifier.issuer_states()[0].ok


async def test_a_token_that_the_issuer_chokes_on_does_not_harm_others(asked: Asked) -> None:
    verifier = asked.make()
    asked.origin.say(PATH, b"{}", status=400)
    with pytest.raises(IssuerUnavailable) as caught:
        await verifier.verify("choke")
    assert (caught.value.issuer, caught.value.retry_after_s) == (asked.verifiers.issuer.issuer, 1)
    await verifier.warm()
    assert verifier.issuer_states()[0].ok
    assert asked.origin.requests[PATH] == 1  # it answered: that is all there is to know
    asked.says()
    assert await verifier.verify(TOKEN)


async def test_a_replaced_secret_counts_at_once_and_a_missing_one_is_no_answer(
    asked: Asked, clock: Clock
) -> None:
    verifier = asked.make(asked.settings(client_auth=ClientAuth.POST))
    asked.secret.unlink()
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(TOKEN)
    assert "client secret file" in str(verifier.issuer_states()[0].problem)
    asked.secret.write_text("another")
    clock.advance(1)
    await verifier.verify(TOKEN)
    assert asked.origin.posted[-1][1]["client_secret"] == "another"


# ---- which tokens it is asked about


async def test_nobody_is_asked_about_opaque_tokens_unless_so_set(asked: Asked) -> None:
    verifier = asked.make(asked.settings(tokens=Introspected.JWT))
    assert await refusal(verifier) == "TOKEN_MALFORMED"
    assert await refusal(asked.verifiers.make()) == "TOKEN_MALFORMED"
    assert not asked.origin.posted


@pytest.mark.parametrize("token", ["a.b.c", "e30.e30.e30", "a.b.c.d.e", "..", "x" * 4097])
async def test_what_has_the_form_of_another_token_is_never_sent(token: str, asked: Asked) -> None:
    assert await refusal(asked.make(), token) in {"TOKEN_MALFORMED", "TOKEN_TOO_LARGE"}
    assert not asked.origin.posted


async def test_jwts_are_judged_by_keys_alone_unless_so_set(asked: Asked) -> None:
    assert (await asked.make().verify(own(asked))).scopes == {Scope.READ}
    assert not asked.origin.posted


async def test_an_opaque_token_of_4096_characters_is_asked_about(asked: Asked) -> None:
    assert await asked.make().verify("x" * 4096)


async def test_a_jwt_of_another_issuer_is_never_sent(asked: Asked) -> None:
    verifier = asked.make(asked.settings(tokens=Introspected.ALL))
    foreign = asked.verifiers.issuer.mint("ops", "c", ["admin:read"], ADMIN, iss="https://o.test")
    assert await refusal(verifier, foreign) == "TOKEN_ISSUER_FOREIGN"
    head, body, signature = own(asked).split(".")
    forged = ".".join((head, body, signature[:-4] + ("AAAA" if signature[-4:] != "AAAA" else "B")))
    assert await refusal(verifier, forged) in {"TOKEN_SIGNATURE_INVALID", "TOKEN_MALFORMED"}
    assert not asked.origin.posted


def own(asked: Asked, **overrides: Any) -> str:
    return asked.verifiers.issuer.mint("ops", "console", ["admin:read"], ADMIN, 600, **overrides)


async def test_jwts_are_judged_by_both_where_so_set(asked: Asked, clock: Clock) -> None:
    verifier = asked.make(asked.settings(tokens=Introspected.JWT, cache_s=10))
    asked.says(exp=NOW + 9000)
    token = own(asked)
    who = await verifier.verify(token)
    assert who.scopes == {Scope.READ, Scope.PAUSE}  # the issuer's later word
    assert who.expires_at.timestamp() == NOW + 600  # and no longer life
    clock.advance(10)
    asked.says(active=False)
    assert await refusal(verifier, token) == "TOKEN_INACTIVE"


async def test_a_jwt_is_remembered_no_longer_than_its_key_would_have_it(
    asked: Asked, clock: Clock
) -> None:
    verifier = asked.make(asked.settings(tokens=Introspected.JWT, cache_s=120))
    asked.says(exp=NOW + 9000, jti=...)
    token = own(asked)
    first = await verifier.verify(token)
    clock.advance(59)
    assert await verifier.verify(token) is first
    clock.advance(1)
    assert await verifier.verify(token) is not first
    assert asked.origin.requests[PATH] == 2


@pytest.mark.parametrize("kind", [..., "refresh_token", "DPoP"])
async def test_an_answer_about_a_jwt_has_to_call_it_an_access_token(
    kind: Any, asked: Asked
) -> None:
    verifier = asked.make(asked.settings(tokens=Introspected.JWT))
    asked.says(token_type=kind)
    assert await refusal(verifier, own(asked)) == "TOKEN_TYPE_REFUSED"


async def test_an_answer_about_someone_else_is_refused(asked: Asked) -> None:
    verifier = asked.make(asked.settings(tokens=Introspected.JWT))
    for claims in ({"sub": "else"}, {"client_id": "else"}, {"iss": "https://else.test"}):
        asked.says(**claims)
        assert await refusal(verifier, own(asked)) == "TOKEN_CLAIM_INVALID"


async def test_an_id_token_stays_one_whatever_the_answer_says(asked: Asked) -> None:
    asks = asked.settings(tokens=Introspected.ALL)
    verifier = asked.make(asks, profile=TokenProfile.COMPATIBLE)
    asked.says()
    assert await refusal(verifier, own(asked, header={"typ": "JWT"}, nonce="n")) == (
        "TOKEN_TYPE_REFUSED"
    )


async def test_an_issuer_of_opaque_tokens_alone_needs_no_keys(asked: Asked) -> None:
    verifier = asked.make(algorithms=())
    await verifier.warm()
    well = IssuerState(
        issuer=asked.verifiers.issuer.issuer, ok=True, keys=0, age_s=None, problem=None
    )
    assert verifier.issuer_states() == (well,)
    assert await verifier.verify(TOKEN)
    assert await refusal(verifier, own(asked)) == "TOKEN_ALGORITHM_REFUSED"
    assert set(asked.origin.requests) == {PATH}


async def test_one_issuer_at_most_takes_opaque_tokens(asked: Asked) -> None:
    one = asked.verifiers.config(introspection=asked.settings())
    other = asked.verifiers.config(
        issuer="https://o.test", introspection=asked.settings(endpoint="https://o.test/i")
    )
    both = f"issuers '{one.issuer}' and 'https://o.test': .* opaque"
    with pytest.raises(IssuerConfigError, match=both):
        asked.verifiers.make(one, other)
    jwt = asked.settings(endpoint="https://o.test/i", tokens=Introspected.JWT)
    asked.verifiers.make(one, asked.verifiers.config(issuer="https://o.test", introspection=jwt))


@pytest.mark.parametrize(
    "changes",
    [
        {"client_id": ""},
        {"endpoint": "http://id.test/introspect"},
        {"endpoint": "file:///etc/passwd"},
        {"cache_s": -1},
        {"cache_s": 301},
    ],
)
def test_refuses_unsafe_settings(changes: dict[str, Any], asked: Asked) -> None:
    (setting,) = changes
    with pytest.raises(IssuerConfigError, match=rf": introspection\.{setting}: "):
        asked.make(asked.settings(**changes))


@pytest.mark.parametrize("cache_s", [0, 300])
def test_the_shortest_and_the_longest_time_of_an_answer(cache_s: int, asked: Asked) -> None:
    assert asked.make(asked.settings(cache_s=cache_s))


def test_a_remote_issuer_is_not_asked_in_plaintext_on_this_machine(asked: Asked) -> None:
    with pytest.raises(IssuerConfigError, match=r"introspection\.endpoint: needs an https URL"):
        asked.make(asked.settings(), issuer="https://id.test")


def test_no_algorithms_only_where_no_jwt_is_taken(asked: Asked) -> None:
    for tokens in (Introspected.JWT, Introspected.ALL):
        with pytest.raises(IssuerConfigError, match="algorithms"):
            asked.make(asked.settings(tokens=tokens), algorithms=())


async def until_asked(origin: Origin) -> None:
    async with asyncio.timeout(10):
        while not origin.posted:  # noqa: ASYNC110 - what is waited for is a real server's progress
            await asyncio.sleep(0.001)
