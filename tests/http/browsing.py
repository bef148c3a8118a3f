"""A browser as far as sessions go: its cookies, its origin, what it says of where a request comes
from; and the pages of real issuers, filled in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import unescape
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx2

from tests.http.gateway import Gateway

PUBLIC = "https://chadburn.test"
LOOPBACK = "http://127.0.0.1"
_ATTRIBUTES = {"path=/", "httponly", "samesite=lax"}


@dataclass
class Browser:
    """`base`: where the gateway is for it, whatever socket it answers at. `issuers`: what it keeps
    of those, as they are no part of what is tried."""

    gate: Gateway
    base: str
    issuers: httpx2.AsyncClient
    cookies: dict[str, str] = field(default_factory=dict)
    seen: list[httpx2.Response] = field(default_factory=list)
    """All answers of the gateway, the first one first."""

    @property
    def session_cookie(self) -> str:
        return ("__Host-" if self.base.startswith("https") else "") + "chadburn-session"

    @property
    def session_id(self) -> str:
        return self.cookies[self.session_cookie]

    @property
    def login_cookies(self) -> list[str]:
        return [name for name in self.cookies if "chadburn-login-" in name]

    async def send(self, method: str, url: str, **how: Any) -> httpx2.Response:
        """Exactly this to the gateway, with the cookies there are. `url`: absolute, or a path."""
        parts = urlsplit(urljoin(self.base, url))
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        headers = {"Host": urlsplit(self.base).netloc, **how.pop("headers", {})}
        if self.cookies:
            headers["Cookie"] = "; ".join(f"{k}={v}" for k, v in self.cookies.items())
        at = f"http://127.0.0.1:{self.gate.port}"
        # With a jar of its own, the client would add cookies of one browser to another's.
        self.gate.http.cookies.clear()
        answer = await self.gate.http.request(method, f"{at}{target}", headers=headers, **how)
        self.seen.append(answer)
        for line in answer.headers.get_list("set-cookie"):
            self._keep(line)
        return answer

    async def go(self, url: str, **headers: str) -> httpx2.Response:
        """As the address bar does."""
        there = {
            "Sec-Fetch-Site": "none",
            "Sec-Fetch-Mode": "navigate",
            "Sec-Fetch-Dest": "document",
        }
        return await self.send("GET", url, headers={**there, **headers})

    async def call(self, method: str, url: str, **how: Any) -> httpx2.Response:
        """As a script of the gateway's own page does."""
        headers = {**self.own_page, **how.pop("headers", {})}
        return await self.send(method, url, headers=headers, **how)

    @property
    def own_page(self) -> dict[str, str]:
        return {
            "Sec-Fetch-Site": "same-origin",
            "Origin": self.base,
            "X-Requested-With": "chadburn",
        }

    async def begin(self, issuer: str | None = None, **query: str) -> str:
        """Where the issuer wants it."""
        params = {**({} if issuer is None else {"issuer": issuer}), **query}
        path = httpx2.URL(f"{self.base}/auth/login", params=params)
        answer = await self.go(str(path))
        assert answer.status_code == 303, answer.text
        return str(answer.headers["location"])

    async def come_back(self, url: str) -> httpx2.Response:
        """To the gateway, sent there by another site; and on to where the gateway sends it, which
        counts as that site's doing too."""
        cross_site = {"Sec-Fetch-Site": "cross-site"}
        answer = await self.go(url, **cross_site)
        if answer.is_redirect:
            there = await self.go(answer.headers["location"], **cross_site)
            assert there.status_code in (200, 303), there.text
        return answer

    async def log_in(self, name: str, issuer: str | None = None, **query: str) -> httpx2.Response:
        """The answer of the callback."""
        return await self.come_back(
            await at_provider(self, await self.begin(issuer, **query), name)
        )

    async def session(self) -> dict[str, Any]:
        answer = await self.call("GET", "/auth/session")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def _keep(self, line: str) -> None:
        pair, *attributes = line.split("; ")
        name, _, value = pair.partition("=")
        given = {attribute.lower() for attribute in attributes}
        assert given >= _ATTRIBUTES, line
        assert not any(attribute.startswith("domain") for attribute in given), line
        assert ("secure" in given) == self.base.startswith("https"), line
        assert name.startswith("__Host-") == self.base.startswith("https"), line
        if "max-age=0" in given:
            self.cookies.pop(name, None)
        else:
            self.cookies[name] = value


async def at_provider(browser: Browser, url: str, name: str) -> str:
    """Log in at npm oidc-provider, and agree to what it asks; where it sends the browser then."""
    page = await followed(browser, await browser.issuers.get(url))
    while not page.is_redirect:
        action = re.search(r'action="([^"]+)"', page.text)
        prompt = re.search(r'name="prompt" value="(\w+)"', page.text)
        assert action is not None, page.text
        assert prompt is not None, page.text
        form = {"prompt": prompt.group(1)}
        if prompt.group(1) == "login":
            form |= {"login": name, "password": "any"}
        sent = await browser.issuers.post(
            urljoin(str(page.url), unescape(action.group(1))), data=form
        )
        page = await followed(browser, sent)
    return str(page.headers["location"])


async def leave_provider(browser: Browser, url: str) -> str:
    """Log out at npm oidc-provider too; where it sends the browser then, if anywhere."""
    page = await browser.issuers.get(url)
    action = re.search(r'action="([^"]+)"', page.text)
    token = re.search(r'name="xsrf" value="([^"]+)"', page.text)
    assert action is not None, page.text
    assert token is not None, page.text
    form = {"xsrf": token.group(1), "logout": "yes"}
    sent = await browser.issuers.post(urljoin(str(page.url), unescape(action.group(1))), data=form)
    return str((await followed(browser, sent)).headers.get("location", ""))


async def followed(browser: Browser, page: httpx2.Response) -> httpx2.Response:
    """Through redirects, up to a page or the way back to the gateway."""
    while page.is_redirect:
        where = urljoin(str(page.url), page.headers["location"])
        if where.startswith((f"{browser.base}/", f"{browser.base}?")):
            return page
        page = await browser.issuers.get(where)
    return page
