"""Commands that serve: the gateway and the reference engine."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

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
from app.demo.folder import write_json
from app.demo.plan import ENGINE_AUDIENCE, INFERENCE_AUDIENCE
from app.domain.kinds import EngineRole

EndWithStdin = Annotated[
    bool,
    typer.Option(
        "--end-with-stdin", hidden=True, help="End when standard input closes: with the parent."
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file; CHADBURN_… variables stand above it.")
]


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Around the imports of a process that stays: they make hundreds of thousands of objects that
    are all kept, and looking through them for garbage again and again is a third of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def serve(
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0: a free one.")] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the address here once it answers.")
    ] = None,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Run the gateway."""
    with _collecting_nothing():
        from app.main import serve as serve_gateway

    tie(end_with_stdin)
    given = {"host": host, "port": port}
    settings = settings_of(config, {k: v for k, v in given.items() if v is not None})

    def ready(address: str) -> None:
        print(f"chadburn: serving {address}", flush=True)
        if ready_file is not None:
            write_json(ready_file, {"base_url": address})

    raise typer.Exit(serve_gateway(settings, ready=ready))


def engine(
    data_dir: Annotated[Path, typer.Option(help="Operation store and models of the engine.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Hugging Face Llama checkpoint; else a small one made at first start."),
    ] = None,
    next_weights: Annotated[
        Path | None,
        typer.Option(help="Also make a second small one below this folder, to update to."),
    ] = None,
    inference_address: InferenceAddress = "127.0.0.1:8767",
    admin_address: AdminAddress = "127.0.0.1:8768",
    vllm_control: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve vllm.Control there too, to try what speaks to vLLM; this machine alone.",
        ),
    ] = None,
    issuer: Annotated[
        str | None, typer.Option(help="Whose tokens are taken: the issuer's URL.")
    ] = None,
    inference_audience: InferenceAudience = INFERENCE_AUDIENCE,
    admin_audience: AdminAudience = ENGINE_AUDIENCE,
    insecure_loopback: Annotated[
        bool, typer.Option("--insecure-loopback", help="No tokens; loopback and sockets only.")
    ] = False,
    certificate: Certificate = None,
    key: Key = None,
    client_ca: ClientCa = None,
    model_name: Annotated[str | None, typer.Option(help="Else the checkpoint's folder.")] = None,
    weight_version: Annotated[str | None, typer.Option(help="Label of its weights.")] = None,
    weights_root: Annotated[
        list[Path] | None,
        typer.Option(help="Updates may read files below this directory. Repeatable."),
    ] = None,
    rendezvous_allow: RendezvousAllow = None,
    profile_root: Annotated[
        Path | None, typer.Option(help="Where profiles are kept; else in the data directory.")
    ] = None,
    profile_count: Annotated[
        int, typer.Option(min=1, help="Profiles that are kept; the oldest go first.")
    ] = 64,
    profile_bytes: Annotated[
        int, typer.Option(min=1, help="What all profiles that are kept may take; the latest stays.")
    ] = 8 << 30,
    lora_root: Annotated[
        list[Path] | None,
        typer.Option(help="Adapters may be loaded from below this directory. Repeatable."),
    ] = None,
    max_loras: Annotated[
        int, typer.Option(min=1, help="Adapters loaded at once; one more evicts an idle one.")
    ] = 8,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Ranks that divide the model, each a process.")
    ] = 1,
    role: Annotated[
        EngineRole, typer.Option(help="Prefill or decode alone, or both: aggregated.")
    ] = EngineRole.AGGREGATED,
    kv_address: Annotated[
        str, typer.Option(help="Where decode engines fetch KV from this one: host:port (0: free).")
    ] = "127.0.0.1:0",
    kv_peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS[:PORT]",
            help="KV is fetched from there, an address or a network; else from this machine alone."
            " Repeatable.",
        ),
    ] = None,
    kv_lease: Annotated[
        float, typer.Option(min=0.1, help="Seconds that KV is held which nobody fetches.")
    ] = 60.0,
    kv_beyond_loopback: Annotated[
        bool, typer.Option("--kv-beyond-loopback", help="KV may leave this machine, unencrypted.")
    ] = False,
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of the KV cache; else room for 16384 tokens.")
    ] = None,
    max_running: Annotated[
        int, typer.Option(min=1, max=512, help="Requests that are computed at once.")
    ] = 16,
    rank_timeout_s: Annotated[
        float, typer.Option(min=0.1, help="A rank that says nothing for so long is lost.")
    ] = 10.0,
    step_delay_ms: Annotated[
        int, typer.Option(min=0, help="Slept after each step, to be able to watch.")
    ] = 0,
    traces: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Send spans there: an OTLP endpoint, or otel for what the OTEL_ variables say.",
        ),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write addresses and instance here once it answers.")
    ] = None,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Run the reference engine: a Llama decoder in torch with two listeners."""
    # Without the extra `engine` everything but this command works.
    from app.enginekit.settings import TlsFiles
    from app.reference_engine.errors import ReferenceEngineError
    from app.reference_engine.handoff import HandoffSettings
    from app.reference_engine.limits import CoreSettings
    from app.reference_engine.profile_shelf import ProfileLimits
    from app.reference_engine.rendezvous import RendezvousRule
    from app.reference_engine.serving import (
        EngineSettings,
        ServedEngine,
        TokenSettings,
        run_engine,
    )

    tie(end_with_stdin)
    if bool(certificate) != bool(key) or (client_ca and not certificate):
        raise usage("--certificate and --key go together, and --client-ca with both")
    if issuer is None and not insecure_loopback:
        raise usage("name the --issuer whose tokens are taken, or say --insecure-loopback")
    try:
        rules = tuple(RendezvousRule.parse(text) for text in rendezvous_allow or ())
    except ValueError as error:
        raise usage(f"--rendezvous-allow: {error}") from error
    if role is EngineRole.UNKNOWN:
        raise usage("--role: aggregated, prefill or decode")
    try:
        handoff = HandoffSettings(
            address=kv_address,
            peers=tuple(kv_peer or ()),
            lease_s=kv_lease,
            beyond_loopback=kv_beyond_loopback,
        )
    except ValueError as error:
        raise usage(f"--kv-address, --kv-peer: {error}") from error

    def tls(ca: Path | None) -> TlsFiles | None:
        return (
            TlsFiles(certificate=certificate, key=key, client_ca=ca)
            if certificate and key
            else None
        )

    def ready(served: ServedEngine) -> None:
        said = {
            "inference_address": served.inference_address,
            "admin_address": served.admin_address,
            "instance_id": served.instance_id,
            "model": served.model_name,
            "next_weights": served.next_weights,
            "vllm_control_address": served.vllm_control_address,
        }
        places = {
            "inference": served.inference_address,
            "admin": served.admin_address,
            "vllm.Control": served.vllm_control_address,
            "instance": served.instance_id,
        }
        told = ", ".join(f"{name} {place}" for name, place in places.items() if place)
        print(f"chadburn: engine with {served.model_name}: {told}", flush=True)
        if ready_file is not None:
            write_json(ready_file, said)

    tokens = None
    if issuer is not None:
        tokens = TokenSettings(
            issuer=issuer, inference_audience=inference_audience, admin_audience=admin_audience
        )
    settings = EngineSettings(
        data_dir=data_dir,
        checkpoint=checkpoint,
        next_weights=next_weights,
        model_name=model_name,
        weight_version=weight_version,
        weights_roots=tuple(weights_root or ()),
        rendezvous_rules=rules,
        profile_root=profile_root,
        profile_limits=ProfileLimits(count=profile_count, size_bytes=profile_bytes),
        lora_roots=tuple(lora_root or ()),
        max_loras=max_loras,
        inference_address=inference_address,
        admin_address=admin_address,
        vllm_control_address=vllm_control,
        traces=traces,
        tokens=tokens,
        inference_tls=tls(None),
        admin_tls=tls(client_ca),
        insecure_loopback=insecure_loopback,
        core=CoreSettings(
            step_delay_ms=step_delay_ms,
            tensor_parallel_size=tensor_parallel_size,
            kv_blocks=kv_blocks,
            max_running=max_running,
        ),
        rank_timeout_s=rank_timeout_s,
        role=role,
        handoff=handoff,
    )
    try:
        run_engine(settings, ready)
    except (ReferenceEngineError, OSError) as error:
        raise CommandFailed(Exit.FAULT, f"engine: {error}") from error


def settings_of(config: Path | None, given: dict[str, Any]) -> Any:
    from app.settings import SettingsError, load_settings

    try:
        return load_settings(config, **given)
    except SettingsError as error:
        raise usage(f"settings: {error}") from error


def tie(end_with_stdin: bool) -> None:
    if end_with_stdin:
        from app.demo.parent import end_with_stdin as end

        end()
