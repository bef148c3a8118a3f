"""Tokens bound to a key, over HTTP: proofs name the public address and count once."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from app.auth.tokens.nonces import Nonces
from app.domain.scopes import Scope
from tests.auth.proving import Holder
from tests.http.gateway import Gateway, gateway

pytestmark = pytest.mark.anyio

PUBLIC = "https://chadburn.test/gw"


class Caller:
    """Holds a key, and a token of the gateway's issuer that is bound to it."""

    def __init__(self, gate: Gateway, *scopes: str) -> None:
        self.gate = gate
        self.holder = Holder()
        self.token = gate.token(*(scopes or tuple(Scope)), cnf=self.holder.binding)

    def shows(self, path: str, method: str = "GET", **proof: Any) -> dict[str, str]:
        at = self.gate.rooms.clock.now().timestamp()
        made = self.holder.proof(
            self.token, f"{self.gate.rooms.edge.base_url}{path}", method=method, at=at, **proof
        )
        return {"Authorization": f"DPoP {self.token}", "DPoP": made}


async def test_takes_bound_tokens_where_so_set(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", trust={"dpop": "allowed"}) as gate:
        caller = Caller(gate)
        answer = await gate.http.get(
            "/v1/engines?state=serving", headers=caller.shows("/v1/engines")
        )
        assert answer.status_code == 200, answer.text
        body = {"caches": ["prefix"]}
        path = "/v1/engines/e1/flush-caches"
        sent = {**caller.shows(path, "POST"), **gate.key(), "Prefer": "wait=20"}
        answer = await gate.http.post(path, json=body, headers=sent)
        assert answer.status_code == 200, answer.text
        assert (await gate.get("/v1/me")).status_code == 200  # a plain one

        replayed = await gate.http.post(path, json=body, headers=sent)
        assert (replayed.status_code, replayed.json()["reason"]) == (401, "PROOF_REPLAYED")
        challenge = replayed.headers["www-authenticate"]
        assert challenge.startswith("DPoP ")
        assert 'error="invalid_dpop_proof"' in challenge
        assert "ES256" in challenge

        stolen = await gate.http.get("/v1/me", headers={"Authorization": f"Bearer {caller.token}"})
        assert (stolen.status_code, stolen.json()["reason"]) == (401, "TOKEN_BOUND")
        for headers, reason in (
            ({"Authorization": f"DPoP {caller.token}"}, "PROOF_INVALID"),
            (caller.shows("/v1/engines"), "PROOF_INVALID"),
            (caller.shows("/v1/me", "POST"), "PROOF_INVALID"),
            ({**caller.shows("/v1/me"), "Authorization": "DPoP"}, "TOKEN_MALFORMED"),
        ):
            answer = await gate.http.get("/v1/me", headers=headers)
            assert (answer.status_code, answer.json()["reason"]) == (401, reason)
        two = caller.shows("/v1/me")
        several = [*two.items(), ("DPoP", caller.shows("/v1/me")["DPoP"])]
        answer = await gate.http.get("/v1/me", headers=several)
        assert (answer.status_code, answer.json()["reason"]) == (401, "PROOF_INVALID")

        nothing = (await gate.http.get("/v1/me")).headers["www-authenticate"]
        assert nothing.startswith("Bearer ")
        assert ', DPoP algs="' in nothing
        metadata = (await gate.http.get("/.well-known/oauth-protected-resource")).json()
        assert "ES256" in metadata["dpop_signing_alg_values_supported"]
        assert "dpop_bound_access_tokens_required" not in metadata


async def test_a_scope_is_needed_all_the_same(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", registered=False, trust={"dpop": "allowed"}) as gate:
        caller = Caller(gate, Scope.PAUSE)
        answer = await gate.http.get("/v1/engines", headers=caller.shows("/v1/engines"))
        assert (answer.status_code, answer.json()["reason"]) == (403, "INSUFFICIENT_SCOPE")


async def test_takes_no_others_where_they_are_required(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", registered=False, trust={"dpop": "required"}) as gate:
        answer = await gate.get("/v1/me")
        assert (answer.status_code, answer.json()["reason"]) == (401, "TOKEN_UNBOUND")
        caller = Caller(gate)
        answer = await gate.http.get("/v1/me", headers=caller.shows("/v1/me"))
        assert answer.status_code == 200
        metadata = (await gate.http.get("/.well-known/oauth-protected-resource")).json()
        assert metadata["dpop_bound_access_tokens_required"] is True


async def test_a_proof_names_what_callers_see(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"public_url": PUBLIC, "allowed_hosts": ("127.0.0.1",)}
    async with gateway(
        tmp_path / "data", registered=False, trust={"dpop": "allowed"}, **settings
    ) as gate:
        at = f"http://127.0.0.1:{gate.port}"
        caller = Caller(gate)
        answer = await gate.http.get(f"{at}/v1/me", headers=caller.shows("/v1/me"))
        assert answer.status_code == 200, answer.text
        headers = caller.shows("/v1/me", htu=f"{at}/v1/me")
        answer = await gate.http.get(f"{at}/v1/me", headers=headers)
        assert answer.json()["reason"] == "PROOF_INVALID"


async def test_a_nonce_of_ours_where_it_is_wanted(tmp_path: Path) -> None:
    key = tmp_path / "nonces"
    key.write_text(base64.b64encode(b"n" * 32).decode())
    trust = {"dpop": "allowed", "dpop_nonce": True}
    settings: dict[str, Any] = {"trust": trust, "dpop_nonce_key_file": key, "registered": False}
    async with gateway(tmp_path / "data", **settings) as gate:
        caller = Caller(gate)
        nonces = set()
        for wrong in ({}, {"nonce": ""}, {"nonce": "x"}, {"nonce": 7}, {"nonce": None}):
            answer = await gate.http.get("/v1/me", headers=caller.shows("/v1/me", **wrong))
            assert (answer.status_code, answer.json()["reason"]) == (401, "PROOF_NONCE_NEEDED")
            challenge = answer.headers["www-authenticate"]
            assert challenge.startswith("DPoP ")
            assert 'error="use_dpop_nonce"' in challenge
            assert 'algs="' in challenge
            nonces.add(answer.headers["dpop-nonce"])
        (nonce,) = nonces
        sent = caller.shows("/v1/me", nonce=nonce)
        assert (await gate.http.get("/v1/me", headers=sent)).status_code == 200
        again = await gate.http.get("/v1/me", headers=sent)
        assert (again.status_code, again.json()["reason"]) == (401, "PROOF_REPLAYED")
        assert "dpop-nonce" not in again.headers
        # Who can't show the token's key is told no nonce, and a plain token needs none.
        other = Caller(gate)
        other.token = caller.token
        stolen = await gate.http.get("/v1/me", headers=other.shows("/v1/me"))
        assert stolen.json()["reason"] == "PROOF_INVALID"
        assert "dpop-nonce" not in stolen.headers
        assert (await gate.get("/v1/me")).status_code == 200
    # Another gateway with the same key takes it.
    Nonces(b"n" * 32, gate.rooms.clock.now).require(nonce)


async def test_a_stream_goes_on_without_another_proof(tmp_path: Path) -> None:
    """Its caller is judged again as it goes on, and cannot be asked for a proof."""
    async with gateway(tmp_path / "data", trust={"dpop": "allowed"}) as gate:
        object.__setattr__(gate.rooms.edge, "stream_look_s", 0.05)
        caller = Caller(gate)
        headers = {**caller.shows("/v1/events"), "Accept": "text/event-stream"}
        async with gate.http.stream("GET", "/v1/events", headers=headers) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            async with asyncio.timeout(60):
                await until(lines, "event: snapshot")
                for _ in range(2):
                    await gate.flush()
                    await until(lines, "event: completed")


async def until(lines: Any, wanted: str) -> None:
    async for line in lines:
        assert not line.startswith("event: goodbye")
        if line == wanted:
            return
    raise AssertionError(f"the stream ended before {wanted}")
