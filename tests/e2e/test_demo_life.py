"""A demo's life: what it writes, how it ends, and that it comes back as it was."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx2
import pytest

from tests.e2e.processes import (
    START_S,
    Demo,
    alive,
    chadburn,
    cleaned,
    descendants,
    environment,
    gone,
)

CURL = Path(__file__).with_name("curl.py")


def claims(token: str) -> dict[str, Any]:
    payload = token.split(".")[1]
    found: dict[str, Any] = json.loads(
        base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
    )
    return found


def test_the_ready_file_has_all_that_is_needed_and_is_private(demo: Demo) -> None:
    ready = demo.ready
    assert set(ready) == {
        "base_url", "issuer", "engine", "inference_address", "admin_address", "next_weights",
        "tokens", "data_dir",
    }  # fmt: skip
    assert set(ready["tokens"]) == {"operator", "reader", "inference", "engine"}
    assert Path(ready["data_dir"]) == demo.folder / "data"
    for path in (demo.folder / "ready.json", demo.folder / "data" / "ready.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((demo.folder / "data").stat().st_mode) == 0o700
    left_s = claims(ready["tokens"]["operator"])["exp"] - time.time()
    assert 8 * 3600 < left_s < 24 * 3600


@pytest.mark.parametrize("own", [False, True], ids=["curl", "curl.py"])
def test_the_line_it_prints_orders_a_pause(demo: Demo, tmp_path: Path, own: bool) -> None:
    """With the machine's curl if it has one, and with a stand-in."""
    path = os.environ["PATH"]
    if own or shutil.which("curl") is None:
        stand_in = tmp_path / "curl"
        stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {CURL} "$@"\n')
        stand_in.chmod(0o700)
        path = f"{tmp_path}:{path}"
    said = demo.process.said()
    lines = [line.strip() for line in said.splitlines()]
    pause = next(line for line in lines if line.startswith("curl") and line.endswith("/pause"))
    events = next(line for line in lines if line.startswith("curl") and "/v1/events" in line)
    assert demo.ready["base_url"] in said
    assert not any(token in said for token in demo.ready["tokens"].values())

    def shell(line: str) -> str:
        ran = subprocess.run(
            ["bash", "-c", line], cwd=demo.folder, capture_output=True, text=True, timeout=60,
            check=False, env=environment(PATH=path),
        )  # fmt: skip
        return ran.stdout

    operation = json.loads(shell(pause))
    assert operation["kind"] == "pause"
    assert "event: snapshot" in shell(f"{events} --max-time 3")
    ran = chadburn("ops", "watch", operation["id"], "--demo-dir", "data", cwd=demo.folder)
    assert ran.returncode == 0
    assert (
        chadburn(
            "resume", demo.ready["engine"], "--wait", "--demo-dir", "data", cwd=demo.folder
        ).returncode
        == 0
    )


