"""What all of `chadburn sidecar` have in common: their options, and serving with them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec
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

    from app.enginekit.settings import KitSettings
    from app.sidecars.allowed import Allowed
    from app.sidecars.serving import Dialect, Served, SidecarSettings
    from app.sidecars.tokens import IssuerTokens, StaticTokens

# Each look costs the engine's server some milliseconds.
_OBSERVE_S = 2.0

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    url: Annotated[str, typer.Option(help="The engine's server: http://host:port.")]
    data_dir: Annotated[
        Path, typer.Option(help="Operation store, and notes on the engine; one for each engine.")
    ]
    inference_address: InferenceAddress = "127.0.0.1:8777"
    admin_address: AdminAddress = "127.0.0.1:8778"
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the token that orders have to show.")
    ] = None
    inference_token_file: Annotated[
        Path | None, typer.Option(help="The one of requests; without it none is let in.")
    ] = None
    issuer: Annotated[
        str | None, typer.Option(help="Instead: whose tokens are taken, the issuer's URL.")
    ] = None
    inference_audience: InferenceAudience = INFERENCE_AUDIENCE
    admin_audience: AdminAudience = ENGINE_AUDIENCE
    insecure_loopback: Annotated[
        bool, typer.Option("--insecure-loopback", help="No tokens on loopback; warns.")
    ] = False
    certificate: Certificate = None
    key: Key = None
    client_ca: ClientCa = None
    weights_root: Annotated[
        list[Path] | None,
        typer.Option(help="Updates may name files below this directory. Repeatable."),
    ] = None
    rendezvous_allow: RendezvousAllow = None
    lora_root: Annotated[
        list[Path] | None,
        typer.Option(help="Adapters may be loaded from below this directory. Repeatable."),
    ] = None
    wait: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that the engine may take to be there; else for ever."),
    ] = None
    ready_file: Annotated[
        Path | None, typer.Option(help="Write addresses and instance here once it answers.")
    ] = None
    end_with_stdin: EndWithStdin = False


def with_common(function: Callable[Concatenate[Common, P], None]) -> Callable[..., None]:
    """A command whose own options come beside the common ones."""
    common = inspect.signature(Common, eval_str=True).parameters
    own = inspect.signature(function, eval_str=True).parameters
    named = [*common.values(), *(one for name, one in own.items() if name != "common")]

    @wraps(function)
    def command(**given: Any) -> None:
        shared = {one.name: given.pop(one.name) for one in fields(Common)}
        as_keywords: Any = function
        as_keywords(Common(**shared), **given)

    wrapper: Any = command
    wrapper.__signature__ = inspect.Signature(
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in named]
    )
    wrapper.__annotations__ = {one.name: one.annotation for one in named}
    return command


def serve(
    common: Common,
    dialect: Callable[[], Dialect],
    *,
    unconfigured_release: bool = False,
    pickled: bool = False,
    schemes: tuple[str, ...] = ("http", "https"),
) -> None:
    """Until it is told to end. `dialect` is asked for when all options are good. `schemes`: of the
    engine's URL. Raises CommandFailed."""
    # It takes a while to load, and the other verbs do without it.
    from app.sidecars.serving import CannotServe, SidecarSettings, run_sidecar

    tie(common.end_with_stdin)
    _check_url(common.url, schemes)
    tokens = _tokens(common)
    allowed = replace(_allowed(common), unconfigured_release=unconfigured_release, pickled=pickled)
    kit = _kit(common, tokens)
    engine = dialect()
    settings = SidecarSettings(
        url=common.url, kit=kit, dialect=engine, allowed=allowed, wait_s=common.wait
    )

    def ready(life: Served) -> None:
        said = {
            "inference_address": life.inference_address,
            "admin_address": life.admin_address,
            "instance_id": life.instance_id,
            "engine": f"{engine.name} {life.found.version}",
            "models": list(life.found.models),
        }
        print(
            f"chadburn: sidecar of {said['engine']}: inference {life.inference_address},"
            f" admin {life.admin_address}, instance {life.instance_id}",
            flush=True,
        )
        if common.ready_file is not None:
            write_json(common.ready_file, said)

    logging.basicConfig(level=logging.WARNING, format="chadburn: %(message)s")
    try:
        run_sidecar(settings, ready, _with(tokens))
    except CannotServe as error:
        raise CommandFailed(Exit.UNREACHABLE, f"sidecar: {error}") from error


