"""`chadburn policy`: files are checked, and calls explained, without a gateway."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ran, Run

ISSUER = "https://id.example"
POLICY = f"""
[[rules]]
name = "readers"
who = {{ issuer = "{ISSUER}" }}
scopes = "admin:read"
engines = "all"
[[rules]]
name = "search"
who = {{ issuer = "{ISSUER}", group = "search" }}
scopes = ["admin:pause", "admin:cancel"]
engines = {{ labels = {{ team = "search" }} }}
[[rules]]
name = "night"
who = {{ issuer = "{ISSUER}", subject = "eve" }}
scopes = ["admin:abort"]
engines = {{ id = "e9" }}
"""
CONFIG = f"""
audience = "urn:gw"
[[issuers]]
issuer = "{ISSUER}"
group_claims = ["groups"]
inference_audiences = ["urn:inference"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "gateway.toml").write_text(f'policy_file = "policy.toml"\n{CONFIG}')
    return tmp_path


def claims(scope: str = "admin:read admin:pause admin:settle", **more: Any) -> str:
    now = int(time.time())
    own = {"iss": ISSUER, "sub": "ada", "aud": "urn:gw", "client_id": "console", "jti": "1"}
    return json.dumps({**own, "iat": now, "exp": now + 300, "scope": scope, **more})


def explained(run: Run, who: str, *more: str) -> Ran:
    return run("policy", "explain", who, *more, "--config", "gateway.toml")


def test_a_good_file_is_said_to_be_good(run: Run, folder: Path) -> None:
    for more in ((), ("--config", "gateway.toml")):
        ran = run("policy", "check", "policy.toml", *more)
        assert (ran.code, ran.out) == (0, "policy.toml: good; rules: 3\n")


def test_every_fault_of_a_file_is_told(run: Run, folder: Path) -> None:
    (folder / "bad.toml").write_text(POLICY.replace("admin:read", "read").replace(ISSUER, "x", 1))
    ran = run("policy", "check", "bad.toml", "--config", "gateway.toml")
    assert ran.code == 6
    assert ran.err.splitlines() == [
        "bad.toml: rules[1].who.issuer: 'x' is no issuer of the settings",
        "bad.toml: rules[1].scopes: 'read' is no scope; there are no wildcards",
        "chadburn: bad.toml: 2 faults",
    ]
    assert run("policy", "check", "none.toml").code == 2


@pytest.mark.parametrize(
    ("who", "call", "code", "answer"),
    [
        (claims(), ["GET", "/v1/engines/e1"], 0, "allowed: a rule leaves each scope"),
        (claims(), ["GET", "/v1/engines?role=decode"], 0, "allowed: a rule leaves each scope"),
        (claims("admin:pause"), ["GET", "/v1/engines"], 6, "refused: INSUFFICIENT_SCOPE"),
        (claims(aud="urn:inference"), ["GET", "/v1/me"], 6, "refused: INSUFFICIENT_SCOPE"),
        (claims(), ["POST", "/v1/engines/e1/pause"], 6, "refused: REFUSED_BY_POLICY"),
        (claims(), ["GET", "/healthz"], 0, "allowed: the route is open to all"),
        (claims(), ["GET", "/v1/me"], 0, "allowed: a rule leaves each scope"),
    ],
)
def test_a_call_is_explained(
    run: Run, folder: Path, who: str, call: list[str], code: int, answer: str
) -> None:
    ran = explained(run, who, *call)
    assert (ran.code, ran.err) == (code, "")
    assert ran.out.splitlines()[-1] == f"answer  {answer}"


def test_an_identity_of_the_settings_is_explained_too(run: Run, folder: Path) -> None:
    (folder / "secret").write_text("0123456789abcdef0123456789abcdef")
    identity = (
        '[[compat]]\nlayer = "vllm"\nengines = ["e1", "e2"]\n[[compat_identity]]\nname = "rl"\n'
        'scopes = ["admin:read", "admin:pause"]\nengines = { id = "e1" }\nsecret_file = "secret"\n'
    )
    config = folder / "gateway.toml"
    config.write_text(f"{CONFIG}{identity}")
    pause = "/compat/vllm/{}/pause"
    allowed = explained(run, "identity:rl", "POST", pause.format("e1"))
    assert (allowed.code, allowed.err) == (0, ""), allowed.out
    assert "caller  rl of urn:chadburn:compat-identity by client secret_path, a client" in (
        allowed.out
    )
    assert "'its own engines': leaves admin:pause admin:read on id 'e1'" in allowed.out
    assert allowed.out.splitlines()[-1] == (
        "flush   needs admin:cache too, unless mode=keep or clear_cache=false:"
        " refused: INSUFFICIENT_SCOPE"
    )
    hidden = explained(run, "identity:rl", "POST", pause.format("e2"))
    assert (hidden.code, "refused: ENGINE_NOT_FOUND" in hidden.out) == (6, True)
    nobody = explained(run, "identity:other", "POST", pause.format("e1"))
    told = "no compat_identity of the settings is called so"
    assert (nobody.code, told in nobody.err, "--config" in nobody.err) == (2, True, False)
    unread = run("policy", "explain", "identity:rl", "POST", pause.format("e1"))
    assert (unread.code, f"{told}; --config FILE" in unread.err) == (2, True)
    rule = 'name = "all"\nwho = { issuer = "urn:chadburn:compat-identity" }\n'
    (folder / "p.toml").write_text(f'[[rules]]\n{rule}scopes = ["admin:read"]\nengines = "all"\n')
    narrower = explained(run, "identity:rl", "POST", pause.format("e1"), "--policy", "p.toml")
    assert (narrower.code, "refused: REFUSED_BY_POLICY" in narrower.out) == (6, True)
    assert run("policy", "check", "p.toml", "--config", "gateway.toml").code == 0
    config.write_text(CONFIG)
    assert "is no issuer" in run("policy", "check", "p.toml", "--config", "gateway.toml").err


