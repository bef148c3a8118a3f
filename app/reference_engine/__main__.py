"""``python -m app.reference_engine``: serve one engine until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from app.auth.tokens.issuers import TokenProfile
from app.domain.kinds import EngineRole
from app.reference_engine.errors import ReferenceEngineError
from app.reference_engine.handoff import HandoffSettings
from app.reference_engine.limits import DEVICES, CoreSettings
from app.reference_engine.profile_shelf import ProfileLimits
from app.reference_engine.rendezvous import RendezvousRule
from app.reference_engine.serving import EngineSettings, ServedEngine, TokenSettings, run_engine

_ROLES = (EngineRole.AGGREGATED, EngineRole.PREFILL, EngineRole.DECODE)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m app.reference_engine",
        description="Serve a Llama checkpoint with OpenEngine's inference and admin services.",
    )
    usual = CoreSettings()
    add = parser.add_argument
    add("--data-dir", type=Path, required=True, help="operation store and the small checkpoint")
    add("--model", type=Path, help="Hugging Face checkpoint; a small one is made without it")
    add("--model-name", help="served under this name; default: the checkpoint folder's")
    add("--weight-version", help="what the weights are called; default: not declared")
    add(
        "--weights-root",
        type=Path,
        action="append",
        default=[],
        help="updates may read files below it; repeatable",
    )
    add(
        "--rendezvous-allow",
        action="append",
        default=[],
        metavar="HOST:PORT[-PORT]",
        help="updates may meet trainers there; repeatable",
    )
    add("--profile-root", type=Path, help="where profiles are kept; default: in the data dir")
    shelf = ProfileLimits()
    add("--profile-count", type=int, default=shelf.count, help="kept; the oldest go first")
    add("--profile-bytes", type=int, default=shelf.size_bytes, help="of all that are kept")
    add(
        "--lora-root",
        type=Path,
        action="append",
        default=[],
        help="adapters may be loaded from below it; repeatable",
    )
    add("--max-loras", type=int, default=8, help="adapters that are loaded at once")
    add("--seed", type=int, default=0, help="decides the weights of the small checkpoint")
    add(
        "--next-weights",
        type=Path,
        help="also make a second small checkpoint below this folder, to update to",
    )
    add("--inference-address", default="127.0.0.1:0", help="host:port or unix:/path")
    add("--admin-address", default="127.0.0.1:0", help="host:port or unix:/path")
    add("--vllm-control", help="serve vllm.Control there too: host:port or unix:/path")
    add("--issuer", help="whose tokens are taken, with both audiences")
    add("--inference-audience")
    add("--admin-audience")
    add("--jwks-uri", help="default: what the issuer's discovery says")
    add("--token-profile", type=TokenProfile, choices=list(TokenProfile), default="strict")
    add("--insecure-loopback", action="store_true", help="serve local addresses without tokens")
    add("--reflection", action="store_true")
    add("--block-size", type=int, default=usual.block_size, help="tokens per KV block")
    add("--kv-blocks", type=int, help="default: enough for one longest request, or 16384 tokens")
    add("--max-model-len", type=int, help="prompt and output, tokens; default: the checkpoint's")
    add("--max-running", type=int, default=usual.max_running)
    add("--max-waiting", type=int, default=usual.max_waiting)
    add("--max-batched-tokens", type=int, default=usual.max_batched_tokens)
    add("--step-delay-ms", type=int, default=0, help="slept after each step, to be watched")
    add("--torch-threads", type=int, help="default: 1 for small models, else torch's own choice")
    add("--tensor-parallel-size", type=int, default=1, help="ranks that divide the model")
    add("--rank-timeout-s", type=float, default=10.0, help="silent for so long, a rank is lost")
    add("--role", type=EngineRole, choices=_ROLES, default="aggregated")
    add(
        "--kv-address",
        default="127.0.0.1:0",
        help="host:port to fetch KV from",
    )
    add("--kv-peer", action="append", default=[], help="KV is fetched from it; repeatable")
    add("--kv-lease-s", type=float, default=60.0, help="how long KV is held that nobody fetches")
    add("--kv-beyond-loopback", action="store_true", help="KV may leave this machine, unencrypted")
    add("--device", choices=DEVICES, default="auto", help="auto: CUDA where there is enough of it")
    add("--stop-grace-s", type=float, default=5.0, help="how long SIGTERM lets requests go on")
    add("--traces", help="send spans there: an OTLP endpoint, or otel for what OTEL_… says")
    add("--ready-file", type=Path, help="JSON, written once the engine answers")
    return parser


def settings_of(given: argparse.Namespace) -> EngineSettings:
    """Raises ValueError for values that contradict each other."""
    core = {field.name: getattr(given, field.name) for field in dataclasses.fields(CoreSettings)}
    return EngineSettings(
        data_dir=given.data_dir,
        checkpoint=given.model,
        seed=given.seed,
        next_weights=given.next_weights,
        model_name=given.model_name,
        weight_version=given.weight_version,
        weights_roots=tuple(given.weights_root),
        rendezvous_rules=tuple(map(RendezvousRule.parse, given.rendezvous_allow)),
        profile_root=given.profile_root,
        profile_limits=ProfileLimits(count=given.profile_count, size_bytes=given.profile_bytes),
        lora_roots=tuple(given.lora_root),
        max_loras=given.max_loras,
        inference_address=given.inference_address,
        admin_address=given.admin_address,
        vllm_control_address=given.vllm_control,
        tokens=_tokens(given),
        insecure_loopback=given.insecure_loopback,
        reflection=given.reflection,
        core=CoreSettings(**core),
        rank_timeout_s=given.rank_timeout_s,
        role=given.role,
        handoff=HandoffSettings(
            address=given.kv_address,
            peers=tuple(given.kv_peer),
            lease_s=given.kv_lease_s,
            beyond_loopback=given.kv_beyond_loopback,
        ),
        stop_grace_s=given.stop_grace_s,
        traces=given.traces,
    )


def _tokens(given: argparse.Namespace) -> TokenSettings | None:
    named = (given.issuer, given.inference_audience, given.admin_audience)
    if not any(named):
        return None
    if not all(named):
        raise ValueError("--issuer, --inference-audience and --admin-audience go together")
    return TokenSettings(
        issuer=given.issuer,
        inference_audience=given.inference_audience,
        admin_audience=given.admin_audience,
        jwks_uri=given.jwks_uri,
        profile=given.token_profile,
    )


def write_ready_file(path: Path, engine: ServedEngine) -> None:
    """The whole file or none: whoever waits for it may read it as soon as it is there."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(dataclasses.asdict(engine), indent=2) + "\n", encoding="utf-8")
    aside.replace(path)


def main() -> int:
    parser = arguments()
    given = parser.parse_args()
    try:
        settings = settings_of(given)
    except ValueError as error:
        parser.error(str(error))

    def ready(engine: ServedEngine) -> None:
        print(
            f"{engine.model_name}: inference {engine.inference_address},"
            f" admin {engine.admin_address}",
            flush=True,
        )
        if given.ready_file is not None:
            write_ready_file(given.ready_file, engine)

    try:
        run_engine(settings, ready)
    except ReferenceEngineError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
