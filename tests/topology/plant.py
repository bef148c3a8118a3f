"""The processes of a deployment on one machine: PostgreSQL, an issuer, two engines, two gateways
that follow one list of engines, and nginx or Caddy before them as deploy/ has it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from app.demo.plan import ADMIN_AUDIENCE, ENGINE_AUDIENCE, INFERENCE_AUDIENCE
from tests.backends.certificates import Authority
from tests.e2e.driving import Gateway
from tests.e2e.processes import Process
from tests.postgres import running_server

ROOT = Path(__file__).resolve().parents[2]
NGINX = ROOT / "deploy" / "nginx" / "chadburn.conf"
CADDY = ROOT / "deploy" / "caddy" / "Caddyfile"
GATEWAYS = 2
DISCOVERY = "chadburn/discovery"


@dataclass
class Plant:
    folder: Path
    database_url: str
    issuer: Process
    engines: dict[str, Process]
    gateways: list[Process]
    proxy: Process
    port: int
    """The proxy's."""
    trust: ssl.SSLContext
    ready: dict[str, Any] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    """Of engines, where orders go."""
    credential: str | None = "torch"

    # ---- starting ----

    def start_engine(self, name: str) -> None:
        """On the addresses it had before, if it was there before."""
        path = self.folder / f"{name}.json"
        path.unlink(missing_ok=True)
        before = self.ready.get(name, {})
        process = self.engines[name]
        process.arguments = [
            "engine",
            f"--data-dir={self.folder / name}",
            f"--inference-address={before.get('inference_address', '127.0.0.1:0')}",
            f"--admin-address={before.get('admin_address', '127.0.0.1:0')}",
            f"--issuer={self.ready['issuer']}",
            f"--inference-audience={INFERENCE_AUDIENCE}",
            f"--admin-audience={ENGINE_AUDIENCE}",
            "--step-delay-ms=20",
            f"--ready-file={path}",
        ]
        process.start()

    def engine_is_ready(self, name: str) -> None:
        self.ready[name] = self.engines[name].ready(self.folder / f"{name}.json")
        self.addresses[name] = self.ready[name]["admin_address"]

    def start_gateway(self, number: int) -> None:
        """At its port of before, and not waited for."""
        path = self.folder / f"gateway-{number}.json"
        path.unlink(missing_ok=True)
        process = self.gateways[number]
        process.arguments = [
            "serve",
            f"--config={path.with_suffix('.toml')}",
            f"--port={self.ready.get(f'gateway-{number}', 0)}",
            f"--ready-file={path}",
        ]
        process.start()

    def gateway_is_ready(self, number: int) -> None:
        path = self.folder / f"gateway-{number}.json"
        self.gateways[number].ready(path)
        if f"gateway-{number}" not in self.ready:
            self.ready[f"gateway-{number}"] = _listening(self.gateways[number].pid)

    def start_proxy(self) -> None:
        if self.proxy.name == "caddy":
            file = self.folder / "Caddyfile"
            file.write_text(self._caddyfile())
            self.proxy.arguments = ["run", "--config", str(file), "--adapter", "caddyfile"]
        else:
            file = self.folder / "nginx.conf"
            file.write_text(_nginx(self.folder))
            (self.folder / "chadburn.conf").write_text(self._site())
            self.proxy.arguments = ["-p", str(self.folder), "-c", str(file)]
        self.proxy.start()

    def list_engines(self, *names: str) -> None:
        """What is found from now on, in the way that the page tells: another file, renamed."""
        tls = {} if self.credential is None else {"credential": self.credential}
        engines = [
            {
                "id": name,
                "members": [{"admin": self.addresses[name], "control": self.addresses[name]}],
                "tls": tls,
                "labels": {"rack": "a"},
            }
            for name in names
        ]
        written = self.folder / "engines.json.new"
        written.write_text(json.dumps({"engines": engines}))
        written.rename(self.folder / "engines.json")

    # ---- asking ----

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def through_the_proxy(self) -> Gateway:
        return self._as_operator(self.url)

    def directly(self, number: int) -> Gateway:
        return self._as_operator(f"http://127.0.0.1:{self.ready[f'gateway-{number}']}")

    def _as_operator(self, url: str) -> Gateway:
        made = Gateway(url, self.ready["tokens"]["operator"])
        made.client = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {made.token}"},
            timeout=60.0,
            verify=self.trust,
            limits=httpx2.Limits(max_connections=100),
        )
        return made

    def said(self) -> str:
        """The last words of all processes."""
        processes = [self.issuer, *self.engines.values(), *self.gateways, self.proxy]
        return "\n".join(f"--- {one.name}\n{one.said()[-2000:]}" for one in processes)

    # ---- configuration ----

    def _site(self) -> str:
        return _with_other_places(
            NGINX,
            {
                "listen 443 ssl": f"listen 127.0.0.1:{self.port} ssl",
                "listen 80": f"listen unix:{self.folder}/plain.sock",
                "chadburn.example;": "localhost;",
                "/etc/ssl/certs/chadburn.example.pem": str(self.folder / "tls" / "localhost.pem"),
                "/etc/ssl/private/chadburn.example.key": str(self.folder / "tls" / "localhost.key"),
                "server 127.0.0.1:8765": f"server 127.0.0.1:{self.ready['gateway-0']}",
                "server 127.0.0.1:8766": f"server 127.0.0.1:{self.ready['gateway-1']}",
            },
        )

    def _caddyfile(self) -> str:
        tls = self.folder / "tls"
        site = f"localhost:{self.port} {{\n\ttls {tls}/localhost.pem {tls}/localhost.key\n"
        text = _with_other_places(
            CADDY,
            {
                "chadburn.example {\n": site,
                "127.0.0.1:8765 127.0.0.1:8766": " ".join(
                    f"127.0.0.1:{self.ready[f'gateway-{number}']}" for number in range(GATEWAYS)
                ),
                "Host chadburn.example": f"Host localhost:{self.port}",
            },
        )
        return "{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + text

    def write_settings(self, number: int) -> None:
        text, issuer = json.dumps, self.ready["issuer"]
        (self.folder / f"gateway-{number}.toml").write_text(
            f"""\
data_dir = {text(str(self.folder / f"data-{number}"))}
database_url = {text(self.database_url)}
public_url = {text(self.url)}
trusted_proxies = ["127.0.0.1"]
audience = {text(ADMIN_AUDIENCE)}
observe_interval_s = 0.5
lease_s = 5.0
shutdown_grace_s = 5.0

[[issuers]]
issuer = {text(issuer)}
inference_audiences = [{text(INFERENCE_AUDIENCE)}]

[[discovery]]
file = {text(str(self.folder / "engines.json"))}

[engine_credentials.torch.oauth]
token_url = {text(issuer + "/token")}
client_id = "engine"
client_secret_file = {text(str(self.folder / "secret"))}
"""
        )


