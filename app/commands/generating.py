"""`chadburn generate`: text from an engine, token by token."""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Annotated

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.http import compact
from app.commands.printing import note
from app.commands.target import DEMO_DIR, DemoDir, plain, read_ready

_ENDS = {"stop": Exit.OK, "length": Exit.OK, "cancelled": Exit.CANCELLED}


def generate(
    prompt: Annotated[str, typer.Argument(help="What to go on from.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest output, in tokens.")] = 64,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0: always the likeliest token.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed, the same text.")] = None,
    lora: Annotated[str, typer.Option(help="Under this adapter, which has to be loaded.")] = "",
    request_id: Annotated[
        str | None, typer.Option(help="Name of the request, for `chadburn abort`; else a new one.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the end.")] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document a line instead of text.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="CHADBURN_INFERENCE_ADDRESS", help="The engine's inference listener, host:port."
        ),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="A prefill engine's inference listener; --address is a decode engine."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="CHADBURN_INFERENCE_TOKEN",
            help="Inference token; an engine with --insecure-loopback needs none.",
        ),
    ] = None,
    demo_dir: DemoDir = DEMO_DIR,
) -> None:
    """Generate text straight from an engine's inference listener; Ctrl-C aborts the request.

    The gateway has no part in it: inference and administration are apart.
    """
    if address is None or token is None:
        ready = read_ready(demo_dir)
        if ready is not None and address in (None, ready.inference_address):
            address, token = ready.inference_address, token or ready.tokens["inference"]
        elif address is None:
            raise usage(f"give --address; no demo is in {demo_dir}")
    wanted = {
        "request_id": request_id or str(uuid.uuid4()),
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "lora": lora,
    }
    raise typer.Exit(asyncio.run(_stream(address, prefill, token, wanted, timeout, as_json)))


async def _stream(
    address: str,
    prefill: str | None,
    token: str | None,
    wanted: dict[str, object],
    timeout_s: float,
    as_json: bool,
) -> Exit:
    # grpc takes a while to load, and the other verbs do without it.
    from app.inference_client import (
        EngineOutOfReach,
        Finished,
        Generation,
        GenerationRefused,
        InferenceClient,
    )

    try:
        shown = None if token is None else plain(token)
        client = InferenceClient(address, shown)
        first = InferenceClient(prefill or address, shown)
    except ValueError as error:
        raise usage(str(error)) from error
    exit_ = Exit.UNKNOWN
    async with client, first:
        try:
            generation = Generation(**wanted)  # type: ignore[arg-type]
            session = None
            if prefill is not None:
                session = await first.prefill(generation, timeout_s=timeout_s)
            pieces = client.generate(generation, timeout_s=timeout_s, session=session)
            async for piece in pieces:
                if isinstance(piece, Finished):
                    exit_ = _ENDS.get(piece.reason, Exit.UNKNOWN)
                    _finish(piece.reason, piece.message, _usage(piece), as_json)
                elif as_json:
                    print(compact({"text": piece.text, "tokens": piece.tokens}), flush=True)
                else:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        except GenerationRefused as error:
            cancelled = error.reason == "CANCELLED"
            raise CommandFailed(
                Exit.CANCELLED if cancelled else Exit.REFUSED,
                f"the engine says: {error.message} ({error.reason})",
            ) from error
        except EngineOutOfReach as error:
            asked = ", ".join(filter(None, (prefill, address)))
            raise CommandFailed(Exit.UNREACHABLE, f"{asked}: {error}") from error
    return exit_


def _finish(reason: str, message: str, usage_: dict[str, int], as_json: bool) -> None:
    if as_json:
        print(compact({"finished": reason, "message": message, "usage": usage_}), flush=True)
        return
    print(flush=True)
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in usage_.items())
    note(f"[{': '.join(filter(None, [reason, message]))}{'; ' if counts else ''}{counts}]")


def _usage(finished: object) -> dict[str, int]:
    names = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
    found = {name: getattr(finished, name) for name in names}
    return {name: count for name, count in found.items() if count is not None}
