"""Canaille, set up as an operator would set up theirs: run by the Python of `.venv-canaille`.

It takes one JSON object on standard input: `folder` (where its files go), `descriptor` (of a socket
that listens), `port`, `secret`, `password`, `scopes`. The end of standard input ends it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

_CONFIGURATION = """
SECRET_KEY = {secret}
SERVER_NAME = "127.0.0.1:{port}"
PREFERRED_URL_SCHEME = "http"

[CANAILLE]
DATABASE = "sql"

[CANAILLE_SQL]
DATABASE_URI = {database}

[CANAILLE_OIDC]
REQUIRE_NONCE = false
ACTIVE_JWKS = [{key}]
"""


def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    os.environ["CANAILLE_CONFIG"] = _configured(wanted)
    command = importlib.import_module("canaille.commands").cli
    secret, scopes = wanted["secret"], _each("--scope", wanted["scopes"])
    for arguments in (
        ["install"],
        ["create", "user", "--quiet", "--user-name", "nadia", "--given-name", "Nadia",
         "--family-name", "Example", "--emails", "nadia@ops.test",
         "--password", wanted["password"]],
        [*_client("gateway", secret), "--grant-types", "client_credentials"],
        [*_client("pipeline", secret), "--grant-types", "client_credentials", *scopes],
        [*_client("console", secret), "--redirect-uris", "http://127.0.0.1/callback",
         "--response-types", "code", *_each("--grant-types", ["authorization_code",
         "refresh_token"]), *_each("--scope", ["openid", "profile", "offline_access"]), *scopes],
        # Whoever is to ask about a token has to be among its audiences.
        ["set", "client", "pipeline", *_each("--audience", ["gateway", "pipeline"])],
        ["set", "client", "console", *_each("--audience", ["gateway", "console"])],
    ):  # fmt: skip
        command.main(arguments, standalone_mode=False)
    # Its own way to serve starts processes that outlive this one when it is killed.
    served = importlib.import_module("canaille").create_app()
    serving = importlib.import_module("werkzeug.serving")
    serving.make_server(
        "127.0.0.1", wanted["port"], served, threaded=True, fd=wanted["descriptor"]
    ).serve_forever()


def _configured(wanted: dict[str, Any]) -> str:
    folder = Path(wanted["folder"])
    jwk = importlib.import_module("joserfc.jwk")
    key = jwk.RSAKey.generate_key(2048, {"kid": "canaille", "use": "sig", "alg": "RS256"})
    members = (f"{name} = {json.dumps(value)}" for name, value in key.as_dict(private=True).items())
    file = folder / "canaille.toml"
    file.write_text(
        _CONFIGURATION.format(
            secret=json.dumps(wanted["secret"]),
            port=wanted["port"],
            database=json.dumps(f"sqlite:///{folder / 'canaille.db'}"),
            key="{" + ", ".join(members) + "}",
        )
    )
    return str(file)


def _client(name: str, secret: str) -> list[str]:
    return [
        "create", "client", "--quiet", "--client-id", name, "--client-name", name,
        "--client-secret", secret, "--client-uri", "http://127.0.0.1",
        "--token-endpoint-auth-method", "client_secret_basic",
    ]  # fmt: skip


def _each(option: str, values: list[str]) -> list[str]:
    return [part for value in values for part in (option, value)]


def _end_with_standard_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