def read(ready: dict[str, Any], rest: str = "") -> dict[str, Any]:
    answer = httpx2.get(
        f"{ready['base_url']}/v1/engines/{ready['engine']}{rest}",
        headers={"authorization": f"Bearer {ready['tokens']['reader']}"},
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def update_line(demo: Demo) -> list[str]:
    """The arguments of the update that it proposes."""
    _, _, line = demo.process.said().partition("chadburn update-weights ")
    return ["update-weights", *shlex.split(line.replace("\\\n", " ").partition("\n")[0])]


def test_its_engine_is_at_vllms_own_endpoints(demo: Demo) -> None:
    url = f"{demo.ready['base_url']}/compat/vllm/{demo.ready['engine']}/version"
    assert httpx2.get(url).status_code == 401
    token = demo.ready["tokens"]["reader"]
    answer = httpx2.get(url, headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 200, answer.text


def test_its_engine_is_at_sglangs_own_endpoints(demo: Demo) -> None:
    """A real model, and the calls of a trainer on the same devices."""
    url = f"{demo.ready['base_url']}/compat/sglang/{demo.ready['engine']}/"
    auth = {"authorization": f"Bearer {demo.ready['tokens']['operator']}"}
    with httpx2.Client(base_url=url, headers=auth, trust_env=False, timeout=60) as trainer:

        def does(path: str, body: Any) -> Any:
            answer = trainer.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            return answer.json()

        version = trainer.get("get_weight_version").raise_for_status().json()["weight_version"]
        assert trainer.get("server_info").raise_for_status().json()["encoder_only"] is False
        assert trainer.get("flush_cache").status_code == 200
        for _ in range(2):
            assert does("release_memory_occupation", {}) is None
        assert trainer.get("ready").status_code == 503
        for tags in (["weights"], None, None):
            assert does("resume_memory_occupation", {"tags": tags}) is None
        assert trainer.get("ready").status_code == 200
        does("pause_generation", {})
        told = does(
            "update_weights_from_disk",
            {
                "model_path": str(demo.folder / demo.ready["next_weights"]),
                "flush_cache": False,
                "weight_version": version,
            },
        )
        assert told["success"] is True
        refused = trainer.post("update_weights_from_disk", json={"model_path": "/no/such"})
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        does("continue_generation", {})
        assert trainer.get("ready").status_code == 200


def test_a_person_logs_in_with_a_browser_and_orders_a_pause(demo: Demo) -> None:
    said, base_url = demo.process.said(), demo.ready["base_url"]
    assert f"{base_url}/ui/" in said
    asked = re.search(r"the page asks for (\S+):", said)
    assert asked is not None
    own_page = {"Origin": base_url, "X-Requested-With": "chadburn"}
    with httpx2.Client(trust_env=False, timeout=60) as browser:
        page = browser.get(browser.get(f"{base_url}/auth/login").headers["location"])
        action = re.search(r'<form method="post" action="([^"]+)"', page.text)
        assert action is not None, page.text
        picked = browser.post(
            urljoin(str(page.url), unescape(action.group(1))),
            data={"code": asked.group(1), "person": "otto"},
        )
        back = browser.get(picked.headers["location"])
        assert (back.status_code, back.headers["location"]) == (303, "/ui/")
        assert browser.get(f"{base_url}/auth/session").json()["subject"] == "otto"
        order = {"mode": "drain"}
        path = f"{base_url}/v1/engines/{demo.ready['engine']}/pause"
        headers = {**own_page, "Idempotency-Key": "by a browser", "Prefer": "wait=25"}
        paused = browser.post(path, json=order, headers=headers)
        assert (paused.status_code, paused.json()["principal"]["subject"]) == (200, "otto")
        refused = browser.post(path, json=order, headers={"Idempotency-Key": "by another page"})
        assert refused.json()["reason"] == "CROSS_SITE_REFUSED"
        epoch = {"pause_epoch": paused.json()["result"]["pause_epoch"]}
        headers = {**own_page, "Idempotency-Key": "by a browser again", "Prefer": "wait=25"}
        resumed = browser.post(path.replace("/pause", "/resume"), json=epoch, headers=headers)
        assert resumed.json()["state"] == "succeeded", resumed.text
        out = browser.post(f"{base_url}/auth/logout", headers=own_page)
        left = browser.get(out.json()["end_session_url"])
        assert left.headers["location"].startswith(f"{base_url}/")
        assert browser.get(f"{base_url}/v1/engines").status_code == 401


def test_it_ends_whole_on_ctrl_c_and_comes_back_as_it_was(tmp_path: Path) -> None:
    demo = Demo.begin(tmp_path, "--traffic=2", "--step-delay-ms=5")
    with cleaned(demo.process):
        first = demo.process.ready(tmp_path / "ready.json")
        family = descendants(demo.process.pid)
        assert len(family) >= 3
        until = time.monotonic() + START_S
        while (
            read(first, "/load")["load"]["running_requests"] < 2
        ):  # the traffic that was asked for
            assert time.monotonic() < until
            time.sleep(0.1)
        updated = chadburn(*update_line(demo), "--demo-dir=data", "--json", cwd=tmp_path)
        assert updated.returncode == 0, updated
        operation = json.loads(updated.stdout)
        assert [one["rank"] for one in operation["result"]["evidence"]] == [0, 1]
        assert read(first)["facts"]["weights"]["version"] == "v2"
        assert demo.process.stop(signal.SIGINT) == 0, demo.logs()
    assert gone(family) == set()
    assert not (tmp_path / "ready.json").exists()
    assert not (tmp_path / "data" / "ready.json").exists()

    again = Demo.begin(tmp_path, "--step-delay-ms=5")
    with cleaned(again.process):
        second = again.process.ready(tmp_path / "ready.json")
        assert second["engine"] == first["engine"]
        assert read(second)["health"]["state"] == "serving"
        # Killed, it takes its processes along too.
        family = descendants(again.process.pid)
        again.process.kill()
        assert gone(family) == set()


@pytest.mark.parametrize("victim", ["engine", "gateway"])
def test_the_end_of_one_process_is_the_end_of_all(tmp_path: Path, victim: str) -> None:
    demo = Demo.begin(tmp_path)
    with cleaned(demo.process):
        demo.process.ready(tmp_path / "ready.json")
        family = descendants(demo.process.pid)
        marks = {"engine": b"engine", "gateway": b"serve"}
        (pid,) = (
            pid
            for pid in alive(family)
            if marks[victim] in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        )
        os.kill(pid, signal.SIGKILL)
        assert demo.process.wait() == 1
    assert gone(family) == set()
    assert f"chadburn: demo: the {victim} was killed by SIGKILL (log: " in demo.process.said()
