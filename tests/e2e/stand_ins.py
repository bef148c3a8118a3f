"""Programs that pages name and this machine lacks: `python stand_ins.py NAME ARGUMENTS…`.

Servers are the doubles of tests/doubles, at the port that their arguments say; once one listens it
says so. Tools do as much as the pages ask of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

# The doubles' own imports are absolute.
sys.path.insert(0, str(Path(__file__).parents[2]))


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def model_of(arguments: list[str]) -> Path:
    """The folder that is named, if there is one; else one of our own."""
    from tests.sidecars.checkpoints import checkpoint

    named = [Path(word) for word in arguments if Path(word).is_dir()]
    return named[0] if named else checkpoint(Path(tempfile.mkdtemp()) / "model", 1)


async def vllm(arguments: list[str]) -> None:
    from tests.doubles.vllm_http import VllmDouble
    from tests.doubles.vllm_model import Vllm

    model = model_of(arguments)
    await VllmDouble(Vllm(model), model).start(int(option(arguments, "--port")))


async def vllm_rs(arguments: list[str]) -> None:
    from tests.doubles.vllm_control import RunningControl, VllmControl

    control = RunningControl(VllmControl())
    control.port = int(option(arguments, "--grpc-port"))
    await control.listen()


async def sglang(arguments: list[str]) -> None:
    from tests.doubles.sglang_http import SglangDouble
    from tests.doubles.sglang_model import Sglang

    model = model_of(arguments)
    await SglangDouble(Sglang(model), model).start(int(option(arguments, "--port")))


async def trtllm(arguments: list[str]) -> None:
    from tests.doubles.trtllm_http import TrtllmDouble

    key = os.environ["TRTLLM_RUNTIME_CONTROL_API_KEY"]
    await TrtllmDouble(key=key).start(int(option(arguments, "--port")))


async def dynamo(arguments: list[str]) -> None:
    from tests.doubles.dynamo_http import DynamoDouble
    from tests.doubles.dynamo_model import Worker

    await DynamoDouble(Worker()).start(int(os.environ["DYN_SYSTEM_PORT"]))


def jq(arguments: list[str]) -> None:
    raw, path = arguments
    assert raw == "-r"
    found: Any = json.load(sys.stdin)
    for part in path.strip(".").split("."):
        found = found[part]
    print(found)


def sqlite(arguments: list[str]) -> None:
    file, words = arguments
    with sqlite3.connect(file) as here:
        if not words.startswith(".backup "):
            for row in here.execute(words):
                print(*row, sep="|")
            return
        with sqlite3.connect(words.removeprefix(".backup ")) as there:
            here.backup(there)


Serving = Callable[[list[str]], Awaitable[None]]
SERVERS: dict[str, Serving] = {
    "vllm": vllm, "vllm-rs": vllm_rs, "-m sglang.launch_server": sglang, "trtllm-serve": trtllm,
    "-m dynamo.vllm": dynamo,
}  # fmt: skip
TOOLS = {"jq": jq, "sqlite3": sqlite}


async def serve(server: Serving, arguments: list[str]) -> None:
    await server(arguments)
    print("it listens", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    words = sys.argv[1:]
    name = " ".join(words[:2]) if words[0] == "-m" else words[0]
    arguments = words[len(name.split()) :]
    if tool := TOOLS.get(name):
        tool(arguments)
    else:
        asyncio.run(serve(SERVERS[name], arguments))


if __name__ == "__main__":
    main()