def test_labels_decide_and_are_asked_for(run: Run, folder: Path) -> None:
    who, call = claims("admin:pause", groups=["search"]), ("POST", "/v1/engines/e1/pause")
    for label, code, answer in (
        ((), 5, "depends: on which engine it is, and its labels"),
        (("--label", "team=search", "--label", "env=dev"), 0, "allowed: a rule leaves each scope"),
        (("--label", "team=ads"), 6, "refused: ENGINE_NOT_FOUND"),
        (("--label", ""), 6, "refused: ENGINE_NOT_FOUND"),
    ):
        ran = explained(run, who, *call, *label)
        assert (ran.code, ran.out.splitlines()[-1]) == (code, f"answer  {answer}")
    assert "rule    'readers': leaves nothing on all engines" in ran.out
    assert "rule    'search': leaves admin:pause on team = 'search', not this one" in ran.out
    assert "rule    'night': not for this caller (subject)" in ran.out


def test_an_operation_takes_the_scope_of_its_kind_and_settling_a_person(
    run: Run, folder: Path
) -> None:
    path = "/v1/operations/0198c5f1-0000-7000-8000-000000000000"
    who = claims("admin:cancel admin:settle", groups=["search"])
    ran = explained(run, who, "POST", f"{path}/cancel", "--engine", "e1", "--kind", "pause")
    assert "missing admin:pause: the token does not grant it" in ran.out.splitlines()
    both = claims("admin:cancel admin:pause", groups=["search"])
    cancel = ("POST", f"{path}/cancel")
    which, ours = "depends: on which engine it is, and its labels", ("--label", "team=search")
    for more, code, answer in (
        ((), 5, which),
        (("--kind", "pause"), 5, which),
        (ours, 5, "depends: on the operation's kind"),
        ((*ours, "--kind", "pause"), 0, "allowed: a rule leaves each scope"),
    ):
        ran = explained(run, both, *cancel, *more)
        assert (ran.code, ran.out.splitlines()[-1]) == (code, f"answer  {answer}")
    settle = ("POST", f"{path}/settle", "--policy", "settlers.toml", "--kind", "pause")
    who = claims("admin:settle admin:pause")
    text = POLICY.replace('"admin:read"', '"as_granted"')
    (folder / "settlers.toml").write_text(text)
    assert explained(run, who, *settle).code == 0
    program = claims("admin:settle admin:pause", sub="console")
    ran = explained(run, program, *settle)
    assert (ran.code, ran.out.splitlines()[-1]) == (6, "answer  refused: PERSON_NEEDED")
    (folder / "settlers.toml").write_text(f"clients_may_settle = true\n{text}")
    assert explained(run, program, *settle).code == 0


def test_the_same_as_json(run: Run, folder: Path) -> None:
    who = claims("admin:pause", groups=["search"])
    ran = explained(run, who, "POST", "/v1/engines/e1/pause", "--label", "team=search", "--json")
    said = json.loads(ran.out)
    assert (said["verdict"], said["needs"], said["token_lacks"]) == ("allowed", ["admin:pause"], [])
    assert said["caller"]["groups"] == ["search"]
    assert [rule["takes"] for rule in said["rules"]] == ["yes", "yes", "no"]


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        (claims(exp=1), "TOKEN_EXPIRED"),
        (claims(aud="urn:other"), "TOKEN_AUDIENCE_FOREIGN"),
        (claims(iss="https://other.example"), "TOKEN_ISSUER_FOREIGN"),
        (claims(iss=None), "TOKEN_CLAIM_INVALID"),
        ("{}", "TOKEN_CLAIM_MISSING"),
        ("no-token", "TOKEN_MALFORMED"),
    ],
)
def test_who_would_not_be_known_is_told_why(run: Run, folder: Path, who: str, reason: str) -> None:
    ran = explained(run, who, "GET", "/v1/me")
    assert ran.code == 6
    assert ran.err.startswith(f"chadburn: {reason}: ")


def test_what_is_no_question(run: Run, folder: Path) -> None:
    assert explained(run, "{not json", "GET", "/v1/me").code == 2
    assert explained(run, claims(), "GET", "/v1/engines/e1", "--label", "team").code == 2
    assert explained(run, claims(), "GET", "/v2/me").code == 6
    assert explained(run, claims(), "DELETE", "/v1/me").code == 6
    assert explained(run, claims(), "GET", "/v1/me", "--policy", "none.toml").code == 2
    assert run("policy", "explain", claims(), "GET", "/v1/me").code == 2  # no issuer is set
