"""The README's and docs' commands: each is run, or stands in a table that says why not, and each of
ours is one that the parser takes."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from app.cli import app
from tests.e2e.page_shell import FOLDERS, Failed, Shell
from tests.e2e.page_table import ELSEWHERE, WAYS, Way, elsewhere
from tests.e2e.pages import (
    PAGES,
    ROOT,
    SHOWN,
    TYPED,
    Command,
    all_blocks,
    all_commands,
    blocks_of,
    commands_of,
    inline_code,
    name_of,
    unfenced_commands,
)
from tests.e2e.processes import Demo
from tests.e2e.stack import stack
from tests.sidecars.checkpoints import checkpoint

# ---- nothing is passed over ----


def test_every_block_says_what_it_is() -> None:
    strange = [str(block) for block in all_blocks() if block.language not in {*TYPED, *SHOWN}]
    assert strange == []
    assert unfenced_commands() == []


def test_every_command_is_run_or_has_a_reason_not_to_be() -> None:
    lost = [
        str(command)
        for command in all_commands()
        if command.page not in WAYS and elsewhere(command) is None
    ]
    assert lost == []


def test_the_tables_name_what_there_is() -> None:
    commands = all_commands()
    assert [one for one in ELSEWHERE if not any(map(one.covers, commands))] == []
    assert [one for one in ELSEWHERE if not all((ROOT / path).exists() for path in one.by)] == []
    run = {command.page for command in commands if elsewhere(command) is None}
    assert set(WAYS) == run


# ---- what can be seen without running it ----


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a line of a shell, those in `$(…)` too."""
    text = text.replace("\\\n", " ")
    for inner in re.findall(r"\$\(([^()]*)\)", text):
        yield from simple_commands(inner)
    lexer = shlex.shlex(re.sub(r"\$\([^()]*\)", "X", text), posix=True, punctuation_chars=True)
    lexer.wordchars += "…$@%+,{}:[]!^"
    words = list[str]()
    for word in [*_lines(lexer), ";"]:
        if set(word) <= set("();<>|&"):
            yield words
            words = []
        else:
            words.append(word)


def _lines(lexer: shlex.shlex) -> Iterator[str]:
    lexer.whitespace = " \t"
    for word in lexer:
        yield from (";" if part == "\n" else part for part in re.split(r"(\n)", word) if part)


def ours(text: str) -> Iterator[list[str]]:
    """Arguments of each `chadburn` in it."""
    for words in simple_commands(text):
        place = words.index("chadburn") if "chadburn" in words else 0
        before = words[:place]
        if words[place : place + 1] == ["chadburn"] and all(map(_BEFORE.fullmatch, before[-1:])):
            yield words[place + 1 :]


# What the name of the command follows: nothing, a variable, or another command's `--`.
_BEFORE = re.compile(r"--|exec|\w+=.*")


@pytest.fixture(scope="module")
def built() -> Any:
    return typer.main.get_command(app)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CHADBURN_")]:
        monkeypatch.delenv(name)


def parse(command: Any, words: list[str]) -> None:
    """Raises TyperException, or AssertionError for a verb that is not there. A line with `…` in
    it is a part of one: its options have to be there."""
    name = "chadburn"
    while isinstance(command, TyperGroup):
        name = words[0]
        if name.isupper() or name == "…":  # any of them
            return
        assert name in command.commands, f"there is no {name!r}"
        command, words = command.commands[name], words[1:]
    if "…" in words:
        known = {option for parameter in command.params for option in parameter.opts}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known | {"--help"}
    else:
        command.make_context(name, list(words))


def test_every_command_of_ours_is_taken_by_the_parser(built: Any) -> None:
    wrong, seen = [], 0
    for command in all_commands():
        for words in ours(command.text):
            seen += 1
            try:
                parse(built, words)
            except (TyperException, AssertionError) as error:
                wrong.append(f"{command}: {words}: {error}")
    assert wrong == []
    assert seen > 50


def test_every_verb_and_option_in_running_text_is_there(built: Any) -> None:
    """`chadburn …` between backticks, where arguments are often left out."""
    wrong, seen = [], 0
    for page in PAGES:
        for code in inline_code(page):
            if not code.startswith("chadburn "):
                continue
            with contextlib.suppress(ValueError):  # a quotation mark that is cut off
                for words in ours(code.replace("|", " ")):
                    seen += 1
                    try:
                        parse(built, [*words, "…"])
                    except AssertionError as error:
                        wrong.append(f"{name_of(page)}: {code}: {error}")
    assert wrong == []
    assert seen > 50


