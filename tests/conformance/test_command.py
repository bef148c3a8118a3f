"""`chadburn conformance` as it is typed."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conformance.judging import paced_engine
from tests.doubles.engine import EngineDouble
from tests.enginekit.client import client_of, until

pytestmark = pytest.mark.anyio
COMMAND = (sys.executable, "-P", "-m", "app.cli", "conformance")


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str


async def begin(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def chadburn(*words: str, within_s: float = 280) -> Done:
    return await end(await begin(*words), within_s)


async def end(process: asyncio.subprocess.Process, within_s: float = 280) -> Done:
    try:
        async with asyncio.timeout(within_s):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            # It would go on and restart an engine that the test has ended.
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), err.decode())


def addresses(double: EngineDouble) -> tuple[str, ...]:
    return (double.admin_address, "--inference", double.inference_address)


async def test_the_list_needs_no_engine() -> None:
    done = await chadburn("--list", "--case", "retry.*")
    assert done.code == 0
    assert "retry.parallel" in done.out
    assert "profile.complete" not in done.out


async def test_a_right_engine_gives_0_and_a_report(tmp_path: Path) -> None:
    report = tmp_path / "reports" / "junit.xml"
    async with paced_engine(tmp_path / "engine") as double:
        done = await chadburn(
            *addresses(double), "--case", "retry.*", "--case", "restart.*", "--junit", str(report)
        )
    assert done.code == 0, done.out
    assert "NOT PROVEN by this run, for want of an option:" in done.out
    assert "restart.keys-are-kept" in done.out
    suite = ElementTree.parse(report).getroot()
    assert suite.get("failures") == "0"
    assert int(suite.get("skipped") or 0) == 5


async def test_json_is_alone_on_stdout(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double:
        done = await chadburn(*addresses(double), "--case", "stream.*", "--json")
    told = json.loads(done.out)
    assert told["passed"] is True
    assert {case["verdict"] for case in told["cases"]} == {"pass"}
    assert told["engine"]["world_size"] == 2


async def test_a_wrong_engine_gives_3(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double:
        double.delays_s["Resume"] = 3.0
        done = await chadburn(
            *addresses(double), "--case", "revision.rises-with-a-change", "--patience", "0.5"
        )
    assert done.code == 3, done.out
    assert "FAILED  revision.rises-with-a-change" in done.out


async def test_nobody_there_gives_7() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = await chadburn(
            f"127.0.0.1:{taken.getsockname()[1]}", "--patience", "5", "--wait", "0"
        )
    assert done.code == 7
    assert done.err.count("\n") == 1


async def test_an_engine_that_is_about_to_listen_is_waited_for(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double:
        await double.kill()
        begun = await begin(*addresses(double), "--case", "retry.same-payload", "--wait", "60")
        await asyncio.sleep(2)
        assert begun.returncode is None
        await double.start()
        done = await end(begun)
    assert done.code == 0, done.err


async def test_a_paused_engine_gives_6(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double, client_of(double) as client:
        await client.completed(client.pause())
        done = await chadburn(*addresses(double))
    assert done.code == 6
    assert "resume first" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name the engine's admin listener"),
        (("h:1", "--case", "nothing"), "no case is called nothing"),
        (("h:1", "--token", "secret"), "only over TLS"),
        (("127.0.0.1:1", "--token", "a", "--token-file", "f"), "not both"),
        (("127.0.0.1:1", "--tls-certificate", "f"), "go together"),
        (("127.0.0.1:1", "--fault-hook", ""), "empty"),
    ],
)
async def test_nonsense_gives_2(words: tuple[str, ...], said: str) -> None:
    done = await chadburn(*words)
    assert done.code == 2
    assert said in done.err
    assert "secret" not in done.err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_run_leaves_no_pause(sent: signal.Signals, tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double, client_of(double) as client:
        process = await begin(*addresses(double), "--case", "pause.hold")

        async def paused() -> bool:
            return await client.admission() == "paused"

        await until(paused, within_s=60)
        process.send_signal(sent)
        done = await end(process)
        assert done.code == 130, done.err
        assert "Traceback" not in done.err
        assert await client.admission() == "open"
