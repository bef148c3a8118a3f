"""Policy files: what they may say, and that one with a fault is refused whole."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.auth.policy.live import LivePolicy
from app.auth.policy.reading import MAX_BYTES, PolicyRefused, read_engines, read_policy
from app.auth.policy.rules import Policy, Rule, Who
from app.domain.kinds import OperationKind
from app.domain.scopes import Scope
from app.domain.selectors import Selector
from tests.auth.policies import principal

WHOLE = """
clients_may_settle = true
require_reason = ["pause", "shutdown"]

[[rules]]
name = "readers"
who = "anyone"
scopes = ["admin:read"]
engines = "all"

[[rules]]
name = "search"
scopes = "as_granted"
[rules.who]
issuer = ["https://a.test", "https://b.test"]
subject = "ada"
client = ["console", "cli"]
group = "ops"
[rules.engines]
id = ["e1", "e2"]
labels = { team = "search", env = ["dev", ""] }
without = { "vendor.example/tier" = "gold" }
"""

MINIMAL = """
[[rules]]
name = "r"
who = "anyone"
scopes = "admin:read"
engines = "all"
"""


def faults(text: str, issuers: dict[str, bool] | None = None) -> list[str]:
    with pytest.raises(PolicyRefused) as refused:
        read_policy(text.encode(), issuers)
    return [str(fault) for fault in refused.value.faults]


def test_everything_that_a_file_may_say() -> None:
    both = frozenset({"https://a.test", "https://b.test"})
    known = {"https://a.test": True, "https://b.test": True}
    assert read_policy(WHOLE.encode(), known) == Policy(
        rules=(
            Rule(name="readers", who=Who(), scopes=frozenset({Scope.READ}), engines=Selector()),
            Rule(
                name="search",
                who=Who(
                    issuers=both,
                    subjects=frozenset({"ada"}),
                    clients=frozenset({"console", "cli"}),
                    groups=frozenset({"ops"}),
                ),
                scopes=None,
                engines=Selector(
                    ids=frozenset({"e1", "e2"}),
                    labels={"team": frozenset({"search"}), "env": frozenset({"dev", ""})},
                    without={"vendor.example/tier": frozenset({"gold"})},
                ),
            ),
        ),
        require_reason=frozenset({OperationKind.PAUSE, OperationKind.SHUTDOWN}),
        clients_may_settle=True,
    )
    assert read_policy(MINIMAL.encode()).clients_may_settle is None
    every = read_policy(f'require_reason = "all"\n{MINIMAL}'.encode())
    assert every.require_reason == frozenset(OperationKind)


def test_every_fault_is_named_with_its_place() -> None:
    text = """
