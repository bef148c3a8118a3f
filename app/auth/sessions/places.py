"""Where the gateway is for a browser: its cookies, its origin, and what may be gone back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from app.auth.sessions.errors import CrossSiteRefused, ReturnRefused

REQUEST_HEADER = "X-Requested-With"
REQUEST_HEADER_VALUE = "chadburn"
BACKGROUND_HEADER = "X-Chadburn-Background"
"""Whatever its value: a page asks by itself, and it shows nobody at work."""
SESSION_PAGE = "/auth/session"
FRONT = "/"
HOME = "/auth/"
"""The page of who is logged in."""
CALLBACK = "/auth/callback"

_LOGIN_COOKIE = "chadburn-login-"
_MAX_RETURN_CHARS = 512
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_OWN_SITE = frozenset({"same-origin", "none"})


class RequestHeaders(Protocol):
    """What is asked of a request's headers, whatever they are written like."""

    def getlist(self, key: str) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class BrowserPlace:
    """`base_url`: what browsers see of the gateway, without a slash at its end.

    Cookies are `__Host-` ones: for this host alone, over TLS, and none that a sibling domain can
    plant. Where the gateway is on loopback without TLS, for which not all browsers keep secure
    cookies, they have plain names; ports do not part them there from other servers on the machine.
    """

    base_url: str

    @property
    def secure(self) -> bool:
        return self.base_url.startswith("https:")

    @property
    def origin(self) -> str:
        parts = urlsplit(self.base_url)
        port = parts.port
        if port == {"https": 443, "http": 80}[parts.scheme]:
            port = None
        host = parts.hostname or ""
        host = f"[{host}]" if ":" in host else host
        return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")

    @property
    def prefix(self) -> str:
        """Of all paths of the gateway as browsers see them; empty, or with a slash at its front."""
        return urlsplit(self.base_url).path.rstrip("/")

    @property
    def session_cookie(self) -> str:
        return self._named("chadburn-session")

    def login_cookie(self, state_digest: str) -> str:
        """One for each login under way, so that two in one browser do not meet."""
        return self._named(f"{_LOGIN_COOKIE}{state_digest[:16]}")

    def logins_under_way(self, cookies: Sequence[str]) -> tuple[str, ...]:
        """The names of those cookies that a request's Cookie headers have."""
        first = self._named(_LOGIN_COOKIE)
        return tuple(dict.fromkeys(name for name, _ in _pairs(cookies) if _is_login(name, first)))

    def cookie(self, name: str, value: str, max_age_s: int | None) -> str:
        """The text of Set-Cookie. `max_age_s` None: for as long as the browser runs; 0: gone."""
        age = "" if max_age_s is None else f"; Max-Age={max_age_s}"
        secure = "; Secure" if self.secure else ""
        return f"{name}={value}; Path=/; HttpOnly; SameSite=Lax{secure}{age}"

    def return_path(self, wanted: str | None) -> str:
        """Raises ReturnRefused for what could lead a browser to another origin, or round in
        circles: it takes backslashes for slashes, and leaves out tabs and line breaks."""
        if wanted is None:
            return self.prefix + HOME
        plain = len(wanted) <= _MAX_RETURN_CHARS and all(
            "\x21" <= char <= "\x7e" for char in wanted
        )
        if not plain or "\\" in wanted or not wanted.startswith("/") or wanted.startswith("//"):
            raise ReturnRefused
        path = wanted.partition("#")[0].partition("?")[0]
        if ".." in path or "%" in path or "//" in path:
            raise ReturnRefused
        within = path.removeprefix(self.prefix)
        if not path.startswith(self.prefix) or not within.startswith("/"):
            raise ReturnRefused
        if within.startswith("/auth/") and within not in (HOME, SESSION_PAGE):
            raise ReturnRefused
        return wanted

    def refuse_cross_site(self, method: str, headers: RequestHeaders) -> None:
        """Hold a request that comes with a session's cookie to what only this gateway's own pages
        send. Raises CrossSiteRefused.

        SameSite=Lax alone lets sibling domains through. So whatever says where the request comes
        from has to say: from here. One that changes anything has to say that, and to carry a header
        that no form can set and no other origin may.

        Where a person goes themselves is let through, as the way back from an issuer has to be: a
        page of its own, which the one that led there can neither frame nor read.
        """
        unsafe = method not in _SAFE_METHODS
        origins, sites = headers.getlist("origin"), headers.getlist("sec-fetch-site")
        if any(origin != self.origin for origin in origins):
            raise CrossSiteRefused("The request comes from another origin.")
        going = not unsafe and _goes_there(headers)
        if not going and any(site not in _OWN_SITE for site in sites):
            raise CrossSiteRefused("The request comes from another site.")
        if not unsafe:
            return
        if not origins and "same-origin" not in sites:
            raise CrossSiteRefused(
                "With a session, this takes an Origin header, or Sec-Fetch-Site: same-origin."
            )
        if "none" in sites:
            raise CrossSiteRefused("The request does not come from a page of this gateway.")
        if headers.getlist(REQUEST_HEADER) != [REQUEST_HEADER_VALUE]:
            raise CrossSiteRefused(
                f"With a session, this takes the header {REQUEST_HEADER}: {REQUEST_HEADER_VALUE}."
            )

    def _named(self, name: str) -> str:
        return f"__Host-{name}" if self.secure else name


def _goes_there(headers: RequestHeaders) -> bool:
    """Whether the whole window goes there: no frame, no object, nothing that a page loads."""
    mode, goal = headers.getlist("sec-fetch-mode"), headers.getlist("sec-fetch-dest")
    return mode == ["navigate"] and goal == ["document"]


def _is_login(name: str, first: str) -> bool:
    return name.startswith(first) and len(name) < 64 and name.isascii()


def cookies_named(name: str, headers: Sequence[str]) -> tuple[str, ...]:
    """All values of a cookie in the Cookie headers of a request: with several, which one another
    reader would take is anyone's guess."""
    return tuple(value for found, value in _pairs(headers) if found == name)


def _pairs(headers: Sequence[str]) -> Iterator[tuple[str, str]]:
    for header in headers:
        for pair in header.split(";"):
            name, equals, value = pair.strip().partition("=")
            if equals:
                yield name, value
