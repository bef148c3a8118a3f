"""A terminal in which the commands of a page are typed, one after the other.

It is a real shell with the page's own words. Exchanged is only what differs from reader to reader:
ports, folders of the whole machine (`/srv`, `/etc/chadburn`, …), and names that an earlier answer
gave (`Told`). What the page shows of an answer is looked for in the real one, a number standing for
any number and `…` for anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.e2e.pages import ROOT, Command
from tests.e2e.processes import POLL_S, START_S, descendants, environment, gone

# Of the whole machine, and so not for a test to write to.
FOLDERS = re.compile(r"(?<![\w.$}])(/etc/chadburn|/var/lib/chadburn|/srv|/tmp)(?=[/\"'\s]|$)")
_PORT = re.compile(
    r"(?<=127\.0\.0\.1:)\d{4,5}\b|(?<=--port )\d+|(?<=--grpc-port )\d+|(?<=_PORT=)\d+"
)
_HEX = "[0-9a-f]"
_VARIED = re.compile(
    rf"(?P<uuid>{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}})"
    rf"|(?P<id>\b(?={_HEX}*\d)(?={_HEX}*[a-f]){_HEX}{{4,}}\b)|(?P<number>\d+)|(?P<gap>\s+)|(?P<any>…)"
)
_LIKE = {"uuid": "[0-9a-f-]{36}", "id": "[0-9a-f]+", "number": r"\d+", "gap": r"\s+", "any": ".*"}
_REGISTERS = re.compile(r"chadburn engines register ([\w-]+)")
_ASSIGNED = re.compile(r"(?P<name>[A-Z]+)=\S+\s+# (?P<path>\S+) of the answer")
_STATUS = re.compile(r"\bcurl\b.*# (?P<status>\d{3})\s*$", re.DOTALL)
_PRINTED = re.compile(r"echo \$\?\s*# (?P<code>\d+)$")
_LISTENS = re.compile(r"(?:127\.0\.0\.1:)(\d+)")
_MARK = "PAGE_SHELL"
_STAND_INS = Path(__file__).with_name("stand_ins.py")
_CURL = Path(__file__).with_name("curl.py")


@dataclass(frozen=True, slots=True)
class Told:
    """`word` of the page is what `pattern` found last in what was said; `made` of it."""

    word: str
    pattern: str
    made: str = r"\1"


@dataclass(frozen=True, slots=True)
class Behind:
    """What begins with `text` runs on behind what follows, once it has said `until` (None: at
    once)."""

    text: str
    until: str | None


@dataclass(frozen=True, slots=True)
class Ends:
    """What begins with `text` ends with `code`, and the page says so in its own way."""

    text: str
    code: int


# Whatever page they are on.
SERVERS = (
    Behind("chadburn sidecar", r"admin (\S+),"),
    Behind("VLLM_SERVER_DEV_MODE=1 vllm serve", "listens"),
    Behind("vllm-rs serve", "listens"),
    Behind("python -m sglang.launch_server", "listens"),
    Behind("trtllm-serve", "listens"),
    Behind("DYN_SYSTEM_PORT=8081", "listens"),
)


class Failed(Exception):
    """A page that does not do what it says."""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def shown(line: str) -> re.Pattern[str]:
    """What a page shows as one line of an answer, as a pattern for any such answer."""
    found, end = list[str](), 0
    for varied in _VARIED.finditer(line.strip()):
        found += [re.escape(line.strip()[end : varied.start()]), _LIKE[varied.lastgroup or ""]]
        end = varied.end()
    return re.compile("".join([*found, re.escape(line.strip()[end:])]))


@dataclass
class Shell:
    """`folder`: where it is, and below it what the page takes for the machine's. `variables`: of
    the environment. `ports`: of the page, to those that are there."""

    folder: Path
    variables: Mapping[str, str]
    ports: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    told: tuple[Told, ...] = ()
    behind: tuple[Behind, ...] = ()
    ends: tuple[Ends, ...] = ()
    said: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _scratch: Path = Path()
    _registered: Counter[str] = field(default_factory=Counter)
    _running: dict[Behind, Path] = field(default_factory=dict)
    _count: int = 0
    _answer: str = ""

    # ---- from first to last ----

    @contextlib.contextmanager
    def open(self) -> Iterator[Shell]:
        bin_ = self._bin()
        self._scratch = Path(tempfile.mkdtemp(dir=self.folder))
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=self.folder,
            env=environment(
                PATH=f"{bin_}:{os.environ['PATH']}",
                HOME=str(self.folder),
                PYTHONPATH=str(ROOT),
                COLUMNS="200",
                **{_MARK: str(self.folder)},
                **self.variables,
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield self
        finally:
            family = self._family()
            self._pipe(self._process.stdin).close()
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            for pid in gone(family):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()

    def _family(self) -> set[int]:
        """All that it started, those in sessions of their own too: their environment tells."""
        assert self._process is not None
        mark, found = f"{_MARK}={self.folder}".encode(), descendants(self._process.pid)
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(int(entry.name))
        return found - {self._process.pid}

    def type(self, command: Command) -> None:
        """Raises Failed where it does not do what the page says."""
        text = self._made_real(command.text)
        if named := _ASSIGNED.fullmatch(command.text):
            text = f"{named['name']}={self._from_answer(named['path'])}"
        if behind := self._behind(command.text):
            self._type_behind(text, behind)
            return
        if command.script:
            script = self._scratch / f"script-{self._count}"
            script.write_text(text + "\n")
            code, answer = self._run(f"bash -e {script}")
        else:
            code, answer = self._run(text)
        self._answer = answer
        self.said += answer
        self._judge(command, code, answer)
        if text.rstrip().endswith("&") or "&\n" in text:
            self._wait_for_listeners(text)
        self._wait_for_engine(text)

    # ---- what is typed ----

    def _meant(self, text: str) -> str:
        for word, real in self.words.items():
            text = text.replace(word, real)
        return text

    def _made_real(self, text: str) -> str:
        text = self._meant(self._named_anew(text))
        for told in self.told:
            if told.word in text:
                found = list(re.finditer(told.pattern, self.said))
                if not found:
                    raise Failed(f"{told.word}: nothing like {told.pattern} was said:\n{self.said}")
                text = text.replace(told.word, found[-1].expand(told.made))
        text = FOLDERS.sub(lambda found: f"{self.folder}/root{found[0]}", text)
        return _PORT.sub(lambda found: self.port(found[0]), text)

    def _named_anew(self, text: str) -> str:
        """An id of an engine is given once, and so is its address; a page may show several ways to
        the same end."""
        if named := _REGISTERS.match(text):
            self._registered[named[1]] += 1
            if self._registered[named[1]] > 1:
                text = text.replace(named[0], f"{named[0]} --allow-shared-address", 1)
        for name, times in self._registered.items():
            if times > 1:
                text = re.sub(
                    rf"^(chadburn (?:engines )?[\w-]+ ){name}\b", rf"\g<1>{name}-{times}", text
                )
        return text

    def port(self, number: str) -> str:
        """The one that is there instead; one that is there stays."""
        if number in self.ports.values():
            return number
        return self.ports.setdefault(number, free_port())

    def _from_answer(self, path: str) -> str:
        found: Any = json.loads(self._answer)
        for part in path.split("."):
            found = found[int(part)] if part.isdigit() else found[part]
        return str(found)

    def _behind(self, text: str) -> Behind | None:
        return next((one for one in (*self.behind, *SERVERS) if text.startswith(one.text)), None)

    # ---- running it ----

    def _run(self, text: str) -> tuple[int, str]:
        """Exit code and all that it printed."""
        self._count += 1
        out, done = (self._scratch / f"{name}-{self._count}" for name in ("out", "done"))
        self._write(f'{{\n{text}\n}} >"{out}" 2>&1 </dev/null; echo $? >"{done}.part"\n')
        self._write(f'mv "{done}.part" "{done}"\n')
        until = time.monotonic() + START_S
        while not done.exists():
            if time.monotonic() > until:
                raise Failed(f"does not end: {text}\n{out.read_text(errors='replace')}")
            time.sleep(POLL_S)
        return int(done.read_text()), out.read_text(errors="replace")

    def _type_behind(self, text: str, behind: Behind) -> None:
        self._end(behind)
        self._count += 1
        out, pid = (self._scratch / f"{name}-{self._count}" for name in ("out", "pid"))
        text = text.rstrip().removesuffix("&")
        self._write(f'{{\n{text}\n}} >"{out}" 2>&1 </dev/null &\necho $! >"{pid}"\n')
        self._running[behind] = pid
        until = time.monotonic() + START_S
        while behind.until is not None:
            answer = out.read_text(errors="replace") if out.exists() else ""
            if re.search(behind.until, answer):
                self.said += answer
                return
            if time.monotonic() > until:
                raise Failed(f"{text}: does not say {behind.until!r}:\n{answer}")
            time.sleep(POLL_S)

    def _end(self, behind: Behind) -> None:
        """One that runs already: a person ends it, and starts it otherwise."""
        if (file := self._running.pop(behind, None)) is not None:
            first = int(file.read_text())
            family = {first, *descendants(first)}
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            gone(family)

    def _wait_for_engine(self, text: str) -> None:
        """The same of an engine that was registered a moment ago."""
        if named := _REGISTERS.match(text):
            look = f"chadburn engines get {named[1]} | grep -q serving && break; sleep 0.5"
            self._run(f"for i in 1 2 3 4 5; do {look}; done")

    def _wait_for_listeners(self, text: str) -> None:
        """A person looks whether it is up; the next line of a script does not."""
        until = time.monotonic() + START_S
        for number in _LISTENS.findall(text):
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", int(number)), 1).close()
                    break
                if time.monotonic() > until:
                    raise Failed(f"nobody listens at {number}: {text}")
                time.sleep(POLL_S)

    def _write(self, text: str) -> None:
        assert self._process is not None
        stdin = self._pipe(self._process.stdin)
        stdin.write(text.encode())
        stdin.flush()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe

    # ---- what came of it ----

    def _judge(self, command: Command, code: int, answer: str) -> None:
        wrong = f"{command}\n{answer[-3000:]}"
        if status := _STATUS.search(command.text):
            headers = (self.folder / "curl.headers").read_text()
            found = re.findall(r"^HTTP/\S+ (\d+)", headers, re.MULTILINE)[-1]
            if found != status["status"]:
                raise Failed(f"{found}, not {status['status']}: {wrong}")
        wanted = next((one.code for one in self.ends if command.text.startswith(one.text)), 0)
        limited = "--max-time" in command.text and code == 28
        if code != wanted and not limited:
            raise Failed(f"ended with {code}, not {wanted}: {wrong}")
        if (printed := _PRINTED.search(command.text)) and (
            answer.split()[-1:] != [printed["code"]]
        ):
            raise Failed(f"not {printed['code']}: {wrong}")
        lines = iter(answer.splitlines())
        for line in map(self._meant, command.said):
            pattern = shown(line)
            if line.strip("… ") and not any(pattern.search(one) for one in lines):
                raise Failed(f"does not say, or not there: {line.strip()}\n{wrong}")

    # ---- programs ----

    def _bin(self) -> Path:
        """The commands of the pages: ours out of this checkout, those of engines and of machines
        that lack one by a stand-in."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        python, own = sys.executable, f"exec {sys.executable} {_STAND_INS}"
        curl = shutil.which("curl") or f"{python} {_CURL}"
        programs = {
            "chadburn": f'exec {python} -P -m app.cli "$@"',
            "python": 'case "$1 $2" in "-m sglang"*|"-m dynamo"*)'
            f' {own} "$@";; esac\nexec {python} "$@"',
            "curl": f'exec {curl} -D "{self.folder}/curl.headers" "$@"',
            "vllm": f'{own} vllm "$@"',
            "vllm-rs": f'{own} vllm-rs "$@"',
            "trtllm-serve": f'{own} trtllm-serve "$@"',
        }
        for name in ("jq", "sqlite3"):
            if shutil.which(name) is None:
                programs[name] = f'{own} {name} "$@"'
        for name, script in programs.items():
            (folder / name).write_text(f"#!/bin/bash\n{script}\n")
            (folder / name).chmod(0o700)
        return folder