colour = "red"
clients_may_settle = "yes"
require_reason = ["pause", "pausing"]
[[rules]]
name = "a"
who = { issuer = "https://c.test", group = [] , team = "x" }
scopes = ["admin:read", "admin:*", 7]
engines = { labels = { "-bad" = "x", env = ["dev", "\\u00e4"] }, id = "E1" }
[[rules]]
name = "a"
who = { subject = "ada" }
scopes = []
engines = {}
more = 1
[[rules]]
who = {}
engines = "every"
"""
    assert faults(text, {"https://a.test": False}) == [
        "colour: unknown key; known here: clients_may_settle, require_reason, rules",
        "clients_may_settle: is true or false",
        "rules[1].who.team: unknown key; known here: client, group, issuer, subject",
        "rules[1].who.group: is needed: a string, or a list of some",
        "rules[1].who.issuer: 'https://c.test' is no issuer of the settings",
        "rules[1].scopes[2]: 'admin:*' is no scope; there are no wildcards",
        "rules[1].scopes[3]: is no string",
        "rules[1].engines.id: 'E1' can't be the id of an engine",
        "rules[1].engines.labels: '-bad' can't be the name of a label",
        "rules[1].engines.labels.env[2]: 'ä' can't be the value of a label",
        "rules[2].more: unknown key; known here: engines, name, scopes, who",
        "rules[2].who.issuer: is needed: names mean something with their issuer only",
        "rules[2].scopes: is needed: a string, or a list of some",
        'rules[2].engines: is needed: "all", or some of id, labels and without',
        "rules[3].name: is needed: 1 to 100 printable characters",
        'rules[3].who: is needed: "anyone", or issuer with subject, client, group',
        "rules[3].scopes: is needed: a string, or a list of some",
        'rules[3].engines: is needed: "all", or some of id, labels and without',
        "rules[2].name: 'a' names another rule already",
        "require_reason[2]: 'pausing' is no kind of order",
    ]


def test_groups_are_refused_of_an_issuer_whose_tokens_name_none() -> None:
    text = MINIMAL.replace('"anyone"', '{ issuer = "https://a.test", group = "ops" }')
    assert faults(text, {"https://a.test": False}) == [
        "rules[1].who.group: 'https://a.test' has no group_claims in the settings"
    ]
    read_policy(text.encode(), {"https://a.test": True})
    read_policy(text.encode())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"rules = []",
        b"rules = 7",
        b"rules = [1]",
        b"[rules]\nname = 'a'",
        b"[[rules]",
        b"\xff\xfe",
        b"a = " + b"[" * 100_000,
        b"#" * (MAX_BYTES + 1),
        MINIMAL.encode() + b"\nwithout = { }",
        MINIMAL.replace('"all"', "{ without = {} }").encode(),
        MINIMAL.replace('"all"', "{ labels = 'team' }").encode(),
        MINIMAL.replace('"all"', "{ labels = { team = { a = 1 } } }").encode(),
        MINIMAL.replace('"anyone"', '"everyone"').encode(),
        MINIMAL.replace('"anyone"', "{ issuer = '' }").encode(),
        MINIMAL.replace('"admin:read"', '"*"').encode(),
        MINIMAL.replace('"admin:read"', '"admin:read admin:pause"').encode(),
        MINIMAL.replace('"admin:read"', '"all"').encode(),
    ],
)
def test_what_is_no_policy_is_refused(content: bytes) -> None:
    with pytest.raises(PolicyRefused) as refused:
        read_policy(content)
    assert refused.value.faults


@pytest.mark.parametrize(
    ("name", "taken"), [("x", True), ("x" * 100, True), ("x" * 101, False), ("a\\u0007", False)]
)
def test_the_shortest_and_the_longest_name_of_a_rule(name: str, taken: bool) -> None:
    text = MINIMAL.replace('name = "r"', f'name = "{name}"')
    if taken:
        assert read_policy(text.encode()).rules[0].name == name
    else:
        assert faults(text) == ["rules[1].name: is needed: 1 to 100 printable characters"]


@pytest.mark.parametrize(
    ("name", "taken"),
    [("x", True), ("x" * 255, True), ("x" * 256, False), ("", False), ("a\\u0007", False)],
)
@pytest.mark.parametrize("field", ["issuer", "subject", "client", "group"])
def test_the_shortest_and_the_longest_name_of_a_caller(field: str, name: str, taken: bool) -> None:
    who = {"issuer": "https://a.test", field: name}
    table = ", ".join(f'{key} = "{value}"' for key, value in who.items())
    text = MINIMAL.replace('"anyone"', f"{{ {table} }}")
    if taken:
        assert getattr(read_policy(text.encode()).rules[0].who, f"{field}s") == {name}
    else:
        assert faults(text) == [f"rules[1].who.{field}: has 1 to 255 printable characters"]


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ('{ without = { "-bad" = "x" } }', "rules[1].engines.without"),
        ('{ without = { a = "\\u00e4" } }', "rules[1].engines.without.a"),
        ('{ without = { a = ["x", 7] } }', "rules[1].engines.without.a[2]"),
        ("{ without = 7 }", "rules[1].engines.without"),
        ("{ without = {} }", "rules[1].engines.without"),
        ("{ labels = {} }", "rules[1].engines.labels"),
        ("{ labels = { a = [] } }", "rules[1].engines.labels.a"),
        ('{ id = ["e1", "E1"] }', "rules[1].engines.id[2]"),
        ('{ id = "e1", ids = "e2" }', "rules[1].engines.ids"),
        ("7", "rules[1].engines"),
    ],
)
def test_where_a_fault_of_engines_is(written: str, place: str) -> None:
    assert [fault.partition(": ")[0] for fault in faults(MINIMAL.replace('"all"', written))] == [
        place
    ]


X = {"a": frozenset({"x"})}


@pytest.mark.parametrize(
    ("said", "engines"),
    [
        ("all", Selector()),
        ({"id": "e1"}, Selector(ids=frozenset({"e1"}))),
        ({"labels": {"a": "x"}}, Selector(labels=X)),
        ({"without": {"a": ["x"]}}, Selector(without=X)),
    ],
)
def test_engines_where_something_else_than_a_rule_says_which(said: Any, engines: Selector) -> None:
    assert read_engines(said) == engines


@pytest.mark.parametrize("place", [(), ("caller.engines",)])
def test_where_a_fault_of_such_engines_is(place: tuple[str, ...]) -> None:
    with pytest.raises(PolicyRefused) as refused:
        read_engines({"ids": "e1", "id": "E1"}, *place)
    at = place[0] if place else "engines"
    assert [fault.place for fault in refused.value.faults] == [f"{at}.ids", f"{at}.id"]


def test_rules_without_a_name_are_not_of_one_name() -> None:
    nameless = MINIMAL.replace('name = "r"\n', "")
    assert faults(nameless + nameless) == [
        f"rules[{number}].name: is needed: 1 to 100 printable characters" for number in (1, 2)
    ]


def test_what_a_file_may_leave_out_or_say_in_few_words() -> None:
    for text in (MINIMAL, f"require_reason = []\n{MINIMAL}"):
        policy = read_policy(text.encode())
        assert (policy.require_reason, policy.clients_may_settle) == (frozenset(), None)
    one = read_policy(f'require_reason = "pause"\nclients_may_settle = false\n{MINIMAL}'.encode())
    assert one.require_reason == {OperationKind.PAUSE}
    assert one.clients_may_settle is False
    with pytest.raises(PolicyRefused):
        read_policy(f"require_reason = 7\n{MINIMAL}".encode())


def test_the_largest_file_and_the_most_faults() -> None:
    full = MINIMAL.encode()
    assert read_policy(full + b"#" * (MAX_BYTES - len(full)))
    assert faults("#" * (MAX_BYTES + 1)) == [f"file: is larger than {MAX_BYTES} bytes"]
    assert len(faults("\n".join(f"unknown{n} = 1" for n in range(101)))) == 100
    with pytest.raises(PolicyRefused) as refused:
        read_policy(b"a = 1")
    assert str(refused.value) == (
        "a: unknown key; known here: clients_may_settle, require_reason, rules; "
        "rules: there are none, so nobody could do anything"
    )


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode()))
def test_no_file_is_more_than_refused(content: bytes) -> None:
    with pytest.raises(PolicyRefused):
        read_policy(content)


def replaced(path: Path, text: str) -> None:
    """As an editor or a config map does it: another file takes the place."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)


