"""A file that lists engines: its shapes, its faults, and how it is followed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from pathlib import Path

import pytest

from app.discovery.engine_list import ListRefused, read_list
from app.discovery.file import MAX_BYTES, FileSource
from app.discovery.plan import LABEL
from app.domain.engine import Dialect, Member, TlsNames
from app.settings import load_settings

ONE = """
[[engines]]
id = "one"
members = [{ admin = "10.0.0.1:8443", control = "10.0.0.1:8444" }]
tls = { credential = "rack" }
labels = { team = "a" }
"""
TWO = ONE + ONE.replace('"one"', '"two"')


def ids(source: FileSource) -> list[str] | None:
    return None if source.listed is None else list(source.listed)


def test_an_engine_is_written_as_it_is_registered() -> None:
    (one,) = read_list(ONE.encode(), is_json=False).values()
    assert (one.id, one.dialect) == ("one", Dialect.OPENENGINE)
    assert one.members == (Member(0, "10.0.0.1:8443", "10.0.0.1:8444"),)
    assert (one.tls, one.labels) == (TlsNames(credential="rack"), {"team": "a"})


def test_the_same_in_json() -> None:
    engine = {
        "id": "one",
        "members": [{"admin": "10.0.0.1:8443", "control": "10.0.0.1:8444"}],
        "tls": {"credential": "rack"},
        "labels": {"team": "a"},
    }
    content = json.dumps({"engines": [engine]}).encode()
    assert read_list(content, is_json=True) == read_list(ONE.encode(), is_json=False)


def test_no_engines_are_said_to_be_none() -> None:
    assert read_list(b"engines = []", is_json=False) == {}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "engines: Field required"),
        ("engines", "is not valid TOML: "),
        ("\xff", "is not valid TOML: "),
        ("engines = 3", "engines: Input should be a valid tuple"),
        (TWO.replace('"two"', '"one"'), "engines[1].id: one is there twice"),
        (ONE + "more = 1", "engines[0].more: Extra inputs are not permitted"),
        (ONE.replace('"one"', '"One"'), "engines[0].id: String should match pattern"),
        (ONE.replace("admin =", "adnim ="), "engines[0].members[0].admin: Field required"),
        (ONE.replace("team", f'"{LABEL}"'), f"engines[0].labels: {LABEL} is not for a list"),
    ],
)
def test_a_fault_says_where_it_is(content: str, fault: str) -> None:
    with pytest.raises(ListRefused) as refused:
        read_list(content.encode("latin-1"), is_json=False)
    assert refused.value.faults[0].startswith(fault)


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000, b'{"engines": null}', b"\xff"])
def test_broken_json_is_refused(content: bytes) -> None:
    with pytest.raises(ListRefused):
        read_list(content, is_json=True)


@pytest.mark.parametrize(
    ("name", "start"),
    [("k" * 1_000_000, "kkk"), ("a\0b\nc\x1b[2J", "a\ufffdb\ufffdc\ufffd[2J: Extra")],
)
def test_a_field_s_name_can_be_kept_in_log_and_audit(name: str, start: str) -> None:
    """A list may be a million characters of one name, or write to the terminal of who reads."""
    with pytest.raises(ListRefused) as refused:
        read_list(json.dumps({"engines": [], name: 1}).encode(), is_json=True)
    (fault,) = refused.value.faults
    assert fault.startswith(start)
    assert fault.endswith("Extra inputs are not permitted")
    assert len(fault) <= 301
    assert fault.isprintable()
    assert str(refused.value) == fault


def test_the_page_s_examples_are_right(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    lists = [one for one in examples if "[[engines]]" in one]
    settings = [one for one in examples if "[[discovery]]" in one]
    assert (len(lists), len(settings), len(examples)) == (1, 2, 3)
    assert list(read_list(lists[0].encode(), is_json=False)) == ["torch-0"]
    path = tmp_path / "chadburn.toml"
    path.write_text("\n".join(settings))
    assert [one.known_as for one in load_settings(path).discovery] == ["file", "kubernetes"]


def test_what_was_whole_stays_while_the_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    source = FileSource("file", path, settle_s=0)
    assert source.look()
    assert (ids(source), source.faults) == (None, ("can't be read: No such file or directory",))
    assert not source.look()

    path.write_text(ONE)
    assert source.look()
    assert (ids(source), source.faults) == (["one"], ())
    assert not source.look()

    path.write_text(TWO + "]")
    assert source.look()
    assert ids(source) == ["one"]
    assert source.faults[0].startswith("is not valid TOML")
    assert not source.look()

    path.write_text(TWO)
    assert source.look()
    assert (ids(source), source.faults) == (["one", "two"], ())

    path.unlink()
    assert source.look()
    assert ids(source) == ["one", "two"]
    path.write_text(TWO)
    assert source.look()
    assert source.faults == ()


def test_half_a_file_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    path.write_text(ONE)

    def written_meanwhile(seconds: float) -> None:
        assert seconds == 0.5
        path.write_text(TWO)

    source = FileSource("file", path, settle_s=0.5, sleep=written_meanwhile)
    assert not source.look()
    assert ids(source) is None
    assert source.look()
    assert ids(source) == ["one", "two"]


def test_a_pipe_and_a_flood_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    source = FileSource("file", pipe, settle_s=0)
    assert source.look()
    assert source.faults == ("is no file but something else",)
    flood = tmp_path / "flood.toml"
    flood.write_bytes(b"#" * (MAX_BYTES + 1))
    source = FileSource("file", flood, settle_s=0)
    assert source.look()
    assert source.faults == (f"is larger than {MAX_BYTES} bytes",)


@pytest.mark.anyio
async def test_a_link_that_is_turned_elsewhere_is_followed(tmp_path: Path) -> None:
    """As Kubernetes does it with a ConfigMap that is mounted."""
    for name, content in (("old", ONE), ("new", TWO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engines.toml").write_text(content)
    link = tmp_path / "data"
    link.symlink_to("old")
    source = FileSource("file", link / "engines.toml", look_s=0.01, settle_s=0)
    changed = asyncio.Event()
    following = asyncio.create_task(source.follow(changed.set))
    try:
        await changed.wait()
        assert ids(source) == ["one"]
        changed.clear()
        (tmp_path / "next").symlink_to("new")
        (tmp_path / "next").replace(link)
        await changed.wait()
        assert ids(source) == ["one", "two"]
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