def _allowed(common: Common) -> Allowed:
    from app.enginekit.rendezvous import RendezvousRule
    from app.sidecars.allowed import Allowed

    try:
        rules = tuple(RendezvousRule.parse(text) for text in common.rendezvous_allow or ())
    except ValueError as error:
        raise usage(f"--rendezvous-allow: {error}") from error
    weights, loras = tuple(common.weights_root or ()), tuple(common.lora_root or ())
    for root in (*weights, *loras):
        if not root.is_dir():
            raise usage(f"there is no directory at {root}")
    return Allowed(
        weights_roots=weights,
        rendezvous=rules,
        lora_roots=loras,
    )


def _kit(common: Common, tokens: IssuerTokens | StaticTokens | None) -> KitSettings:
    from app.enginekit.settings import KitSettings, SettingsError, TlsFiles

    certificate, key = common.certificate, common.key
    if bool(certificate) != bool(key) or (common.client_ca and not certificate):
        raise usage("--certificate and --key go together, and --client-ca with both")
    addresses = (common.inference_address, common.admin_address)
    tcp = [one for one in addresses if not one.startswith("unix:")]
    if tokens is None and tcp and not common.insecure_loopback:
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

    try:
        # Without a verifier yet: one that is wanted needs an event loop, and is put in there.
        return KitSettings(
            data_dir=common.data_dir,
            inference_address=common.inference_address,
            admin_address=common.admin_address,
            inference_verifier=_Later() if tokens is not None else None,
            admin_verifier=_Later() if tokens is not None else None,
            inference_tls=tls(None),
            admin_tls=tls(common.client_ca),
            insecure_loopback=tokens is None,
            observe_interval_s=_OBSERVE_S,
        )
    except SettingsError as error:
        raise usage(str(error)) from error


class _Later:
    """Stands where a verifier will be."""

    async def verify(self, token: str) -> Any:  # noqa: ARG002
        raise RuntimeError("tokens cannot be judged yet")


def _with(tokens: IssuerTokens | StaticTokens | None) -> Any:
    @asynccontextmanager
    async def around(settings: SidecarSettings) -> AsyncIterator[SidecarSettings]:
        from app.auth.tokens.issuers import IssuerConfigError
        from app.enginekit.server import utc_now
        from app.sidecars.serving import CannotServe
        from app.sidecars.tokens import verifying

        manager: AbstractAsyncContextManager[Any] = verifying(tokens, utc_now)
        try:
            async with manager as verifier:
                kit = replace(settings.kit, inference_verifier=verifier, admin_verifier=verifier)
                yield replace(settings, kit=kit)
        except IssuerConfigError as error:
            raise CannotServe(str(error)) from error

    return around


def _tokens(common: Common) -> IssuerTokens | StaticTokens | None:
    from app.sidecars.tokens import IssuerTokens, StaticTokens

    if common.issuer is not None:
        if common.token_file is not None or common.inference_token_file is not None:
            raise usage("take tokens of an --issuer or of files, not both")
        return IssuerTokens(
            issuer=common.issuer,
            inference_audience=common.inference_audience,
            admin_audience=common.admin_audience,
        )
    if common.token_file is None:
        if common.inference_token_file is not None:
            raise usage("--inference-token-file goes with --token-file")
        return None
    inference = common.inference_token_file
    try:
        return StaticTokens(
            admin=_line(common.token_file),
            inference=None if inference is None else _line(inference),
        )
    except ValueError as error:
        raise usage(str(error)) from error


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError) as error:
        raise usage(f"{file} cannot be read") from error


def key_in(file: Path | None) -> str | None:
    """As it stands in a header. With any other it would look as if the engine were not there."""
    if file is None:
        return None
    found = _line(file)
    if not found or not found.isascii() or not found.isprintable() or " " in found:
        raise usage(f"{file} holds no key: printable ASCII characters, without blanks")
    return found


def _check_url(url: str, schemes: tuple[str, ...]) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    bare = not host or parts.scheme not in schemes
    if bare or parts.path not in ("", "/") or parts.query or parts.username:
        named = " or ".join(f"{one}://host:port" for one in schemes if one != "https")
        raise usage(f"--url is {named}, and nothing more")