def test_a_running_gateway_follows_its_file_and_keeps_what_was_whole(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(MINIMAL)
    live = LivePolicy(path)
    ada = principal(Scope.READ, Scope.PAUSE)
    assert live.look() == "unchanged"
    assert live.permit(ada).scopes() == {Scope.READ}

    replaced(path, MINIMAL.replace("admin:read", "admin:pause"))
    assert live.look() == "loaded"
    assert live.permit(ada).scopes() == {Scope.PAUSE}

    stamp = path.stat()
    path.write_text(MINIMAL.replace("admin:read", "admin:sleep"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # its times say that nothing changed
    assert (live.look(), live.ok) == ("refused", False)
    assert [fault.place for fault in live.faults] == ["rules[1].scopes"]
    assert live.permit(ada).scopes() == {Scope.PAUSE}
    assert (live.look(), live.ok) == ("unchanged", False)

    path.unlink()
    assert (live.look(), live.ok) == ("refused", False)
    assert live.look() == "unchanged"
    assert live.permit(ada).scopes() == {Scope.PAUSE}

    path.write_text(MINIMAL.replace("admin:read", "admin:pause"))
    assert (live.look(), live.ok) == ("loaded", True)
    assert live.look() == "unchanged"


def test_a_file_that_grows_too_large_is_refused_and_one_that_is_gone_says_so(
    tmp_path: Path,
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(MINIMAL)
    live = LivePolicy(path, {"https://a.test": False})
    whole = hashlib.sha256(MINIMAL.encode()).hexdigest()
    hashes = [live.sha256]
    path.write_text(MINIMAL + "#" * MAX_BYTES)
    assert live.look() == "refused"
    assert [str(fault) for fault in live.faults] == [f"file: is larger than {MAX_BYTES} bytes"]
    hashes.append(live.sha256)
    path.unlink()
    assert live.look() == "refused"
    hashes.append(live.sha256)
    assert [str(fault) for fault in live.faults] == [
        "file: can't be read: No such file or directory"
    ]
    path.write_text(MINIMAL)  # as it was: it is in force anew, though it never was out of it
    assert (live.look(), live.ok) == ("loaded", True)
    hashes.append(live.sha256)
    first, larger, gone, last = hashes
    assert first == last == whole
    assert larger not in (whole, None)
    assert gone is None
    who = '{ issuer = "https://a.test", group = "ops" }'
    path.write_text(MINIMAL.replace('"anyone"', who))
    assert live.look() == "refused"  # the issuers of the settings still count
    path.write_text(MINIMAL.replace('"anyone"', who.replace("https://a", "https://b")))
    assert live.look() == "refused"
    assert live.look() == "unchanged"


def test_half_a_file_that_is_a_policy_by_itself_never_counts(tmp_path: Path) -> None:
    head = '[[rules]]\nname = "a"\nscopes = "as_granted"\nengines = "all"\n[rules.who]\n'
    half = f'{head}issuer = "https://a.test"\n'
    whole = f'{half}subject = "ada"\n'
    read_policy(half.encode())  # for everybody of that issuer
    path = tmp_path / "policy.toml"
    path.write_text(MINIMAL)

    def written_on(_: float) -> None:
        path.write_text(whole)

    live = LivePolicy(path, settle_s=1.0, sleep=written_on)
    path.write_text(half)
    assert (live.look(), live.ok) == ("unchanged", True)
    assert live.policy == read_policy(MINIMAL.encode())
    assert live.look() == "loaded"
    assert live.policy == read_policy(whole.encode())


def test_a_pipe_in_the_file_s_place_is_refused_and_keeps_nobody(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(MINIMAL)
    live = LivePolicy(path)
    path.unlink()
    os.mkfifo(path)
    assert (live.look(), live.ok, live.sha256) == ("refused", False, None)
    assert live.look() == "unchanged"
    assert live.policy is not None
    path.unlink()
    path.write_text(MINIMAL)
    assert (live.look(), live.ok) == ("loaded", True)


def test_the_first_reading_is_not_survived(tmp_path: Path) -> None:
    for made in (lambda p: None, lambda p: p.write_text("rules = 1"), Path.mkdir, os.mkfifo):
        path = tmp_path / f"policy-{len(list(tmp_path.iterdir()))}-{id(made)}"
        made(path)
        with pytest.raises(PolicyRefused):
            LivePolicy(path)


def test_without_a_file_there_is_nothing_to_look_at() -> None:
    live = LivePolicy(None)
    assert (live.look(), live.ok, live.policy) == ("unchanged", True, None)
    assert live.permit(principal(Scope.READ)).unlimited
