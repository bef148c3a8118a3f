"""What a route needs of a caller, with real tokens and down to the request's headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.params import Depends
from starlette.requests import Request

from app.auth.identities.known import (
    LOCAL_ISSUER,
    CompatIdentity,
    Identities,
    IdentityRefused,
    Showing,
    SocketPeer,
    UnixSocket,
)
from app.auth.policy.live import LivePolicy
from app.auth.policy.reading import read_policy
from app.auth.policy.rules import RefusedByPolicy
from app.auth.principal import PrincipalKind
from app.auth.requires import (
    About,
    Gate,
    Need,
    PersonNeeded,
    Public,
    ReadOnly,
    Requires,
    declared,
    permit_of,
    refused_besides,
)
from app.auth.tokens.errors import (
    InsufficientScope,
    ProofInvalid,
    ProofRefused,
    TokenExpired,
    TokenMissing,
    TokenUnbound,
)
from app.auth.tokens.issuers import DpopUse
from app.clock import SystemClock
from app.domain.errors import UnknownEngine
from app.domain.operation import Actor
from app.domain.scopes import Scope
from app.domain.selectors import Selector
from tests.auth.conftest import ADMIN, Clock, Verifiers
from tests.auth.made_tokens import NOW
from tests.auth.policies import principal
from tests.auth.proving import Holder

pytestmark = pytest.mark.anyio

HERE = "https://gateway.test"
READ, PAUSE = Scope.READ, Scope.PAUSE


def token(verifiers: Verifiers, *scopes: str, sub: str = "ops", **claims: Any) -> str:
    return verifiers.issuer.mint(sub, "console", list(scopes), ADMIN, 600, **claims)


def request(gate: Gate, *headers: tuple[str, str], method: str = "GET") -> Request:
    return Request(
        {
            "type": "http",
            "method": method,
            "path": "/v1/engines/e/1",
            "raw_path": b"/v1/engines/e%2F1",
            "query_string": b"a=b",
            "headers": [(name.encode(), value.encode()) for name, value in headers],
            "state": {"gate": gate},
        }
    )


def bearing(gate: Gate, shown: str) -> Request:
    return request(gate, ("authorization", f"Bearer {shown}"))


def policy(text: str) -> LivePolicy:
    live = LivePolicy(None)
    live.policy = read_policy(text.encode())
    return live


PAUSERS = """
[[rules]]
name = "pausers"
who = "anyone"
scopes = ["admin:pause"]
engines = { labels = { team = "x" } }
[[rules]]
name = "pausers of one"
who = "anyone"
scopes = ["admin:pause"]
engines = { id = "e2" }
"""


async def test_every_scope_that_is_named_is_needed(verifiers: Verifiers) -> None:
    gate = Gate(verifiers.make())
    for scopes, need, let_in in [
        ((READ, PAUSE), Need((READ, PAUSE)), True),
        ((READ,), Need((READ, PAUSE)), False),
        ((PAUSE,), Need(()), True),
        ((), Need(()), False),
    ]:
        asked = bearing(gate, token(verifiers, *scopes))
        if let_in:
            assert await need(asked) is asked.state.principal
            assert asked.state.principal.scopes == set(scopes)
            assert permit_of(asked).caller is asked.state.principal
        else:
            with pytest.raises(InsufficientScope) as caught:
                await need(asked)
            assert caught.value.required == tuple(sorted(need.scopes))
        assert asked.state.asked_scopes == need.scopes


async def test_the_second_time_the_token_is_not_looked_at_and_all_that_was_asked_is_known(
    verifiers: Verifiers, clock: Clock
) -> None:
    gate = Gate(verifiers.make())
    asked = bearing(gate, token(verifiers, READ, PAUSE))
    first = await Need((READ,)).admit(asked)
    clock.advance(3600)
    assert await Need((PAUSE, READ)).admit(asked) is first
    assert asked.state.asked_scopes == (READ, PAUSE)
    with pytest.raises(TokenExpired):
        await Need((READ,)).again(asked)


async def test_without_a_token_there_is_nobody(verifiers: Verifiers) -> None:
    gate = Gate(verifiers.make())
    for headers in ([], [("authorization", "Basic x")], [("authorization", "DPoP x")]):
        with pytest.raises(TokenMissing):
            await Need((READ,)).admit(request(gate, *headers))


async def test_what_is_shown_besides_tokens_counts_where_no_token_is(verifiers: Verifiers) -> None:
    here = SocketPeer("/run/rl.sock", 7)
    identity = CompatIdentity(
        name="rl",
        scopes=frozenset({Scope.READ}),
        engines=Selector(ids=frozenset({"e1"})),
        shows=UnixSocket(Path("/run/rl.sock"), 7),
    )
    gate = Gate(verifiers.make(), identities=Identities([identity], SystemClock()))

    def showing(what: Showing, *headers: tuple[str, str]) -> Request:
        made = request(gate, *headers)
        made.state.shown = what
        return made

    by_socket = showing(Showing(peer=here))
    who = await Need((READ,)).admit(by_socket)
    assert (who.issuer, who.subject, who.client_id) == (LOCAL_ISSUER, "rl", "unix_socket")
    assert permit_of(by_socket).scopes_on("e1", {}) == {Scope.READ}
    assert permit_of(by_socket).scopes_on("e2", {}) == frozenset()
    with pytest.raises(InsufficientScope):
        await Need((Scope.PAUSE,)).admit(by_socket)
    bearer = ("authorization", f"Bearer {token(verifiers, 'admin:read')}")
    assert (await Need((READ,)).admit(showing(Showing(peer=here), bearer))).subject == "ops"
    unknown = Showing(peer=here, digest=b"x" * 32)
    for headers in ((), (bearer,)):
        with pytest.raises(UnknownEngine):
            await Need((READ,)).admit(showing(unknown, *headers))
    marked = showing(Showing(peer=here, browser=True))
    with pytest.raises(IdentityRefused):
        await Need((READ,)).admit(marked)
    assert marked.state.actor == Actor(LOCAL_ISSUER, "rl", "unix_socket")
    with pytest.raises(TokenMissing):
        await Need((READ,)).admit(showing(Showing(peer=None)))
    with pytest.raises(TokenMissing):  # elsewhere, or where nobody is known
        await Need((READ,)).admit(request(gate))
    gate = Gate(verifiers.make())
    with pytest.raises(TokenMissing):
        await Need((READ,)).admit(showing(Showing(peer=here)))


async def test_the_policy_has_to_leave_the_scope_on_the_engine(verifiers: Verifiers) -> None:
    gate = Gate(verifiers.make(), policy=policy(PAUSERS))
    asked = bearing(gate, token(verifiers, READ, PAUSE))
    with pytest.raises(RefusedByPolicy) as caught:
        await Need((READ,)).admit(asked)
    assert caught.value.message == ("The gateway's policy does not leave you the scope admin:read.")
    assert await Need((PAUSE,)).admit(asked)
    assert (await Need((PAUSE,)).again(asked)).scopes() == {PAUSE}
    with pytest.raises(RefusedByPolicy):
        await Need((READ,)).again(asked)
    asked.state.about = About("e1", {"team": "x"})
    assert await Need((PAUSE,)).admit(asked)
    with pytest.raises(RefusedByPolicy) as caught:
        await Need((READ, PAUSE)).admit(asked)
    assert caught.value.message.endswith("the scope admin:read on this engine.")
    asked.state.about = About("e1", {"team": "y"})
    with pytest.raises(UnknownEngine):
        await Need((PAUSE,)).admit(asked)
    asked.state.about = About("e2", {"team": "y"})
    assert await Need((PAUSE,)).admit(asked)


async def test_what_the_settings_have_against_it(verifiers: Verifiers) -> None:
    machine = bearing(
        Gate(verifiers.make(), read_only=True), token(verifiers, READ, PAUSE, sub="console")
    )
    assert await Need((READ,)).admit(machine)
    with pytest.raises(ReadOnly):
        await Need((READ, PAUSE)).admit(machine)
    machine.state.gate = Gate(verifiers.make())
    with pytest.raises(PersonNeeded):
        await Need((READ,), person=True).admit(machine)
    machine.state.gate = Gate(verifiers.make(), clients_count_as_persons=True)
    assert await Need((READ,), person=True).admit(machine)


@pytest.mark.parametrize(
    ("scopes", "person", "kind", "read_only", "clients_too", "refusal"),
    [
        ((READ, Scope.AUDIT), False, PrincipalKind.CLIENT, True, False, None),
        ((), False, PrincipalKind.CLIENT, True, False, None),
        ((PAUSE,), False, PrincipalKind.PERSON, True, True, ReadOnly),
        ((PAUSE,), False, PrincipalKind.CLIENT, False, False, None),
        ((PAUSE,), True, PrincipalKind.CLIENT, False, False, PersonNeeded),
        ((PAUSE,), True, PrincipalKind.CLIENT, False, True, None),
        ((PAUSE,), True, PrincipalKind.PERSON, False, False, None),
    ],
)
def test_each_setting_counts_by_itself(
    scopes: tuple[Scope, ...],
    person: bool,
    kind: PrincipalKind,
    read_only: bool,
    clients_too: bool,
    refusal: type[Exception] | None,
) -> None:
    found = refused_besides(
        Need(scopes, person),
        principal(*Scope, kind=kind),
        read_only=read_only,
        clients_too=clients_too,
    )
    assert found is None if refusal is None else type(found) is refusal


# ---- proofs


async def test_a_bound_token_comes_with_one_proof_for_the_path_as_it_was_sent(
    verifiers: Verifiers, clock: Clock
) -> None:
    holder = Holder()
    bound = token(verifiers, READ, cnf=holder.binding)
    gate = Gate(verifiers.make(verifiers.config(dpop=DpopUse.ALLOWED)), dpop_at=HERE)

    def proven(*proofs: str, shown: str = bound, method: str = "GET") -> Request:
        headers = [("authorization", f"DPoP {shown}"), *(("dpop", proof) for proof in proofs)]
        return request(gate, *headers, method=method)

    def proof(path: str = "/v1/engines/e%2F1", shown: str = bound, **how: Any) -> str:
        return holder.proof(shown, HERE + path, at=NOW, **how)

    asked = proven(proof())
    assert (await Need((READ,)).admit(asked)).subject == "ops"
    assert (await Need((READ,)).again(asked)).caller.subject == "ops"  # the proof is used up
    for proofs in ((), (proof(), proof())):
        with pytest.raises(ProofInvalid):
            await Need((READ,)).admit(proven(*proofs))
    for wrong in (proven(proof("/v1/engines/e/1")), proven(proof(), method="POST")):
        with pytest.raises(ProofRefused):
            await Need((READ,)).admit(wrong)
    assert await Need((READ,)).admit(proven(proof(method="POST"), method="POST"))
    plain = token(verifiers, READ)
    with pytest.raises(TokenUnbound):
        await Need((READ,)).admit(proven(proof(shown=plain), shown=plain))
    off = request(Gate(gate.verifier), ("authorization", f"DPoP {bound}"))
    for judge in (Need((READ,)).admit, Need((READ,)).again):
        with pytest.raises(TokenMissing):
            await judge(off)


# ---- the declaration


def test_what_a_route_says_about_itself() -> None:
    need = Requires(READ, PAUSE, person=True)
    assert isinstance(need, Depends)
    assert need.dependency == Need((READ, PAUSE), person=True)
    assert Requires().dependency == Need((), person=False)
    found = declared([None, print, need.dependency])
    assert found is not None
    assert found.need is need.dependency
    public = declared([Public.dependency])
    assert public is not None
    assert public.need is None
    assert declared([]) is declared([None, print]) is None
    for twice in ([need.dependency] * 2, [need.dependency, Public.dependency]):
        with pytest.raises(ValueError, match="once"):
            declared(twice)
