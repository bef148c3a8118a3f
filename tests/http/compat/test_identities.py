"""Clients that send no token, at vLLM's own endpoints: their base URL, or their socket, is all that
is changed."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.http.compat.layered import layered
from tests.http.compat.test_gating import answer
from tests.http.compat_callers import SECRET, known
from tests.http.full import FULL

pytestmark = pytest.mark.anyio


async def test_clients_without_tokens_give_orders_and_are_known_by_name(tmp_path: Path) -> None:
    made = known(tmp_path, ("admin:read", "admin:pause"))
    at = f"/compat/vllm/{FULL}"
    async with layered(tmp_path, compat_identity=made.settings) as vllm:
        gate = vllm.gate
        transport = httpx2.AsyncHTTPTransport(uds=str(made.socket))
        async with httpx2.AsyncClient(
            base_url="http://localhost", transport=transport, timeout=30
        ) as by_socket:
            paused = await by_socket.post(f"{at}/pause?mode=keep")
            assert (paused.status_code, paused.json()) == (200, {"status": "paused"})
            # Another caller, to whom the pause does not belong.
            secret = f"{at}~{SECRET}"
            assert (await gate.http.get(f"{secret}/is_paused")).json() == {"is_paused": True}
            other = await gate.http.post(f"{secret}/resume")
            assert other.status_code == 409, other.text
            resumed = await by_socket.post(f"{at}/resume")
            assert (resumed.status_code, resumed.json()) == (200, {"status": "resumed"})
            refused = await by_socket.post(f"{at}/reset_prefix_cache")
            assert (refused.status_code, "admin:cache" in refused.text) == (403, True)
            bad = await by_socket.post(f"{at}/pause", headers={"Authorization": "Bearer bad"})
            assert (bad.status_code, list(bad.json())) == (401, ["error"])
        given = [(one["kind"], one["principal"]["client_id"]) for one in await vllm.operations()]
        assert given == [("pause", "unix_socket"), ("resume", "unix_socket")]
        stranger = await gate.http.post(f"{at}/pause")
        assert (stranger.status_code, list(stranger.json())) == (401, ["error"])
        # A wrong secret: to everybody an engine that is not there, at each endpoint and none.
        for path in ("/pause", "/update_weight_version", "/nothing"):
            unknown = await answer(gate, "POST", f"/compat/vllm/nobody{path}")
            assert unknown[0] == 404
            for headers in ({}, gate.auth()):
                assert await answer(gate, "POST", f"{at}~{SECRET}x{path}", **headers) == unknown
        marked = await gate.http.post(f"{secret}/pause", headers={"Origin": "http://localhost"})
        assert marked.status_code == 403
        rows = (await gate.get(f"/v1/audit?engine={FULL}")).json()["items"]
        asked = {(row["principal"]["subject"], row["reason"]) for row in rows if row["principal"]}
        assert {("bysocket", "INSUFFICIENT_SCOPE"), ("bypath", "IDENTITY_REFUSED")} <= asked
