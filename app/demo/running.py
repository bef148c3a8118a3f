"""A demo from its first process to its last."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.demo.folder import Folder, FolderRefused, check_writable, write_json, write_private
from app.demo.gateway import Gateway, GatewayRefused, gateway_config
from app.demo.plan import (
    ENGINE_AUDIENCE,
    HOST,
    INFERENCE_AUDIENCE,
    TOKEN_TTL_S,
    DemoRefused,
    Plan,
    Ports,
    check_packages,
)
from app.demo.processes import ChildEnded, Children
from app.demo.tokens import fetch_tokens
from app.demo.traffic import traffic

START_S = 120.0  # torch alone takes many seconds to load on a busy machine
RENEW_S = TOKEN_TTL_S / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Everything that answers now; `tokens` by role."""

    base_url: str
    issuer: str
    engine: str
    inference_address: str
    admin_address: str
    tokens: Mapping[str, str] = field(repr=False)
    secret: str = field(repr=False)
    folder: Folder

    def document(self) -> dict[str, Any]:
        """The ready file."""
        return {
            "base_url": self.base_url,
            "issuer": self.issuer,
            "engine": self.engine,
            "inference_address": self.inference_address,
            "admin_address": self.admin_address,
            "tokens": dict(self.tokens),
            "data_dir": str(self.folder.path.absolute()),
        }


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
            _forget_earlier(plan, folder)
            check_packages()
            ports = Ports.counted_from(plan.port)
            life = asyncio.ensure_future(_live(plan, folder, ports, tell))
            await asyncio.wait([life, stopped], return_when=asyncio.FIRST_COMPLETED)
            life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await life
    except (FolderRefused, ChildEnded, GatewayRefused) as error:
        raise DemoRefused(str(error)) from error
    finally:
        stopped.cancel()


def _forget_earlier(plan: Plan, folder: Folder) -> None:
    """A demo that was killed leaves its ready files; who waits for ours must not read them."""
    for path in _ready_files(plan, folder):
        check_writable(path.parent)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise DemoRefused(f"{path} cannot be replaced: {error.strerror}") from error


def _ready_files(plan: Plan, folder: Folder) -> list[Path]:
    return [folder.ready_file, *([plan.ready_file] if plan.ready_file else [])]


async def _live(plan: Plan, folder: Folder, ports: Ports, tell: Callable[[Running], None]) -> None:
    children = Children(folder)
    try:
        async with asyncio.timeout(START_S) as limit:
            running = await _start(plan, folder, ports, children)
            limit.reschedule(None)
            async with _announced(plan, running) as token_of:
                tell(running)
                choose = random.Random()  # noqa: S311 - prompts, no secrets
                async with traffic(
                    running.inference_address, lambda: token_of("inference"), plan.traffic, choose
                ):
                    raise await children.first_end()
    except TimeoutError as error:
        slow = f"not all of the demo answered within {START_S:g} s; logs: {folder.log('x').parent}"
        raise DemoRefused(slow) from error
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
    arguments = [
        "engine",
        f"--data-dir={path.parent}",
        f"--inference-address={HOST}:{ports.inference}",
        f"--admin-address={HOST}:{ports.admin}",
        f"--issuer={issuer}",
        f"--inference-audience={INFERENCE_AUDIENCE}",
        f"--admin-audience={ENGINE_AUDIENCE}",
        f"--step-delay-ms={plan.step_delay_ms}",
        f"--ready-file={path}",
        *_TIED,
    ]
    if plan.checkpoint is not None:
        arguments.append(f"--checkpoint={plan.checkpoint}")
    await children.start("engine", arguments)
    return await children.said(path)


async def _start_gateway(folder: Folder, ports: Ports, children: Children, issuer: str) -> str:
    path = _fresh(folder, "gateway")
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


@contextlib.asynccontextmanager
async def _announced(plan: Plan, running: Running) -> AsyncIterator[Callable[[str], str]]:
    """Ready files while the block runs, with tokens that are renewed long before they expire.

    Gives the present token of a role.
    """
    folder = running.folder
    paths = _ready_files(plan, folder)
    tokens = dict(running.tokens)

    def write() -> None:
        header = f"Authorization: Bearer {tokens['operator']}\n"
        write_private(folder.operator_header, header)
        for path in paths:
            try:
                write_json(path, {**running.document(), "tokens": tokens})
            except OSError as error:
                raise DemoRefused(f"{path} cannot be written: {error.strerror}") from error

    async def renew() -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            tokens.update(await fetch_tokens(running.issuer, running.secret))
            write()

    write()
    renewing = asyncio.create_task(renew(), name="renew-tokens")
    try:
        yield lambda role: tokens[role]
    finally:
        renewing.cancel()
        for path in (*paths, folder.operator_header, folder.issuer_secret):
            path.unlink(missing_ok=True)
