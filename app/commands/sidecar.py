"""`chadburn sidecar`: administer an engine that knows nothing of it, from a process beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.ending import usage
from app.commands.printing import note
from app.commands.sidecar_options import Common, key_in, serve, with_common

if TYPE_CHECKING:
    from app.sidecars.dynamo.dialect import DynamoDialect
    from app.sidecars.native.dialect import NativeDialect
    from app.sidecars.sglang.dialect import SglangDialect
    from app.sidecars.trtllm.dialect import TrtllmDialect
    from app.sidecars.vllm.dialect import VllmDialect

app = typer.Typer(
    name="sidecar",
    help="Administer an engine over its own HTTP endpoints.",
    no_args_is_help=True,
)


@app.command()
@with_common
def vllm(
    common: Common,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="Holds the API key of the engine's /v1 routes.")
    ] = None,
    sleep_unconfigured: Annotated[
        bool,
        typer.Option(
            "--sleep-unconfigured",
            help="Offer release also where the engine gives no memory back: to try things out.",
        ),
    ] = False,
) -> None:
    """Administer a vLLM server, started with VLLM_SERVER_DEV_MODE=1, from beside it."""

    def dialect() -> VllmDialect:
        from app.sidecars.vllm.dialect import VllmDialect

        return VllmDialect(key=key_in(engine_key_file))

    serve(common, dialect, unconfigured_release=sleep_unconfigured)


@app.command()
@with_common
def sglang(
    common: Common,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="Holds the engine's API key, where it was given one.")
    ] = None,
    engine_admin_key_file: Annotated[
        Path | None, typer.Option(help="Holds its admin API key, where it was given one.")
    ] = None,
    profile_dir: Annotated[
        Path | None, typer.Option(help="Profiles are written below this directory.")
    ] = None,
    model_path: Annotated[
        Path | None,
        typer.Option(help="The checkpoint that it was started with, where it does not tell."),
    ] = None,
    release_unconfigured: Annotated[
        bool,
        typer.Option(
            "--release-unconfigured",
            help="Offer release also where the engine gives no memory back: to try things out.",
        ),
    ] = False,
    allow_pickled: Annotated[
        bool,
        typer.Option(
            "--allow-pickled",
            help="Pass on weights that a trainer has pickled; SGLang unpickles what it is sent.",
        ),
    ] = False,
) -> None:
    """Administer an SGLang server from beside it."""
    for folder in (profile_dir, model_path):
        if folder is not None and not folder.is_dir():
            raise usage(f"there is no directory at {folder}")

    def dialect() -> SglangDialect:
        from app.sidecars.sglang.dialect import SglangDialect

        return SglangDialect(
            key=key_in(engine_key_file),
            admin_key=key_in(engine_admin_key_file),
            profile_root=None if profile_dir is None else profile_dir.absolute(),
            model_path=None if model_path is None else model_path.absolute(),
        )

    if allow_pickled:
        note(
            "chadburn: WARNING: --allow-pickled: whoever may send weights to this sidecar may have"
            " the engine run code of theirs"
        )
    serve(common, dialect, unconfigured_release=release_unconfigured, pickled=allow_pickled)


@app.command()
@with_common
def trtllm(
    common: Common,
    control_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Holds what the server has as TRTLLM_RUNTIME_CONTROL_API_KEY; without it memory is"
            " left alone."
        ),
    ] = None,
    control_scheme: Annotated[
        str, typer.Option(help="How calls are signed: request, or body for servers from before.")
    ] = "request",
    weights_tag: Annotated[
        list[str] | None,
        typer.Option(help="What weights are in the engine's own tags. Repeatable."),
    ] = None,
    only_way_in: Annotated[
        bool,
        typer.Option(
            "--only-way-in",
            help="Nobody reaches the server but through this sidecar, so that it can pause.",
        ),
    ] = False,
) -> None:
    """Administer a TensorRT-LLM server from beside it: http://host:port, started with
    --enable_sleep_mode, or grpc://host:port, started with --grpc --grpc-protocol openengine."""

    def native() -> NativeDialect:
        from app.sidecars.native.dialect import NativeDialect

        if control_key_file is not None or weights_tag:
            raise usage("--control-key-file and --weights-tag are for servers at http://")
        return NativeDialect(name="trtllm", only_way=only_way_in)

    def dialect() -> TrtllmDialect:
        from app.sidecars.trtllm.dialect import TrtllmDialect
        from app.sidecars.trtllm.memory import TAGS, WEIGHT_TAGS, TagMap
        from app.sidecars.trtllm.signing import Scheme, Signer

        tags = tuple(weights_tag or WEIGHT_TAGS)
        if unknown := sorted({*tags} - (TAGS - {"kv_cache"})):
            raise usage(f"--weights-tag: {unknown[0]} is no tag of weights")
        if control_scheme not in set(Scheme):
            raise usage("--control-scheme is request or body")
        key = key_in(control_key_file)
        try:
            signer = None if key is None else Signer(key, Scheme(control_scheme))
        except ValueError as error:
            raise usage(f"{control_key_file}: {error}") from error
        return TrtllmDialect(signer=signer, tags=TagMap(tags), only_way=only_way_in)

    for named, given in (
        ("--weights-root", common.weights_root),
        ("--lora-root", common.lora_root),
        ("--rendezvous-allow", common.rendezvous_allow),
    ):
        if given:
            raise usage(f"{named}: a TensorRT-LLM server takes neither weights nor adapters")
    grpc = common.url.startswith("grpc:")
    serve(common, native if grpc else dialect, schemes=("http", "https", "grpc"))


@app.command()
@with_common
def dynamo(
    common: Common,
    worker: Annotated[
        str | None,
        typer.Option(help="vllm, vllm-sidecar, sglang or trtllm, where the worker does not tell."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Its model's name, where the worker does not tell.")
    ] = None,
    model_path: Annotated[
        Path | None,
        typer.Option(help="The checkpoint that it was started with: new weights have to fit it."),
    ] = None,
) -> None:
    """Administer a worker of Dynamo over its system server (DYN_SYSTEM_PORT), from beside it."""

    def dialect() -> DynamoDialect:
        from app.sidecars.dynamo.dialect import DynamoDialect
        from app.sidecars.dynamo.workers import WorkerKind

        try:
            kind = None if worker is None else WorkerKind(worker)
        except ValueError:
            raise usage(f"--worker is one of {', '.join(WorkerKind)}") from None
        if model_path is not None and not model_path.is_dir():
            raise usage(f"there is no directory at {model_path}")
        return DynamoDialect(kind=kind, model=model, model_path=model_path)

    serve(common, dialect)
