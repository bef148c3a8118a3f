"""A gateway that knows callers by socket, secret path and certificate, and two small routes where
compatible endpoints are."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx2
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from app.auth.principal import Principal
from app.auth.requires import Requires
from app.domain.scopes import Scope
from app.http.bodies import PauseBody
from app.http.calls import Call
from app.http.documents.actor import ActorDocument
from app.http.records import actor_of
from app.http.rooms import VisibleEngine
from app.http.route import EdgeRoute
from tests.backends.certificates import Authority
from tests.http.gateway import Gateway, gateway

SECRET = "canary0path0yranac-3Qq7Zx9Lw2Bn5Ty"
NEXT_SECRET = "canary0next0yranac-8Rf4Tk1Mv6Jd3Ws"
TRAINER = "spiffe://cluster.test/trainer"
LOCAL = "urn:chadburn:compat-identity"
READ = "/compat/vllm/e1/seen"


async def seen(who: Annotated[Principal, Requires(Scope.READ)], engine: VisibleEngine) -> Response:
    """Who it is, and which engine was meant."""
    return JSONResponse({"who": ActorDocument.of(actor_of(who)).model_dump(), "engine": engine.id})


async def paused(
    body: PauseBody, call: Call, who: Annotated[Principal, Requires(Scope.PAUSE)]
) -> Response:
    return await call.give(body, who)


async def named(who: Annotated[Principal, Requires(Scope.READ)]) -> Response:
    return JSONResponse({"who": who.subject})


def add_routes(app: FastAPI) -> None:
    for path, method, endpoint in (
        ("/compat/vllm/{engine}/seen", "GET", seen),
        ("/v1/engines/{engine}/seen", "GET", seen),
        ("/compat/vllm/{engine}/pause", "POST", paused),
        ("/compat/no/one/named", "GET", named),
    ):
        app.router.routes.append(EdgeRoute(path, endpoint, methods=[method]))


@dataclass
class Callers:
    gate: Gateway
    socket: Path
    secret_file: Path
    authority: Authority
    client_ca: Path
    """Whose certificates callers show; at first those of `authority`."""
    others: Authority
    """An authority that nobody trusts here."""

    def by_socket(self, **headers: str) -> httpx2.AsyncClient:
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket))
        return httpx2.AsyncClient(
            base_url="http://localhost", transport=transport, headers=headers, timeout=30
        )

    @property
    def port(self) -> int:
        """Of the listener for certificates."""
        return int(self.gate.besides.tls["bycert"][0].getsockname()[1])

    def by_certificate(self, shown: tuple[Path, Path] | None, **headers: str) -> httpx2.AsyncClient:
        context = ssl.create_default_context(cafile=self.authority.path)
        if shown is not None:
            context.load_cert_chain(*shown)
        return httpx2.AsyncClient(
            base_url=f"https://localhost:{self.port}", verify=context, headers=headers, timeout=30
        )

    async def by_path(
        self, secret: str, rest: str = "/seen", engine: str = "e1", **headers: str
    ) -> httpx2.Response:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.gate.http.get(f"/compat/vllm/{engine}~{secret}{rest}", headers=headers)


@dataclass
class Known:
    """Settings of three identities, and what they show."""

    settings: tuple[dict[str, Any], ...]
    socket: Path
    secret_file: Path
    authority: Authority
    client_ca: Path


def known(folder: Path, scopes: tuple[str, ...], engines: Any = "all") -> Known:
    authority = Authority(folder / "ca")
    certificate, key = authority.issue("localhost")
    client_ca = folder / "client-ca.pem"
    client_ca.write_bytes(authority.path.read_bytes())
    secret_file, at = folder / "secret", folder / "trainer.sock"
    secret_file.write_text(f"{SECRET}\n")
    tls = {
        "listen": "127.0.0.1:0",
        "certificate": certificate,
        "key": key,
        "client_ca": client_ca,
        "names": ["trainer.test", TRAINER],
    }
    common = {"scopes": scopes, "engines": engines}
    shows: dict[str, dict[str, Any]] = {
        "bysocket": {"unix_socket": at},
        "bypath": {"secret_file": secret_file},
        "bycert": {"tls": tls},
    }
    settings = tuple({"name": name, **one, **common} for name, one in shows.items())
    return Known(settings, at, secret_file, authority, client_ca)


@asynccontextmanager
async def callers(
    folder: Path,
    *,
    scopes: tuple[str, ...] = ("admin:read",),
    engines: Any = "all",
    policy: Callable[[str], str] | None = None,
    **changes: Any,
) -> AsyncIterator[Callers]:
    made = known(folder, scopes, engines)
    async with gateway(
        folder / "data", policy=policy, compat_identity=made.settings, **changes
    ) as gate:
        add_routes(gate.app)
        others = Authority(folder / "others")
        yield Callers(gate, made.socket, made.secret_file, made.authority, made.client_ca, others)
