"""Fetching an issuer's documents: bounded in size, and only from where the settings lead.

Nothing here sets a deadline: whoever calls sets one for the whole of discovery and fetch.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx2

from app.auth.tokens.issuers import IssuerConfig, is_allowed_url

MAX_DOCUMENT_BYTES = 256 * 1024


class FetchFailed(Exception):
    """A document could not be had; the text is for an operator's log."""


class NotServed(FetchFailed):
    """The issuer answered that it has no such document."""


class Answered(FetchFailed):
    """The issuer answered, with another status than 200."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


async def fetch_document(http: httpx2.AsyncClient, url: str) -> bytes:
    """The body at ``url``, at most ``MAX_DOCUMENT_BYTES``, or :class:`FetchFailed`.

    Redirects are refused: keys come from the address in the settings or in the issuer's own
    metadata, and an open redirect there must not be able to supply others.
    """
    return await _fetch(http, "GET", url)


async def post_form(
    http: httpx2.AsyncClient, url: str, form: Mapping[str, str], headers: Mapping[str, str]
) -> bytes:
    """The answer to a form, bounded and kept from wandering off as `fetch_document`'s."""
    return await _fetch(http, "POST", url, data=dict(form), headers=dict(headers))


async def _fetch(
    http: httpx2.AsyncClient,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
    **content: Any,
) -> bytes:
    try:
        return await _bounded(http, method, url, headers, content)
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise FetchFailed(f"{type(error).__name__}") from error


async def _bounded(
    http: httpx2.AsyncClient,
    method: str,
    url: str,
    headers: Mapping[str, str],
    content: Mapping[str, Any],
) -> bytes:
    # identity: a compressed answer could grow past any limit while it is being unpacked.
    wanted = {"accept": "application/json", "accept-encoding": "identity", **headers}
    async with http.stream(
        method, url, headers=wanted, follow_redirects=False, **content
    ) as response:
        if response.is_redirect:
            raise FetchFailed("redirect refused")
        if response.status_code in (404, 410):
            raise NotServed(f"HTTP {response.status_code}")
        if response.status_code != 200:
            raise Answered(response.status_code)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise FetchFailed("compressed answer refused")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_DOCUMENT_BYTES:
                raise FetchFailed(f"answer larger than {MAX_DOCUMENT_BYTES} bytes")
        return bytes(body)


async def discover(http: httpx2.AsyncClient, config: IssuerConfig, name: str) -> str:
    """The address ``name`` (such as ``jwks_uri``) in the issuer's metadata: OpenID Connect
    Discovery, else RFC 8414."""
    for url in discovery_urls(config.issuer):
        try:
            body = await fetch_document(http, url)
        except NotServed:
            continue
        return address_in(body, config, name)
    raise NotServed("the issuer serves no metadata document")


def discovery_urls(issuer: str) -> tuple[str, str]:
    """OpenID Connect appends the well-known path to the issuer's; RFC 8414 §3 inserts it."""
    parts = urlsplit(issuer)
    path = parts.path.rstrip("/")

    def at(new_path: str) -> str:
        return urlunsplit((parts.scheme, parts.netloc, new_path, "", ""))

    return (
        at(f"{path}/.well-known/openid-configuration"),
        at(f"/.well-known/oauth-authorization-server{path}"),
    )


def address_in(body: bytes, config: IssuerConfig, name: str) -> str:
    """What the issuer's metadata says under ``name``, or :class:`FetchFailed`."""
    try:
        document: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FetchFailed("the metadata is not JSON") from error
    if not isinstance(document, dict):
        raise FetchFailed("the metadata is not a JSON object")
    # Byte for byte (RFC 8414 §3.3): metadata of a neighbour tenant must not lend us its keys.
    if document.get("issuer") != config.issuer:
        raise FetchFailed("the metadata names another issuer")
    uri = document.get(name)
    if not isinstance(uri, str) or not is_allowed_url(uri, allow_http=config.loopback):
        raise FetchFailed(f"the metadata has no acceptable {name}")
    return uri
