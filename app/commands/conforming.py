"""`chadburn conformance`: try anyone's engine against the contract of OpenEngineAdmin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.printing import note, show
from app.commands.target import plain

if TYPE_CHECKING:
    from app.conformance.connection import Tls
    from app.conformance.report import Finding


def conformance(
    target: Annotated[
        str | None, typer.Argument(help="The engine's admin listener: host:port or unix:/path.")
    ] = None,
    inference: Annotated[
        str | None,
        typer.Option(help="Its inference listener: also see what happens to requests."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="CHADBURN_CONFORMANCE_TOKEN",
            help="Bearer token for the admin listener. Others can read a process's arguments.",
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="The same, from a file.")] = None,
    inference_token: Annotated[
        str | None,
        typer.Option(
            envvar="CHADBURN_CONFORMANCE_INFERENCE_TOKEN", help="For the inference listener."
        ),
    ] = None,
    inference_token_file: Annotated[
        Path | None, typer.Option(help="The same, from a file.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="TLS; trusts this machine's authorities.")
    ] = False,
    tls_ca: Annotated[Path | None, typer.Option(help="PEM file; trust this instead.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file shown to it.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its private key.")] = None,
    tls_name: Annotated[
        str | None, typer.Option(help="Name in its certificate, if not the address's.")
    ] = None,
    fault_hook: Annotated[
        str | None,
        typer.Option(help="Command for kill-rank N, stop-rank N, restart; else nothing is broken."),
    ] = None,
    destructive: Annotated[
        bool, typer.Option("--destructive", help="Also abort all, release, update, reconfigure.")
    ] = False,
    weights: Annotated[
        str | None, typer.Option(help="Weights that the engine can load, as its host sees them.")
    ] = None,
    weights_copy: Annotated[
        Path | None,
        typer.Option(help="The same weights here; default: --weights, where it can be read here."),
    ] = None,
    lora: Annotated[
        str | None, typer.Option(help="An adapter that the engine can load, the same way.")
    ] = None,
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder below the engine's allowed roots, for damaged weights."),
    ] = None,
    shared_memory_prefix: Annotated[
        str | None,
        typer.Option(help="Of the engine's segments, for weights in this machine's memory."),
    ] = None,
    refused_token: Annotated[
        list[str] | None,
        typer.Option(help="WHAT=FILE: a token that must not be taken; may be repeated."),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Only these; `retry.*` works; may be repeated.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0.1, help="Seconds in which an engine has to answer or to end.")
    ] = 60.0,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds that an engine which starts has to listen in.")
    ] = 10.0,
    time_limit: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds for all cases; bringing the engine back comes on top."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail also if something was not proven.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit file here.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON on stdout, and nothing else there.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="Only tell the cases, with what each checks.")
    ] = False,
) -> None:
    """Try an engine that nobody uses: it is paused and resumed, and left as it was found.

    Ends with 0 only if nothing failed; says what was not proven, and why.
    """
    # Each restart of the engine would be a line of grpc's own on stderr. Read when it is loaded.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # It takes a while to load, and the other verbs do without it.
    from app.conformance.catalogue import catalogue, chosen
    from app.conformance.connection import Listener
    from app.conformance.hook import CommandHook
    from app.conformance.page import listing
    from app.conformance.placing import Places
    from app.conformance.report import Report, document, line, summary
    from app.conformance.report import junit as junit_of
    from app.conformance.suite import run
    from app.conformance.trial import Options, TargetRefused

    try:
        cases = chosen(catalogue(), case or ())
        if list_:
            _list(cases, listing(cases), as_json)
            return
        if target is None:
            raise usage("name the engine's admin listener: host:port or unix:/path")
        trust = _tls(tls, tls_ca, tls_certificate, tls_key, tls_name)
        bearer = _token(token, token_file)
        options = Options(
            admin=Listener(address=target, token=bearer, tls=trust),
            inference=None
            if inference is None
            else Listener(
                address=inference,
                token=_token(inference_token, inference_token_file),
                tls=trust,
            ),
            hook=CommandHook(fault_hook) if fault_hook is not None else None,
            destructive=destructive,
            weights=weights,
            weights_copy=_copy(weights, weights_copy),
            lora=lora,
            places=Places(scratch=_folder(scratch), shared_prefix=shared_memory_prefix),
            refused_tokens=tuple(_labelled(one) for one in refused_token or ()),
            patience_s=patience,
            time_limit_s=time_limit,
            wait_s=wait,
        )
    except ValueError as error:
        raise usage(str(error)) from error

    heard: list[Finding] = []

    def told(finding: Finding) -> None:
        heard.append(finding)
        if not as_json:
            print(line(finding), flush=True)

    try:
        report = run(cases, options, told)
    except TargetRefused as refused:
        raise CommandFailed(
            Exit.REFUSED if refused.answered else Exit.UNREACHABLE, f"{target}: {refused}"
        ) from refused
    except KeyboardInterrupt:
        note(f"chadburn: interrupted after {len(heard)} of {len(cases)} cases")
        if junit is not None:
            _write(junit, junit_of(Report(target=target, findings=tuple(heard))))
        raise
    if junit is not None:
        _write(junit, junit_of(report))
    if as_json:
        show(document(report))
    else:
        print(f"\n{summary(report)}")
    proven = not (strict and report.not_proven)
    raise typer.Exit(Exit.OK if report.passed and proven else Exit.FAILED)


def _list(cases: tuple[Any, ...], text: str, as_json: bool) -> None:
    if as_json:
        show({"cases": [{"id": one.id, "sentence": one.sentence} for one in cases]})
    else:
        print(text)


def _token(given: str | None, file: Path | None) -> str | None:
    if given is not None and file is not None:
        raise usage("give a token or a file with one, not both")
    if file is not None:
        given = _read(file).decode("ascii", "replace").strip()
    return None if given is None else plain(given)


def _labelled(given: str) -> tuple[str, str]:
    label, equals, file = given.partition("=")
    if not (label and equals and file):
        raise usage("--refused-token takes WHAT=FILE")
    token = _token(None, Path(file))
    assert token is not None
    return label, token


def _copy(weights: str | None, copy: Path | None) -> Path | None:
    if copy is not None and not copy.exists():
        raise usage(f"{copy} is not there")
    if copy is None and weights is not None and Path(weights).exists():
        return Path(weights)
    return copy


def _folder(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise usage(f"{path} is no folder")
    # The engine is told of it by name, and need not have been started where this command was.
    return None if path is None else path.resolve()


def _tls(
    wanted: bool, ca: Path | None, certificate: Path | None, key: Path | None, name: str | None
) -> Tls | None:
    from app.conformance.connection import Tls

    if not (wanted or ca or certificate or key or name):
        return None
    if bool(certificate) != bool(key):
        raise usage("--tls-certificate and --tls-key go together")
    return Tls(
        ca=None if ca is None else _read(ca),
        certificate=None if certificate is None else _read(certificate),
        key=None if key is None else _read(key),
        name=name,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise usage(f"{path} cannot be read: {error.strerror}") from error


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        note(f"chadburn: {path} cannot be written: {error.strerror}")
