"""The gateway as a process: how it begins, how it refuses to, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from filelock import FileLock

from app.http.server import bound

SERVE = """
import sys
from pathlib import Path
from app.main import serve
from app.settings import load_settings
sys.exit(serve(load_settings(Path(sys.argv[1]))))
"""


def config(tmp_path: Path, **values: Any) -> Path:
    found = {"data_dir": str(tmp_path / "data"), "port": 0, "audience": "urn:test", **values}
    lines = [f"{name} = {_toml(value)}" for name, value in found.items()]
    path = tmp_path / "chadburn.toml"
    path.write_text("\n".join([*lines, "[[issuers]]", 'issuer = "http://127.0.0.1:9"', ""]))
    return path


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def environment() -> Mapping[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("CHADBURN_")}


@contextmanager
def process(path: Path) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", "-c", SERVE, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


def refusal(path: Path) -> tuple[int, str]:
    """Exit code and what stands on standard error."""
    with process(path) as started:
        _, said = started.communicate(timeout=60)
        return started.returncode, said


def address(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    line = started.stdout.readline()
    assert line.startswith("chadburn: serving http://"), line
    return line.split()[-1]


def test_it_serves_and_ends_cleanly_when_asked(tmp_path: Path) -> None:
    with process(config(tmp_path, host="127.0.0.1")) as started:
        url = address(started)
        assert httpx2.get(f"{url}/healthz").json() == {"status": "alive"}
        assert httpx2.get(f"{url}/readyz").json() == {"status": "degraded"}
        assert httpx2.get(f"{url}/v1/me").status_code == 401
        started.send_signal(signal.SIGTERM)
        _, said = started.communicate(timeout=30)
        assert started.returncode == 0, said
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    with sqlite3.connect(tmp_path / "data" / "chadburn.db") as database:
        rows = database.execute("SELECT action, outcome, reason, source FROM audit").fetchall()
    database.close()
    assert rows == [("authenticate", "denied", "TOKEN_MISSING", "127.0.0.1")]


def test_connections_that_stay_open_do_not_keep_it(tmp_path: Path) -> None:
    with process(config(tmp_path, shutdown_grace_s=3.0)) as started:
        url = address(started)
        host, port = url.removeprefix("http://").split(":")
        idle = socket.create_connection((host, int(port)))
        half = socket.create_connection((host, int(port)))
        half.sendall(b"POST /v1/engines HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n")
        begun = time.monotonic()
        started.send_signal(signal.SIGINT)
        started.communicate(timeout=60)
        assert started.returncode == 0
        assert time.monotonic() - begun < 45  # ten times what it takes, and more
        idle.close()
        half.close()


def test_a_busy_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = refusal(config(tmp_path, port=port))
    assert (code, said) == (
        10,
        f"chadburn: cannot listen on 127.0.0.1:{port}: Address already in use\n",
    )


def test_a_host_that_is_not_ours(tmp_path: Path) -> None:
    code, said = refusal(config(tmp_path, host="host.invalid"))
    assert (code, said.count("\n")) == (10, 1)
    assert "cannot listen on host.invalid" in said


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = refusal(config(tmp_path, data_dir=str(tmp_path / "file" / "data")))
    assert (code, said.count("\n")) == (11, 1)
    assert "cannot be made" in said


def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    # Nobody may write there, root included.
    code, said = refusal(config(tmp_path, data_dir="/proc/self"))
    assert (code, said.count("\n")) == (11, 1)
    assert "/proc/self is not writable" in said


def test_a_ledger_that_another_process_has(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with FileLock(tmp_path / "data" / "chadburn.db.lock"):
        code, said = refusal(config(tmp_path))
    assert (code, said.count("\n")) == (12, 1)
    assert "another process" in said


def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    url = "postgresql://ada:hunter2@127.0.0.1:9/chadburn"
    code, said = refusal(config(tmp_path, database_url=url))
    assert (code, said.count("\n")) == (13, 1)
    assert "postgresql://127.0.0.1:9/chadburn" in said
    assert "hunter2" not in said


def test_a_database_that_is_not_upgraded(tmp_path: Path) -> None:
    code, said = refusal(config(tmp_path, upgrade_on_start=False))
    assert (code, said.count("\n")) == (14, 1)
    assert "chadburn db upgrade" in said


def test_no_issuer(tmp_path: Path) -> None:
    path = config(tmp_path)
    path.write_text(path.read_text().partition("[[issuers]]")[0])
    code, said = refusal(path)
    assert (code, said.count("\n")) == (2, 1)
    assert "no token issuer" in said


def test_figures_on_a_listener_of_their_own(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with process(config(tmp_path, metrics_port=port)) as started:
        url = address(started)
        httpx2.get(f"{url}/healthz")
        figures = httpx2.get(f"http://127.0.0.1:{port}/metrics").text
        assert (
            'chadburn_http_requests_total{method="GET",route="/healthz",status="200"} 1.0'
            in figures
        )
        started.send_signal(signal.SIGTERM)
        started.communicate(timeout=30)
        assert started.returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = refusal(config(tmp_path, metrics_port=port))
    assert (code, "for metrics" in said) == (10, True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_answers_do_not_wait_for_acknowledgements(host: str) -> None:
    """asyncio turns Nagle's algorithm off only on sockets that name their protocol."""
    with bound(host, 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
        taken = listener.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            bound(host, taken)
