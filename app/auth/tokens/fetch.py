"""Fetching an issuer's documents: bounded in size, and only from where the settings lead.

Nothing here sets a deadline: whoever calls sets one for the whole of discovery and fetch.
"""

import json
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx2

from app.auth.tokens.issuers import IssuerConfig, is_allowed_url

MAX_DOCUMENT_BYTES = 256 * 1024


class FetchFailed(Exception):
    """A document could not be had; the text is for an operator's log."""


class NotServed(FetchFailed):
    """The issuer answered that it has no such document."""


async def fetch_document(http: httpx2.AsyncClient, url: str) -> bytes:
    """The body at ``url``, at most ``MAX_DOCUMENT_BYTES``, or :class:`FetchFailed`.

    Redirects are refused: keys come from the address in the settings or in the issuer's own
    metadata, and an open redirect there must not be able to supply others.
    """
    try:
        return await _fetch(http, url)
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise FetchFailed(f"{type(error).__name__}") from error


async def _fetch(http: httpx2.AsyncClient, url: str) -> bytes:
    # identity: a compressed answer could grow past any limit while it is being unpacked.
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with http.stream("GET", url, headers=headers, follow_redirects=False) as response:
        if response.is_redirect:
            raise FetchFailed("redirect refused")
        if response.status_code in (404, 410):
            raise NotServed(f"HTTP {response.status_code}")
        if response.status_code != 200:
            raise FetchFailed(f"HTTP {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise FetchFailed("compressed answer refused")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_DOCUMENT_BYTES:
                raise FetchFailed(f"answer larger than {MAX_DOCUMENT_BYTES} bytes")
        return bytes(body)


async def discover_jwks_uri(http: httpx2.AsyncClient, config: IssuerConfig) -> str:
    """The issuer's ``jwks_uri`` from OpenID Connect Discovery, else from RFC 8414 metadata."""
    for url in discovery_urls(config.issuer):
        try:
            body = await fetch_document(http, url)
        except NotServed:
            continue
        return jwks_uri_in(body, config)
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


def jwks_uri_in(body: bytes, config: IssuerConfig) -> str:
    """Where the issuer's metadata says its keys are, or :class:`FetchFailed`."""
    try:
        document: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FetchFailed("the metadata is not JSON") from error
    if not isinstance(document, dict):
        raise FetchFailed("the metadata is not a JSON object")
    # Byte for byte (RFC 8414 §3.3): metadata of a neighbour tenant must not lend us its keys.
    if document.get("issuer") != config.issuer:
        raise FetchFailed("the metadata names another issuer")
    uri = document.get("jwks_uri")
    if not isinstance(uri, str) or not is_allowed_url(uri, allow_http=config.loopback):
        raise FetchFailed("the metadata has no acceptable jwks_uri")
    return uri
