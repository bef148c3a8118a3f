"""Where trainers may be met: what a rule can say, and what it lets through."""

from __future__ import annotations

import pytest

from app.reference_engine.errors import SourceRefused
from app.reference_engine.rendezvous import RendezvousRule, resolved


def rules(*texts: str) -> tuple[RendezvousRule, ...]:
    return tuple(map(RendezvousRule.parse, texts))


@pytest.mark.parametrize(
    ("text", "host", "port", "found"),
    [
        ("127.0.0.1:29500", "127.0.0.1", 29500, "127.0.0.1"),
        ("127.0.0.1:29500-29600", "127.0.0.1", 29600, "127.0.0.1"),
        ("10.0.0.0/8:1-65535", "10.1.2.3", 80, "10.1.2.3"),
        ("[::1]:29500", "::1", 29500, "::1"),
        ("[fd00::/8]:29500", "fd00::7", 29500, "fd00::7"),
        ("127.0.0.0/8:29500", "::ffff:127.0.0.1", 29500, "127.0.0.1"),
        ("localhost:29500", "LocalHost", 29500, None),
        ("127.0.0.0/8:29500", "localhost", 29500, "127.0.0.1"),
    ],
)
def test_what_a_rule_lets_through(text: str, host: str, port: int, found: str | None) -> None:
    where = resolved(rules(text), host, port)
    assert where == found or (found is None and where in ("127.0.0.1", "::1"))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:29500", "127.0.0.1", 29501),
        ("127.0.0.1:29500", "127.0.0.2", 29500),
        ("127.0.0.1:29500", "localhost.invalid", 29500),
        ("trainer.invalid:29500", "trainer.invalid", 29500),
        ("trainer.invalid:29500", "other.invalid", 29500),
        ("localhost:29500", "localhost", 29501),
        ("localhost:29500", "127.0.0.1", 29500),
        ("0.0.0.0/0:1-65535", "0.0.0.0", 29500),
        ("0.0.0.0/0:1-65535", "224.0.0.1", 29500),
        ("[::/0]:1-65535", "fe80::1%lo", 29500),
        ("0.0.0.0/0:1-65535", "::1", 29500),
        ("0.0.0.0/0:1-65535", "a b", 29500),
        ("0.0.0.0/0:1-65535", "", 29500),
    ],
)
def test_all_else_is_refused_alike(text: str, host: str, port: int) -> None:
    with pytest.raises(SourceRefused, match="not on the engine's list"):
        resolved(rules(text), host, port)


def test_without_rules_nothing_is_allowed() -> None:
    with pytest.raises(SourceRefused):
        resolved((), "127.0.0.1", 29500)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1",
        ":29500",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:70000",
        "127.0.0.1:5-4",
        "127.0.0.1:1-2-3",
        "10.0.0.1/8:29500",
        "::1:29500",
        "256.0.0.1:29500",
        "a b:29500",
        "*:29500",
    ],
)
def test_rules_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"rendezvous|ports|host|IPv6"):
        RendezvousRule.parse(text)