@contextmanager
def plant(
    folder: Path,
    engines: tuple[str, ...] = (),
    others: Mapping[str, str] | None = None,
    *,
    proxy: str = "nginx",
) -> Iterator[Plant]:
    """All of it started. `engines`: reference engines, by name. `others`: addresses of engines that
    are there already, want no token, and are listed too. `proxy`: nginx or caddy."""
    program = _program(proxy)

    def process(name: str, *command: str) -> Process:
        made = Process(name, [], folder / f"{name}.log", folder)
        if command:
            made.command = command
        return made

    with ExitStack() as held:
        server = held.enter_context(running_server())
        server.execute("CREATE DATABASE topology")
        authority = Authority(folder / "tls")
        authority.issue("localhost")
        made = Plant(
            folder,
            server.url("topology"),
            process("issuer"),
            {name: process(name) for name in engines},
            [process(f"gateway-{number}") for number in range(GATEWAYS)],
            process(proxy, program),
            _free_port(),
            ssl.create_default_context(cafile=str(authority.path)),
            addresses=dict(others or {}),
            credential=None if others else "torch",
        )
        # The other way round than they are started.
        for one in (made.issuer, *made.engines.values(), *made.gateways, made.proxy):
            held.callback(one.clean)
        _start_issuer(made)
        for name in engines:
            made.start_engine(name)
        for name in engines:
            made.engine_is_ready(name)
        made.list_engines(*made.addresses)
        for number in range(GATEWAYS):
            made.write_settings(number)
            made.start_gateway(number)
        for number in range(GATEWAYS):
            made.gateway_is_ready(number)
        made.start_proxy()
        yield made


def _start_issuer(found: Plant) -> None:
    folder = found.folder
    secret = secrets.token_urlsafe(24)
    (folder / "secret").write_text(secret)
    ready = folder / "issuer.json"
    found.issuer.arguments = [
        "dev-issuer",
        f"--data-dir={folder / 'issuer'}",
        f"--secret-file={folder / 'secret'}",
        f"--ready-file={ready}",
    ]
    found.issuer.start()
    issuer = found.issuer.ready(ready)["issuer"]
    tokens = {}
    for role in ("operator", "inference", "engine"):
        answer = httpx2.post(
            f"{issuer}/token", data={"grant_type": "client_credentials"}, auth=(role, secret)
        )
        tokens[role] = answer.json()["access_token"]
    found.ready |= {"issuer": issuer, "tokens": tokens}


def _with_other_places(example: Path, instead: Mapping[str, str]) -> str:
    text = example.read_text()
    for old, new in instead.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def _program(proxy: str) -> str:
    if proxy == "caddy":
        subprocess.run([ROOT / "scripts" / "check-deploy", "--tools"], check=True)
        return str(ROOT / ".venv-deploy" / "bin" / "caddy")
    subprocess.run([ROOT / "scripts" / "need", "nginx"], check=True)
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    assert found is not None
    return found


def _nginx(folder: Path) -> str:
    """What Debian's nginx.conf would be, in a folder of the test's own."""
    user = "user root;" if os.geteuid() == 0 else ""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"    {kind}_temp_path {folder}/nginx-{kind};" for kind in kinds)
    return f"""\
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr notice;
events {{ worker_connections 512; }}
http {{
    access_log {folder}/access.log;
{temporary}
    include {folder}/chadburn.conf;
}}
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listening(pid: int) -> int:
    """The port of a process that listens on one: its ready file says the public URL instead."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a file that was closed meanwhile
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            return int(fields[1].rpartition(":")[2], 16)
    raise AssertionError(f"process {pid} listens nowhere")
