"""`chadburn sidecar`: administer an engine that knows nothing of it, from a process beside it."""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.listening import (
    AdminAddress,
    AdminAudience,
    Certificate,
    ClientCa,
    InferenceAddress,
    InferenceAudience,
    Key,
    RendezvousAllow,
)
from app.commands.printing import note
from app.commands.serving import EndWithStdin, tie
from app.demo.folder import write_json
from app.demo.plan import ENGINE_AUDIENCE, INFERENCE_AUDIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from app.sidecars.tokens import IssuerTokens, StaticTokens
    from app.sidecars.vllm.serving import Served, SidecarSettings

app = typer.Typer(
    name="sidecar",
    help="Administer an engine over its own HTTP endpoints.",
    no_args_is_help=True,
)

# Each look costs the engine's server some milliseconds.
_OBSERVE_S = 2.0

Url = Annotated[str, typer.Option(help="The engine's server: http://host:port.")]


@app.command()
def vllm(
    url: Url,
    data_dir: Annotated[
        Path, typer.Option(help="Operation store, and notes on the engine; one for each engine.")
    ],
    engine_key_file: Annotated[
        Path | None, typer.Option(help="Holds the API key of the engine's /v1 routes.")
    ] = None,
    inference_address: InferenceAddress = "127.0.0.1:8777",
    admin_address: AdminAddress = "127.0.0.1:8778",
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the token that orders have to show.")
    ] = None,
    inference_token_file: Annotated[
        Path | None, typer.Option(help="The one of requests; without it none is let in.")
    ] = None,
    issuer: Annotated[
        str | None, typer.Option(help="Instead: whose tokens are taken, the issuer's URL.")
    ] = None,
    inference_audience: InferenceAudience = INFERENCE_AUDIENCE,
    admin_audience: AdminAudience = ENGINE_AUDIENCE,
    insecure_loopback: Annotated[
        bool, typer.Option("--insecure-loopback", help="No tokens on loopback; warns.")
    ] = False,
    certificate: Certificate = None,
    key: Key = None,
    client_ca: ClientCa = None,
    weights_root: Annotated[
        list[Path] | None,
        typer.Option(help="Updates may name files below this directory. Repeatable."),
    ] = None,
    rendezvous_allow: RendezvousAllow = None,
    lora_root: Annotated[
        list[Path] | None,
        typer.Option(help="Adapters may be loaded from below this directory. Repeatable."),
    ] = None,
    sleep_unconfigured: Annotated[
        bool,
        typer.Option(
            "--sleep-unconfigured",
            help="Offer release also where the engine gives no memory back: to try things out.",
        ),
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that the engine may take to be there; else for ever."),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write addresses and instance here once it answers.")
    ] = None,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Administer a vLLM server, started with VLLM_SERVER_DEV_MODE=1, from beside it."""
    # It takes a while to load, and the other verbs do without it.
    from app.enginekit.rendezvous import RendezvousRule
    from app.enginekit.settings import KitSettings, SettingsError, TlsFiles
    from app.sidecars.vllm.offer import Allowed
    from app.sidecars.vllm.serving import CannotServe, SidecarSettings, run_sidecar

    tie(end_with_stdin)
    _check_url(url)
    if bool(certificate) != bool(key) or (client_ca and not certificate):
        raise usage("--certificate and --key go together, and --client-ca with both")
    tokens = _tokens(issuer, inference_audience, admin_audience, token_file, inference_token_file)
    try:
        rules = tuple(RendezvousRule.parse(text) for text in rendezvous_allow or ())
    except ValueError as error:
        raise usage(f"--rendezvous-allow: {error}") from error
    addresses = (inference_address, admin_address)
    tcp = [one for one in addresses if not one.startswith("unix:")]
    if tokens is None and tcp and not insecure_loopback:
        raise usage(
            "name a --token-file or the --issuer whose tokens are taken, listen at unix:/path, or"
            " say --insecure-loopback"
        )
    if tokens is None and tcp:
        note(
            "chadburn: WARNING: no token is asked for: every process on this machine can give"
            " orders to the engine"
        )

    def tls(ca: Path | None) -> TlsFiles | None:
        if certificate is None or key is None:
            return None
        return TlsFiles(certificate=certificate, key=key, client_ca=ca)

    for root in (*(weights_root or ()), *(lora_root or ())):
        if not root.is_dir():
            raise usage(f"there is no directory at {root}")
    try:
        # Without a verifier yet: one that is wanted needs an event loop, and is put in there.
        kit = KitSettings(
            data_dir=data_dir,
            inference_address=inference_address,
            admin_address=admin_address,
            inference_verifier=_Later() if tokens is not None else None,
            admin_verifier=_Later() if tokens is not None else None,
            inference_tls=tls(None),
            admin_tls=tls(client_ca),
            insecure_loopback=tokens is None,
            observe_interval_s=_OBSERVE_S,
        )
    except SettingsError as error:
        raise usage(str(error)) from error
    settings = SidecarSettings(
        url=url,
        kit=kit,
        key=None if engine_key_file is None else _key(engine_key_file),
        allowed=Allowed(
            weights_roots=tuple(weights_root or ()),
            rendezvous=rules,
            lora_roots=tuple(lora_root or ()),
            unconfigured_sleep=sleep_unconfigured,
        ),
        wait_s=wait,
    )

    def ready(life: Served) -> None:
        said = {
            "inference_address": life.inference_address,
            "admin_address": life.admin_address,
            "instance_id": life.instance_id,
            "engine": f"vllm {life.found.version}",
            "models": list(life.found.models),
        }
        print(
            f"chadburn: sidecar of vllm {life.found.version}: inference {life.inference_address},"
            f" admin {life.admin_address}, instance {life.instance_id}",
            flush=True,
        )
        if ready_file is not None:
            write_json(ready_file, said)

    logging.basicConfig(level=logging.WARNING, format="chadburn: %(message)s")
    try:
        run_sidecar(settings, ready, _with(tokens))
    except CannotServe as error:
        raise CommandFailed(Exit.UNREACHABLE, f"sidecar: {error}") from error


@app.command()
def sglang(url: Url = "") -> None:
    """Not there yet."""
    raise _not_there("sglang", url)


@app.command()
def trtllm(url: Url = "") -> None:
    """Not there yet."""
    raise _not_there("trtllm", url)


def _not_there(engine: str, _url: str) -> CommandFailed:
    return CommandFailed(Exit.USAGE, f"there is no sidecar for {engine} yet; there is one for vllm")


class _Later:
    """Stands where a verifier will be."""

    async def verify(self, token: str) -> Any:  # noqa: ARG002
        raise RuntimeError("tokens cannot be judged yet")


def _with(tokens: IssuerTokens | StaticTokens | None) -> Any:
    @asynccontextmanager
    async def around(settings: SidecarSettings) -> AsyncIterator[SidecarSettings]:
        from app.auth.tokens.issuers import IssuerConfigError
        from app.enginekit.server import utc_now
        from app.sidecars.tokens import verifying
        from app.sidecars.vllm.serving import CannotServe

        manager: AbstractAsyncContextManager[Any] = verifying(tokens, utc_now)
        try:
            async with manager as verifier:
                kit = replace(settings.kit, inference_verifier=verifier, admin_verifier=verifier)
                yield replace(settings, kit=kit)
        except IssuerConfigError as error:
            raise CannotServe(str(error)) from error

    return around


def _tokens(
    issuer: str | None,
    inference_audience: str,
    admin_audience: str,
    token_file: Path | None,
    inference_token_file: Path | None,
) -> IssuerTokens | StaticTokens | None:
    from app.sidecars.tokens import IssuerTokens, StaticTokens

    if issuer is not None:
        if token_file is not None or inference_token_file is not None:
            raise usage("take tokens of an --issuer or of files, not both")
        return IssuerTokens(
            issuer=issuer, inference_audience=inference_audience, admin_audience=admin_audience
        )
    if token_file is None:
        if inference_token_file is not None:
            raise usage("--inference-token-file goes with --token-file")
        return None
    try:
        return StaticTokens(
            admin=_line(token_file),
            inference=None if inference_token_file is None else _line(inference_token_file),
        )
    except ValueError as error:
        raise usage(str(error)) from error


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError) as error:
        raise usage(f"{file} cannot be read") from error


def _key(file: Path) -> str:
    """As it stands in a header. With any other it would look as if the engine were not there."""
    found = _line(file)
    if not found or not found.isascii() or not found.isprintable() or " " in found:
        raise usage(f"{file} holds no key: printable ASCII characters, without blanks")
    return found


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    bare = not host or parts.scheme not in ("http", "https")
    if bare or parts.path not in ("", "/") or parts.query or parts.username:
        raise usage("--url is http://host:port, and nothing more")
