"""Callers that send no token, at a gateway that is a process of its own."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.backends.certificates import Authority
from tests.http.compat_callers import SECRET
from tests.http.test_serving import address, environment

SERVE = """
import sys
from pathlib import Path
import app.main as main
from app.settings import load_settings
from tests.http.compat_callers import add_routes
build = main.build_api
def with_routes(*given, **named):
    made = build(*given, **named)
    add_routes(made)
    return made
main.build_api = with_routes
sys.exit(main.serve(load_settings(Path(sys.argv[1]))))
"""
PATH = "/compat/no/one/named"


@contextmanager
def serving(config: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    started = subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", "-c", SERVE, str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        yield started, address(started)
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


@pytest.mark.long
def test_a_process_takes_callers_by_all_three_ways_and_after_it_was_killed(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("localhost")
    (tmp_path / "secret").write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = 'scopes = ["admin:read"]\nengines = "all"'
    config = tmp_path / "chadburn.toml"
    config.write_text(
        f'data_dir = "{tmp_path / "data"}"\nport = 0\naudience = "urn:test"\n'
        '[[issuers]]\nissuer = "http://127.0.0.1:9"\n'
        f'[[compat_identity]]\nname = "a"\n{common}\nunix_socket = "{tmp_path}/a.sock"\n'
        f'[[compat_identity]]\nname = "b"\n{common}\nsecret_file = "{tmp_path}/secret"\n'
        f'[[compat_identity]]\nname = "c"\n{common}\n[compat_identity.tls]\n'
        f'listen = "127.0.0.1:{port}"\ncertificate = "{certificate}"\nkey = "{key}"\n'
        f'client_ca = "{authority.path}"\nnames = ["trainer.test"]\n'
    )
    context = ssl.create_default_context(cafile=authority.path)
    context.load_cert_chain(*authority.issue("trainer.test"))
    by_socket = httpx2.HTTPTransport(uds=str(tmp_path / "a.sock"))
    for end in (signal.SIGKILL, signal.SIGTERM):
        with serving(config) as (started, url):
            with httpx2.Client(transport=by_socket) as http:
                assert http.get(f"http://localhost{PATH}").json() == {"who": "a"}
                assert http.get("http://localhost/v1/engines").status_code == 401
            secret = PATH.replace("one", f"one~{SECRET}")
            assert httpx2.get(f"{url}{secret}").json() == {"who": "b"}
            assert httpx2.get(f"{url}{PATH}").status_code == 401
            assert httpx2.get(f"{url}{secret}x").status_code == 404
            found = httpx2.get(f"https://localhost:{port}{PATH}", verify=context)
            assert found.json() == {"who": "c"}
            started.send_signal(end)
            _, said = started.communicate(timeout=30)
            assert started.returncode == (0 if end is signal.SIGTERM else -end), said
            assert SECRET not in said
        assert (tmp_path / "a.sock").exists() == (end is signal.SIGKILL)
