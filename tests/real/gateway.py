"""A gateway with its issuer, as processes, for an engine of real vLLM."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from app.demo.plan import ADMIN_AUDIENCE, INFERENCE_AUDIENCE
from tests.e2e.driving import Gateway
from tests.e2e.processes import Process, cleaned

ENGINE = "llm"


@contextmanager
def gateway(folder: Path, settings: str = "") -> Iterator[Gateway]:
    """Serving, with no engine registered. `settings`: what is added to its configuration."""
    issuer = Process("issuer", [], folder / "issuer.log", folder)
    serve = Process("gateway", [], folder / "gateway.log", folder)
    secret = secrets.token_urlsafe(24)
    (folder / "secret").write_text(secret)
    with cleaned(issuer, serve):
        issuer.arguments = [
            "dev-issuer",
            f"--data-dir={folder / 'issuer'}",
            f"--secret-file={folder / 'secret'}",
            f"--ready-file={folder / 'issuer.json'}",
        ]
        issuer.start()
        url = issuer.ready(folder / "issuer.json")["issuer"]
        answer = httpx2.post(
            f"{url}/token", data={"grant_type": "client_credentials"}, auth=("operator", secret)
        )
        (folder / "gateway.toml").write_text(
            f"data_dir = {json.dumps(str(folder / 'gateway'))}\n"
            f'audience = "{ADMIN_AUDIENCE}"\n'
            "observe_interval_s = 0.5\n"
            f"{settings}\n"
            "[[issuers]]\n"
            f"issuer = {json.dumps(url)}\n"
            f'inference_audiences = ["{INFERENCE_AUDIENCE}"]\n'
        )
        serve.arguments = [
            "serve",
            f"--config={folder / 'gateway.toml'}",
            "--port=0",
            f"--ready-file={folder / 'gateway.json'}",
        ]
        serve.start()
        base = serve.ready(folder / "gateway.json")["base_url"]
        yield Gateway(base, answer.json()["access_token"])


async def register(through: Gateway, admin: str, dialect: str) -> dict[str, Any]:
    """The engine, once its facts are known."""
    member = {"rank": 0, "admin": admin, "control": admin}
    body = {"id": ENGINE, "dialect": dialect, "members": [member]}
    made = await through.client.post("/v1/engines", json=body)
    assert made.status_code == 201, made.text
    path = f"/v1/engines/{ENGINE}"
    return await through.until(path, lambda found: found["facts"] is not None)