def test_every_target_and_script_is_there() -> None:
    found = {
        tuple(words)
        for command in all_commands()
        for words in simple_commands(command.text)
        if words and words[0] == "make"
    }
    assert found
    for words in found:
        done = subprocess.run(
            ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    scripts = {
        word
        for command in all_commands()
        for word in re.findall(r"(?:^|\s)((?:scripts|deploy|examples)/[\w./-]+)", command.text)
    }
    assert {one for one in scripts if not (ROOT / one).is_file()} == set()


# ---- running them ----


@contextlib.contextmanager
def beside(way: Way, folder: Path, demo: Demo) -> Iterator[dict[str, str]]:
    """Variables of the shell's environment."""
    if way.gateway is None:
        # Where the pages say that it is, for the shell and for the engine, which reads paths too.
        for place in {folder, demo.folder}:
            (place / ".data").mkdir(exist_ok=True)
            if not (place / ".data" / "demo").exists():
                (place / ".data" / "demo").symlink_to(demo.folder / "data")
        yield {}
        return
    own = folder / "gateway"
    own.mkdir()
    settings = FOLDERS.sub(lambda found: f"{folder}/root{found[0]}", way.gateway)
    with stack(own, more=settings, with_engine=False) as standing:
        yield {
            "CHADBURN_URL": standing.ready["base_url"],
            "CHADBURN_TOKEN": standing.ready["tokens"]["operator"],
        }


def machine(folder: Path, way: Way) -> None:
    """What pages take for granted in the folder where one is, and on its machine."""
    for name in ("examples", "scripts", "deploy", "plugins", ".venv-client"):
        (folder / name).symlink_to(ROOT / name)
    for path in (
        "etc/chadburn",
        "var/lib/chadburn",
        "srv/weights",
        "srv/loras",
        "srv/profiles",
        "tmp",
    ):
        (folder / "root" / path).mkdir(parents=True)
    for name in ("sidecar.token", "trtllm.key"):
        (folder / "root" / "etc" / "chadburn" / name).write_text(secrets.token_hex(32))
        (folder / "root" / "etc" / "chadburn" / name).chmod(0o600)
    for seed, path in enumerate(way.weights, start=1):
        checkpoint(folder / "root" / "srv" / path, seed)


def files_shown(page: str, folder: Path, words: dict[str, str]) -> None:
    """Those that a page shows under a name."""
    for block in blocks_of(ROOT / page):
        if named := re.match(r"# ([\w-]+\.toml)\n", block.text):
            text = block.text
            for word, real in words.items():
                text = text.replace(word, real)
            (folder / named[1]).write_text(text)


def open_again(demo: Demo) -> None:
    """The demo's engine, for the page that comes next."""
    ready = demo.ready
    headers = {"authorization": f"Bearer {ready['tokens']['operator']}"}
    url = f"{ready['base_url']}/v1/engines/{ready['engine']}"
    with httpx2.Client(headers=headers, trust_env=False, timeout=60) as client:
        pause = client.get(url).json()["facts"]["pause"]
        if pause is not None:
            key = {"idempotency-key": secrets.token_hex(8), "prefer": "wait=25"}
            lift = {"pause_epoch": pause["epoch"], "when_busy": "queue"}
            answer = client.post(f"{url}/resume", json=lift, headers=key)
            assert answer.json()["state"] == "succeeded", answer.text


def typed(page: str) -> list[list[Command]]:
    """By block, those that are run."""
    commands = [one for one in commands_of(page) if elsewhere(one) is None]
    blocks = [set(block.commands()) for block in blocks_of(ROOT / page)]
    return [found for block in blocks if (found := [one for one in commands if one in block])]


FIRST = "README.md"
OTHERS = [pytest.param(page, marks=pytest.mark.long) for page in sorted(WAYS) if page != FIRST]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [FIRST, *OTHERS])
def test_the_page_does_what_it_says(page: str, demo: Demo, tmp_path: Path) -> None:
    open_again(demo)
    try:
        type_out(page, demo, tmp_path)
    except Failed as failed:
        pytest.fail(str(failed), pytrace=False)


def type_out(page: str, demo: Demo, tmp_path: Path) -> None:
    way, ready = WAYS[page], demo.ready
    ports = {
        "8765": ready["base_url"].rpartition(":")[2],
        "8767": ready["inference_address"].rpartition(":")[2],
        "8768": ready["admin_address"].rpartition(":")[2],
    }
    issuer = ready["issuer"].rpartition(":")[2]
    ports[issuer] = issuer
    words = dict(way.words)
    if page == "docs/policy.md":
        words["https://id.example"] = ready["issuer"]
        (tmp_path / "token").write_text(ready["tokens"]["operator"])
    machine(tmp_path, way)
    files_shown(page, tmp_path, words)
    blocks = typed(page)
    parts = blocks if way.apart else [[command for block in blocks for command in block]]
    with beside(way, tmp_path, demo) as variables:
        for part in parts:
            own = {} if way.apart and way.gateway is None else ports
            shell = Shell(
                tmp_path, variables, dict(own), words,
                way.told, way.behind, way.ends,
            )  # fmt: skip
            with shell.open():
                for text in way.before:
                    shell.type(Command(page, 0, text))
                for command in part:
                    shell.type(command)
                for text in way.after:
                    shell.type(Command(page, 0, text))
