"""Engines behind the services of a Kubernetes namespace, by the API's list and watch.

https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from app.discovery.endpoints import Shape, engines_of
from app.discovery.source import Listed
from app.operations.backoff import Backoff

_PAGE = 500
_CONNECT_S = 10.0
_LIST_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`namespace` a path: the file that has its name. `token_file` is read for each request, since
    the token in it is renewed every hour. `ca_file` None: the system's authorities."""

    api_url: str
    namespace: str | Path
    selector: str
    token_file: Path | None
    ca_file: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Persistence:
    """`watch_s`: how long a watch is asked to last; the server closes it then, and one that does
    not is left `late_s` later. `pause_s`: between two watches. `first_s`, `most_s`: after
    failures."""

    watch_s: int = 270
    late_s: float = 15.0
    pause_s: float = 0.2
    first_s: float = 0.5
    most_s: float = 30.0


class Gone(Exception):
    """What is asked for lies too far back: everything is listed anew (HTTP 410)."""


class Failed(Exception):
    """One line on why the API server did not tell."""


class KubernetesSource:
    def __init__(
        self,
        name: str,
        cluster: Cluster,
        shape: Shape,
        *,
        persistence: Persistence = Persistence(),
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self.listed: Listed | None = None
        self.faults: tuple[str, ...] = ()
        self.remarks: Mapping[str, str] = {}
        self._cluster = cluster
        self._shape = shape
        self._persistence = persistence
        self._backoff = Backoff(persistence.first_s, persistence.most_s, jitter)
        self._slices: dict[str, Mapping[str, Any]] = {}
        self._version: str | None = None
        """From where a watch goes on. None: everything has to be listed first."""

    async def follow(self, changed: Callable[[], None]) -> None:
        failures = 0
        while True:
            try:
                async with self._client() as client:
                    while True:
                        if self._version is None:
                            await self._list(client)
                            self._tell(changed)
                        elif self.faults:
                            await self._probe(client)
                            self._tell(changed)
                        failures = 0
                        await self._watch(client, changed)
                        await asyncio.sleep(self._persistence.pause_s)
            except Gone:
                self._version = None
            except Failed as failed:
                if self.faults != (str(failed),):
                    self.faults = (str(failed),)
                    changed()
            failures += 1
            # Not at once after 410 either: a server that says so to everything would be asked for
            # lists without a break.
            await asyncio.sleep(self._backoff.pause_s(failures))

    def _tell(self, changed: Callable[[], None]) -> None:
        self.faults = ()
        self.listed, self.remarks = engines_of(self._slices.values(), self._shape)
        changed()

    # ---- the API ----

    def _client(self) -> httpx2.AsyncClient:
        """Anew after each failure, so that a renewed authority is read. Raises Failed."""
        try:
            trusted = ssl.create_default_context(
                cafile=None if self._cluster.ca_file is None else str(self._cluster.ca_file)
            )
        except (OSError, ssl.SSLError) as error:
            raise Failed(f"ca_file can't be read ({type(error).__name__})") from error
        return httpx2.AsyncClient(
            verify=trusted, follow_redirects=False, trust_env=False, timeout=_LIST_S
        )

    def _request(
        self, client: httpx2.AsyncClient, query: Mapping[str, str], read_s: float = _LIST_S
    ) -> httpx2.Request:
        """Raises Failed."""
        cluster = self._cluster
        try:
            namespace = cluster.namespace
            if isinstance(namespace, Path):
                namespace = namespace.read_text(encoding="utf-8").strip()
            headers = {"accept": "application/json"}
            if cluster.token_file is not None:
                token = cluster.token_file.read_text(encoding="utf-8").strip()
                headers["authorization"] = f"Bearer {token}"
        except (OSError, ValueError) as error:
            raise Failed(f"the service account can't be read ({type(error).__name__})") from error
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        return client.build_request(
            "GET",
            f"{cluster.api_url.rstrip('/')}{path}",
            params={"labelSelector": cluster.selector, **query},
            headers=headers,
            timeout=httpx2.Timeout(_CONNECT_S, read=read_s),
        )

    async def _get(self, client: httpx2.AsyncClient, query: Mapping[str, str]) -> Any:
        """Raises Gone, Failed."""
        try:
            answer = await client.send(self._request(client, query))
        except httpx2.HTTPError as error:
            raise _unreachable(error) from error
        _refuse(answer.status_code)
        try:
            return answer.json()
        except ValueError as error:
            raise Failed("the API server's answer is no JSON") from error

    async def _list(self, client: httpx2.AsyncClient) -> None:
        """Everything, in pages. It replaces what was known only once it is whole."""
        found: dict[str, Mapping[str, Any]] = {}
        query = {"limit": str(_PAGE)}
        while True:
            page = await self._get(client, query)
            try:
                meta = page["metadata"]
                version = str(meta["resourceVersion"])
                for one in page["items"]:
                    found[_key(one)] = one
            except (KeyError, TypeError) as error:
                raise Failed("the API server's answer is no list") from error
            if not meta.get("continue"):
                break
            query = {"limit": str(_PAGE), "continue": meta["continue"]}
        self._slices, self._version = found, version

    async def _probe(self, client: httpx2.AsyncClient) -> None:
        """After a failure, whether it is over: a watch says nothing for as long as nothing
        happens."""
        await self._get(client, {"limit": "1"})

    async def _watch(self, client: httpx2.AsyncClient, changed: Callable[[], None]) -> None:
        """Until the server ends it. Raises Gone, Failed."""
        persistence = self._persistence
        assert self._version is not None
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(persistence.watch_s),
        }
        request = self._request(client, query, persistence.watch_s + persistence.late_s)
        try:
            answer = await client.send(request, stream=True)
            try:
                _refuse(answer.status_code)
                async for line in answer.aiter_lines():
                    if line.strip() and self._heard(line):
                        self._tell(changed)
            finally:
                await answer.aclose()
        except httpx2.HTTPError as error:
            raise _unreachable(error) from error

    def _heard(self, line: str) -> bool:
        """Whether any slice is other than it was. Raises Gone, Failed."""
        try:
            event = json.loads(line)
            kind, one = event["type"], event["object"]
            if kind == "ERROR":
                if one.get("code") == httpx2.codes.GONE or one.get("reason") == "Expired":
                    raise Gone
                raise Failed(f"the API server ended the watch ({one.get('code')})")
            version = str(one["metadata"]["resourceVersion"])
            if kind in ("ADDED", "MODIFIED"):
                self._slices[_key(one)] = one
            elif kind == "DELETED":
                self._slices.pop(_key(one), None)
            elif kind != "BOOKMARK":
                raise Failed("the API server tells of a kind of event that is not known")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # What was missed is not known.
            self._version = None
            raise Failed("the API server tells of something that is no event") from error
        self._version = version
        return bool(kind != "BOOKMARK")


def _key(one: Mapping[str, Any]) -> str:
    return str(one["metadata"]["name"])


def _refuse(status: int) -> None:
    if status == httpx2.codes.GONE:
        raise Gone
    if status != httpx2.codes.OK:
        raise Failed(f"the API server answers {status}")


def _unreachable(error: Exception) -> Failed:
    return Failed(f"the API server can't be reached ({type(error).__name__})")
