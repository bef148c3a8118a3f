"""How requests of Authlib's client go out, and what is sent with them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote_plus

import httpx2
from authlib.oauth2.auth import encode_client_secret_basic
from joserfc.jwk import ECKey, RSAKey

from app.auth.tokens.fetch import MAX_DOCUMENT_BYTES, FetchFailed


class Within(httpx2.AsyncBaseTransport):
    """Sends by the gateway's own client, which stays open, and reads no more than a document may
    have; no redirect is followed, as it would take the client's secret along."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        answer = await self._http.send(request, stream=True, auth=None, follow_redirects=False)
        try:
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise FetchFailed("compressed answer refused")
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > MAX_DOCUMENT_BYTES:
                    raise FetchFailed(f"answer larger than {MAX_DOCUMENT_BYTES} bytes")
        finally:
            await answer.aclose()
        kind = answer.headers.get("content-type", "application/json")
        return httpx2.Response(
            answer.status_code, headers={"content-type": kind}, content=bytes(body)
        )


def escaped_basic(
    client: Any, method: str, uri: str, headers: Any, body: Any
) -> tuple[str, Any, Any]:
    """As RFC 6749 section 2.3.1 wants id and secret, which Authlib sends as they are."""

    class Escaped:
        client_id = quote_plus(client.client_id)
        client_secret = quote_plus(client.client_secret)

    escaped: tuple[str, Any, Any] = encode_client_secret_basic(Escaped, method, uri, headers, body)
    return escaped


def private_key(pem: str, algorithm: str) -> RSAKey | ECKey:
    """Raises what the library raises for a text that is no such key."""
    return ECKey.import_key(pem) if algorithm.startswith("ES") else RSAKey.import_key(pem)


def error_code(error: object) -> str:
    """An error code as RFC 6749 writes them; `other` for what is none, which is not repeated."""
    text = error if isinstance(error, str) else ""
    known = 0 < len(text) <= 64 and text.replace("_", "").isalnum() and text.isascii()
    return text if known else "other"
