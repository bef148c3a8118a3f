"""A demo from its first process to its last."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import secrets
import signal
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

from app.demo.announcing import ReadyFiles, Running, announced
from app.demo.folder import Folder, FolderRefused, write_private
from app.demo.gateway import Gateway, GatewayRefused, gateway_config
from app.demo.plan import (
    ENGINE_AUDIENCE,
    HOST,
    INFERENCE_AUDIENCE,
    RENDEZVOUS,
    DemoRefused,
    Plan,
    Ports,
    check_packages,
)
from app.demo.processes import ChildEnded, Children
from app.demo.tokens import TokenRefused, fetch_tokens
from app.demo.traffic import traffic

START_S = 120.0  # torch alone takes many seconds to load on a busy machine


async def run(plan: Plan, tell: Callable[[Running], None]) -> None:
    """Until SIGINT or SIGTERM; `tell` is called once all of it answers.

    Raises DemoRefused with one line when something is in the way, or when a process of the demo
    ends by itself. All its processes are gone when this returns or raises.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    folder = Folder(plan.data_dir)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        folder.create()
        with folder.locked():
            files = ReadyFiles(folder, plan.ready_file)
            files.forget()
            check_packages()
            ports = Ports.counted_from(plan.port)
            life = asyncio.ensure_future(_live(plan, files, ports, tell))
            await asyncio.wait([life, stopped], return_when=asyncio.FIRST_COMPLETED)
            life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await life
    except (FolderRefused, ChildEnded, GatewayRefused, TokenRefused, OSError) as error:
        raise DemoRefused(str(error)) from error
    finally:
        stopped.cancel()


async def _live(
    plan: Plan, files: ReadyFiles, ports: Ports, tell: Callable[[Running], None]
) -> None:
    folder = files.folder
    children = Children(folder)
    try:
        async with asyncio.timeout(START_S) as limit:
            running = await _start(plan, folder, ports, children)
            limit.reschedule(None)
            async with announced(running, files) as token_of:
                tell(running)
                choose = random.Random()  # noqa: S311 - prompts, no secrets
                async with traffic(
                    running.inference_address, lambda: token_of("inference"), plan.traffic, choose
                ):
                    raise await children.first_end()
    except TimeoutError as error:
        slow = f"not all of the demo answered within {START_S:g} s; logs: {folder.log('x').parent}"
        raise DemoRefused(slow) from error
    except httpx2.TransportError as error:
        children.check()  # whose end is the likelier cause
        raise DemoRefused(f"the gateway does not answer: {error}") from error
    finally:
        await asyncio.shield(children.stop())


async def _start(plan: Plan, folder: Folder, ports: Ports, children: Children) -> Running:
    secret = secrets.token_urlsafe(32)
    write_private(folder.issuer_secret, secret)
    issuer = await _start_issuer(folder, ports, children)
    engine = await _start_engine(plan, folder, ports, children, issuer)
    begun = datetime.now(UTC)
    base_url = await _start_gateway(folder, ports, children, issuer)
    tokens = await fetch_tokens(issuer, secret)
    async with Gateway(base_url, tokens["operator"]) as gateway:
        name = await gateway.register(engine["admin_address"])
        await gateway.serving(name, since=begun, check=children.check)
    return Running(
        base_url=base_url,
        issuer=issuer,
        engine=name,
        inference_address=engine["inference_address"],
        admin_address=engine["admin_address"],
        next_weights=engine["next_weights"],
        tokens=tokens,
        secret=secret,
        folder=folder,
    )


_TIED = ("--end-with-stdin",)


async def _start_issuer(folder: Folder, ports: Ports, children: Children) -> str:
    path = _fresh(folder, "issuer")
    await children.start(
        "issuer",
        [
            "dev-issuer",
            f"--port={ports.issuer}",
            f"--data-dir={path.parent}",
            f"--secret-file={folder.issuer_secret}",
            f"--ready-file={path}",
            *_TIED,
        ],
    )
    return str((await children.said(path))["issuer"])


async def _start_engine(
    plan: Plan, folder: Folder, ports: Ports, children: Children, issuer: str
) -> Mapping[str, Any]:
    path = _fresh(folder, "engine")
    folder.adapters.mkdir(mode=0o700, exist_ok=True)
    folder.weights.mkdir(mode=0o700, exist_ok=True)
    arguments = [
        "engine",
        f"--data-dir={path.parent}",
        f"--inference-address={HOST}:{ports.inference}",
        f"--admin-address={HOST}:{ports.admin}",
        f"--issuer={issuer}",
        f"--inference-audience={INFERENCE_AUDIENCE}",
        f"--admin-audience={ENGINE_AUDIENCE}",
        f"--step-delay-ms={plan.step_delay_ms}",
        f"--lora-root={folder.adapters}",
        f"--profile-root={folder.profiles}",
        f"--tensor-parallel-size={plan.ranks}",
        "--weight-version=v1",
        f"--weights-root={folder.weights}",
        f"--rendezvous-allow={RENDEZVOUS}",
        f"--ready-file={path}",
        *_TIED,
    ]
    if plan.checkpoint is not None:
        arguments.append(f"--checkpoint={plan.checkpoint}")
    else:
        arguments.append(f"--next-weights={folder.weights}")
    await children.start("engine", arguments)
    return await children.said(path)


async def _start_gateway(folder: Folder, ports: Ports, children: Children, issuer: str) -> str:
    path = _fresh(folder, "gateway")
    # A new one each time: the issuer does not remember earlier logins either.
    write_private(folder.session_key, base64.b64encode(secrets.token_bytes(32)).decode())
    write_private(folder.gateway_config, gateway_config(folder, ports.gateway, issuer))
    arguments = [f"--config={folder.gateway_config}", f"--ready-file={path}", *_TIED]
    await children.start("gateway", ["serve", *arguments])
    return str((await children.said(path))["base_url"])


def _fresh(folder: Folder, process: str) -> Path:
    """Where a child says that it is ready; what an earlier one said there is forgotten."""
    directory = folder.own(process)
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / "ready.json"
    path.unlink(missing_ok=True)
    return path
