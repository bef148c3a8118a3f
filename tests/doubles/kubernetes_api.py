"""The part of a Kubernetes API server that lists and watches EndpointSlices, as its documentation
says it is: a resource version for the whole, lists in pages, watches of one JSON object a line with
bookmarks, 410 for what is too long ago, bearer tokens, TLS.

https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.backends.certificates import Authority
from tests.enginekit.client import until

NAMESPACE = "inference"
Slice = dict[str, Any]


class _Cut(Exception):
    """The connection breaks."""


def endpoint_slice(
    name: str, *pods: tuple[str, str], service: str = "engines", **changes: Any
) -> Slice:
    """`pods`: name and address of each."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {"kubernetes.io/service-name": service, "role": "engine"},
        },
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "targetRef": {"kind": "Pod", "name": pod, "namespace": NAMESPACE},
            }
            for pod, address in pods
        ],
        "ports": [{"name": "admin", "port": 8443, "protocol": "TCP"}],
        **changes,
    }


class KubernetesApi:
    def __init__(self, authority: Authority, token: str = "first") -> None:
        self.token = token
        self.requests: list[dict[str, str]] = []
        self.refusals: list[int] = []
        """Statuses of the next answers; 200: as it would be."""
        self.page: int | None = None
        """Lists are in pages of so many at most, whatever is asked for."""
        self.gone_as_status = False
        """410 as the status of the answer rather than as an event; both are there."""
        self.url = ""
        self._tls = authority.issue("localhost")
        self._slices: dict[str, Slice] = {}
        self._version = 100
        self._oldest = 100
        self._events: list[tuple[int, str, Slice]] = []
        self._watches: set[asyncio.Queue[Any]] = set()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = 0

    # ---- the cluster's side ----

    def put(self, one: Slice) -> None:
        name = one["metadata"]["name"]
        self._happens("MODIFIED" if name in self._slices else "ADDED", one)
        self._slices[name] = self._events[-1][2]

    def delete(self, name: str) -> None:
        self._happens("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        """Time goes on elsewhere in the cluster."""
        self._version += 10
        self._say(self._bookmark())

    def compact(self) -> None:
        """What has happened up to now can't be asked for any more."""
        self._version += 1
        self._oldest = self._version
        self._events.clear()

    def cut(self) -> None:
        """All watches break in the midst of a line."""
        self._say(_Cut())

    def close_watches(self) -> None:
        """As when their time is up."""
        self._say(None)

    def send(self, line: str) -> None:
        self._say(line)

    @property
    def watched(self) -> int:
        return len(self._watches)

    def of(self, kind: str) -> list[dict[str, str]]:
        """The queries of lists or of watches."""
        return [one for one in self.requests if ("watch" in one) == (kind == "watch")]

    def _happens(self, kind: str, one: Slice) -> None:
        self._version += 1
        meta = {**one["metadata"], "resourceVersion": str(self._version)}
        event = (self._version, kind, {**one, "metadata": meta})
        self._events.append(event)
        self._say(event)

    def _say(self, said: Any) -> None:
        for watch in self._watches:
            watch.put_nowait(said)

    def _bookmark(self) -> tuple[int, str, Slice]:
        meta = {"resourceVersion": str(self._version)}
        return (self._version, "BOOKMARK", {"kind": "EndpointSlice", "metadata": meta})

    # ---- the API's side ----

    async def _endpoint_slices(self, request: Request) -> Response:
        query = dict(request.query_params)
        self.requests.append(query)
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.refusals and (status := self.refusals.pop(0)) != 200:
            return _status(status, "Told")
        if request.path_params["namespace"] != NAMESPACE:
            return _status(403, "Forbidden")
        name, _, value = query["labelSelector"].partition("=")

        def takes(one: Slice) -> bool:
            return bool(one["metadata"]["labels"].get(name) == value)

        if query.get("watch") != "1":
            return self._list(query, [one for one in self._slices.values() if takes(one)])
        since = int(query["resourceVersion"])
        if since < self._oldest and self.gone_as_status:
            return _status(410, "Expired")
        lines = self._lines(since, takes, int(query["timeoutSeconds"]))
        return StreamingResponse(lines, media_type="application/json")

    def _list(self, query: dict[str, str], found: list[Slice]) -> Response:
        first, version = 0, self._version
        if "continue" in query:
            version, first = map(int, query["continue"].split("/"))
            if version < self._oldest:
                return _status(410, "Expired")
        size = min(int(query.get("limit", 500)), self.page or 500)
        meta: dict[str, Any] = {"resourceVersion": str(version)}
        if first + size < len(found):
            meta["continue"] = f"{version}/{first + size}"
        items = found[first : first + size]
        return JSONResponse({"kind": "EndpointSliceList", "metadata": meta, "items": items})

    async def _lines(self, since: int, takes: Any, timeout_s: int) -> AsyncIterator[bytes]:
        if since < self._oldest:
            status = json.loads(bytes(_status(410, "Expired").body))
            yield json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
            return
        watch: asyncio.Queue[Any] = asyncio.Queue()
        for event in self._events:
            if event[0] > since:
                watch.put_nowait(event)
        self._watches.add(watch)
        try:
            async with asyncio.timeout(timeout_s):
                while (said := await watch.get()) is not None:
                    if isinstance(said, _Cut):
                        yield b'{"type":"ADD'
                        raise said
                    if isinstance(said, str):
                        yield said.encode() + b"\n"
                        continue
                    _, kind, one = said
                    if kind == "BOOKMARK" or takes(one):
                        yield json.dumps({"type": kind, "object": one}).encode() + b"\n"
        except TimeoutError:
            return
        finally:
            self._watches.discard(watch)

    async def start(self) -> None:
        """At the same place as before."""
        path = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        certificate, key = self._tls
        config = uvicorn.Config(
            Starlette(routes=[Route(path, self._endpoint_slices)]),
            host="localhost", port=self._port, log_level="critical", lifespan="off",
            ssl_certfile=str(certificate), ssl_keyfile=str(key), timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve())
        server = self._server
        await until(lambda: server.started)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"https://localhost:{self._port}"

    async def stop(self) -> None:
        assert self._server is not None
        assert self._serving is not None
        self.close_watches()
        self._server.should_exit = True
        await self._serving


@asynccontextmanager
async def running_api(folder: Path) -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi(Authority(folder))
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


def _status(code: int, reason: str) -> JSONResponse:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "code": code}
    return JSONResponse(body, status_code=code)
