"""deploy/: manifests, units and proxies' configurations, as far as they can be judged without a
cluster or an init system. The schemas are scripts/check-deploy's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from app.discovery.endpoints import Shape, engines_of
from app.main import posture_at
from app.settings import Settings, load_settings
from app.startup import credentials_of, deadlines_of, issuers_of, reach_of
from tests.backends.certificates import Authority
from tests.doubles.kubernetes_api import endpoint_slice

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("base", "overlays/small", "overlays/production")
NAME = "app.kubernetes.io/name"

Manifest = dict[str, Any]


def need(*programs: str) -> None:
    subprocess.run([ROOT / "scripts" / "need", *programs], check=True)


# ---- Kubernetes ----


@pytest.fixture(scope="module")
def built() -> dict[str, list[Manifest]]:
    subprocess.run([ROOT / "scripts" / "check-deploy", "--tools"], check=True)
    kubectl = ROOT / ".venv-deploy" / "bin" / "kubectl"
    found = {}
    for overlay in OVERLAYS:
        command = [str(kubectl), "kustomize", str(KUBERNETES / overlay)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[overlay] = list(yaml.safe_load_all(text))
    return found


def of_kind(manifests: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] in kinds}


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    found = of_kind(manifests, "Deployment", "StatefulSet", "Job")
    return {name: one["spec"]["template"] for name, one in found.items()}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_without_rights(built: dict[str, list[Manifest]], overlay: str) -> None:
    for name, pod in pods(built[overlay]).items():
        around = pod["spec"]["securityContext"]
        assert around["runAsNonRoot"], name
        assert around["runAsUser"] > 0, name
        assert around["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert name == "gateway" or pod["spec"]["automountServiceAccountToken"] is False
        for container in pod["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert "memory" in container["resources"]["limits"], name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_there_by_reference_alone(
    built: dict[str, list[Manifest]], overlay: str
) -> None:
    assert not of_kind(built[overlay], "Secret")
    for pod in pods(built[overlay]).values():
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", []):
                if "PASSWORD" in variable["name"]:
                    assert set(variable) == {"name", "valueFrom"}
    for one in of_kind(built[overlay], "ConfigMap").values():
        for text in one["data"].values():
            assert "password" not in text.lower().replace("the password comes from pgpassword", "")


def test_who_serves_is_probed_and_ends_in_time(built: dict[str, list[Manifest]]) -> None:
    found = pods(built["base"])
    for name in ("gateway", "engine"):
        (container,) = found[name]["spec"]["containers"]
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
    gateway = found["gateway"]["spec"]
    waits = gateway["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    settings = loaded(built["base"])
    assert gateway["terminationGracePeriodSeconds"] > waits + 2 * settings.shutdown_grace_s
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asks = gateway["containers"][0][probe]["httpGet"]
        (header,) = asks["httpHeaders"]
        assert header["name"] == "Host"
        assert header["value"] in settings.allowed_hosts


def allowed(manifests: list[Manifest], app: str, port: str) -> list[Any]:
    """Who may come to that port of those pods."""
    found = []
    for one in of_kind(manifests, "NetworkPolicy").values():
        spec = one["spec"]
        if spec["podSelector"].get("matchLabels") != {NAME: app}:
            continue
        for rule in spec.get("ingress", []):
            if any(each["port"] == port for each in rule["ports"]):
                found += rule["from"]
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_admin_port_is_for_gateways_alone(
    built: dict[str, list[Manifest]], overlay: str
) -> None:
    manifests = built[overlay]
    closed = of_kind(manifests, "NetworkPolicy")["nothing"]["spec"]
    assert closed == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert allowed(manifests, "engine", "admin") == [
        {"podSelector": {"matchLabels": {NAME: "gateway"}}}
    ]
    (asks,) = allowed(manifests, "engine", "inference")
    assert asks["podSelector"] == {"matchLabels": {"chadburn.dev/inference-client": "true"}}
    # The two ports of the pod are two: nobody comes to one by the other's rule.
    (engine,) = pods(manifests)["engine"]["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in engine["ports"]}
    assert len(set(ports.values())) == len(ports) == 2
    services = of_kind(manifests, "Service")
    assert [one["name"] for one in services["inference"]["spec"]["ports"]] == ["inference"]
    # And gateways are let out to where they are let in.
    gateway = of_kind(manifests, "NetworkPolicy")["gateway"]["spec"]
    (out,) = (one for one in gateway["egress"] if "to" in one)
    assert out["to"] == [{"podSelector": {"matchLabels": {NAME: "engine"}}}]
    assert [one["port"] for one in out["ports"]] == [ports["admin"]]


def test_the_engines_of_the_service_are_found(built: dict[str, list[Manifest]]) -> None:
    """What the gateway looks for is what the service is, and what it may list."""
    settings = loaded(built["base"])
    (source,) = settings.discovery
    assert source.kubernetes is not None
    service = of_kind(built["base"], "Service")["engine-admin"]
    name, _, value = source.kubernetes.selector.partition("=")
    assert service["metadata"]["labels"][name] == value
    (port,) = service["spec"]["ports"]
    assert port["name"] == source.kubernetes.admin_port
    rules = of_kind(built["base"], "Role")["find-engines"]["rules"]
    assert rules == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    listed, remarks = engines_of([endpoint_slice("s", ("engine-0", "10.0.0.1"))], Shape())
    assert (list(listed), remarks) == (["engine-0"], {})


def loaded(manifests: list[Manifest]) -> Settings:
    (settings,) = (
        one["data"]["chadburn.toml"]
        for one in of_kind(manifests, "ConfigMap").values()
        if "chadburn.toml" in one["data"]
    )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("CHADBURN_"):
                patch.delenv(name)
        path = Path(folder, "chadburn.toml")
        path.write_text(settings)
        return load_settings(path)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_gateway_understands_its_settings(
    built: dict[str, list[Manifest]], overlay: str
) -> None:
    settings = loaded(built[overlay])
    assert issuers_of(settings)
    assert reach_of(settings).allow_plaintext_beyond_loopback is False
    assert credentials_of(settings)["engines"].tls is not None
    assert deadlines_of(settings)
    (container,) = pods(built[overlay])["gateway"]["spec"]["containers"]
    assert {one["name"]: one["containerPort"] for one in container["ports"]} == {
        "http": settings.port,
        "metrics": settings.metrics_port,
    }


def test_what_is_open_is_what_the_page_says(
    built: dict[str, list[Manifest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    warnings = posture_at(loaded(built["overlays/production"])).warnings
    codes = {one.code for one in warnings}
    assert codes == {"METRICS_BEYOND_LOOPBACK", "WIDE_REACH", "CREDENTIAL_NOT_BOUND"}
    page = (ROOT / "docs" / "deployment.md").read_text()
    assert all(f"`{code}`" in page for code in codes)


def test_overlays_say_how_many(built: dict[str, list[Manifest]]) -> None:
    small, production = built["overlays/small"], built["overlays/production"]
    assert not of_kind(small, "HorizontalPodAutoscaler", "PodDisruptionBudget")
    assert of_kind(small, "Deployment")["gateway"]["spec"]["replicas"] == 1
    assert "postgres" in of_kind(small, "StatefulSet")
    scaler = of_kind(production, "HorizontalPodAutoscaler")["gateway"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 12)
    assert "replicas" not in of_kind(production, "Deployment")["gateway"]["spec"]
    assert set(of_kind(production, "PodDisruptionBudget")) == {"gateway", "engine"}
    assert not loaded(production).upgrade_on_start
    assert loaded(small).upgrade_on_start


def test_an_engine_is_probed_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("engines.chadburn.svc")
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    inference = "openengine.v1.Inference"
    servicer.set(inference, health_pb2.HealthCheckResponse.NOT_SERVING)
    pair = [(key.read_bytes(), certificate.read_bytes())]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
    server.start()

    def probed(*more: str, ca: Path = authority.path) -> int:
        probe = KUBERNETES / "base" / "probe.py"
        asked = [str(ca), f"127.0.0.1:{port}", "engines.chadburn.svc", *more]
        return subprocess.run(
            [sys.executable, str(probe), *asked], capture_output=True, check=False
        ).returncode

    try:
        assert probed() == 0
        assert probed(inference) == 1, "paused: alive, and not ready"
        servicer.set(inference, health_pb2.HealthCheckResponse.SERVING)
        assert probed(inference) == 0
        assert probed(ca=Authority(tmp_path / "other").path) == 1
    finally:
        server.stop(None)


# ---- systemd ----

UNITS = {
    "chadburn-gateway@.service": "chadburn-gateway@8765.service",
    "chadburn-engine.service": "chadburn-engine.service",
}
MOST_EXPOSED = {"chadburn-gateway@.service": 15, "chadburn-engine.service": 40}
"""Of 100, as `systemd-analyze security` reckons."""


@pytest.fixture
def units(tmp_path: Path) -> dict[str, Path]:
    """As they are, but for a program that is there."""
    need("systemd-analyze")
    made = {}
    for name, instance in UNITS.items():
        text = (DEPLOY / "systemd" / name).read_text()
        assert text.count("/opt/chadburn/bin/chadburn ") == 1
        made[name] = tmp_path / instance
        made[name].write_text(text.replace("/opt/chadburn/bin/chadburn ", "/bin/true "))
    return made


def test_systemd_understands_its_units(units: dict[str, Path]) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, units.values())],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_accounts_of_the_units_are_made() -> None:
    need("systemd-analyze")
    accounts = DEPLOY / "systemd" / "chadburn.sysusers"
    done = subprocess.run(
        ["systemd-sysusers", "--dry-run", str(accounts)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = {line.split()[1] for line in accounts.read_text().splitlines()}
    for name in UNITS:
        for line in (DEPLOY / "systemd" / name).read_text().splitlines():
            kind, _, account = line.partition("=")
            assert kind not in ("User", "Group") or account in made, line


@pytest.mark.parametrize("name", list(UNITS))
def test_units_leave_little_open(units: dict[str, Path], name: str) -> None:
    most = f"--threshold={MOST_EXPOSED[name]}"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", most, str(units[name])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("name", "verb"), list(zip(UNITS, ("serve", "engine"), strict=True)))
def test_the_command_of_a_unit_knows_its_options(name: str, verb: str) -> None:
    text = (DEPLOY / "systemd" / name).read_text().replace("\\\n", " ")
    (line,) = (one for one in text.splitlines() if one.startswith("ExecStart="))
    words = line.split()[1:]
    assert words[0] == verb
    told = subprocess.run(
        [sys.executable, "-m", "app.cli", verb, "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True, env={"COLUMNS": "200"},
    ).stdout  # fmt: skip
    for word in words[1:]:
        assert word.partition("=")[0] in told, word


# ---- proxies ----


def test_nginx_understands_its_configuration(tmp_path: Path) -> None:
    need("nginx")
    Authority(tmp_path).issue("chadburn.example")
    text = (DEPLOY / "nginx" / "chadburn.conf").read_text()
    for old, new in {
        "/etc/ssl/certs/chadburn.example.pem": f"{tmp_path}/chadburn.example.pem",
        "/etc/ssl/private/chadburn.example.key": f"{tmp_path}/chadburn.example.key",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "chadburn.conf").write_text(text)
    around = f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{ include {tmp_path}/chadburn.conf; }}\n"
    (tmp_path / "nginx.conf").write_text(around)
    done = subprocess.run(
        ["nginx", "-t", "-q", "-p", tmp_path, "-c", tmp_path / "nginx.conf", "-e", "stderr"],
        env={"PATH": f"{os.environ['PATH']}:/usr/sbin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # Ports below 1024 are opened even to try: an ordinary user may not.
    said = [one for one in done.stderr.splitlines() if "Permission denied" not in one]
    refused = [one for one in said if "[emerg]" in one]
    assert not refused, done.stderr


def test_proxies_wait_longer_than_a_stream_is_silent() -> None:
    """And keep connections for less time than the gateway does."""
    nginx = (DEPLOY / "nginx" / "chadburn.conf").read_text()
    caddy = (DEPLOY / "caddy" / "Caddyfile").read_text()
    settings = Settings()
    longest = max(15.0, settings.request_timeout_s)
    assert "proxy_read_timeout    75s;" in nginx
    assert "response_header_timeout 75s" in caddy
    assert longest < 75
    assert "keepalive_timeout 60s;" in nginx
    assert "keepalive 60s" in caddy
    assert settings.keep_alive_s > 60
    assert "proxy_buffering off;" in nginx
    assert "client_max_body_size 16m;" in nginx
    assert settings.max_update_bytes == 16 << 20


# ---- Prometheus ----


def test_every_alert_fires_on_what_it_is_for() -> None:
    need("promtool")
    watching = DEPLOY / "observability"
    for verb in (["config", "prometheus.yml"], ["rules", "alerts.yml"]):
        done = subprocess.run(
            ["promtool", "check", *verb], cwd=watching, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts.test.yml"],
        cwd=watching,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
