"""The whole engine as a service: ranks, runtime, and the two listeners of the kit."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom

import httpx2

from app import __version__
from app.auth.tokens.issuers import IssuerConfig, IssuerConfigError, TokenProfile
from app.auth.tokens.verifier import TokenVerifier
from app.domain.kinds import EngineRole
from app.enginekit.runtime import RuntimeFault
from app.enginekit.server import (
    EngineServer,
    KitSettings,
    SettingsError,
    StoreInUse,
    StoreUnreadable,
    TlsFiles,
    random_id,
    utc_now,
)
from app.observability.spans import NO_TRACING, Tracing
from app.observability.traces import TracesRefused, opened_traces, sends_traces
from app.reference_engine.adapter_sources import AdapterPolicy
from app.reference_engine.engine import Engine
from app.reference_engine.errors import CannotServe
from app.reference_engine.first_start import find_or_make_tiny_checkpoints
from app.reference_engine.handoff import HandoffSettings
from app.reference_engine.intake import Intake
from app.reference_engine.limits import CoreSettings
from app.reference_engine.nursery import Nursery
from app.reference_engine.profile_shelf import ProfileLimits
from app.reference_engine.profiling import Profiling, opened_root
from app.reference_engine.recovery import Pace, Recovery
from app.reference_engine.rendezvous import RendezvousRule
from app.reference_engine.runtime import ReferenceRuntime
from app.reference_engine.segments import sweep
from app.reference_engine.sources import SourcePolicy

__all__ = [
    "TINY_MODEL_NAME",
    "EngineSettings",
    "Pace",
    "ServedEngine",
    "TlsFiles",
    "TokenProfile",
    "TokenSettings",
    "run_engine",
    "served",
]

TINY_MODEL_NAME = "tiny-llama"
_KEY_FETCH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """Whose tokens the listeners take. Each listener takes its own audience alone."""

    issuer: str
    inference_audience: str
    admin_audience: str
    jwks_uri: str | None = None
    profile: TokenProfile = TokenProfile.STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How to run an engine. Addresses are ``host:port`` (port 0: any free one) or ``unix:/path``.

    Without ``checkpoint`` a small one is made below ``data_dir`` at the first start; ``seed``
    decides its weights. Then another one for the same model is made below ``next_weights``, if that
    is said, so that there is something to update to. Updates may read files below
    ``weights_roots``, segments of shared memory whose names begin with ``shared_prefix``, and meet
    trainers where ``rendezvous_rules`` say; without any, none. Adapters
    lie below ``lora_roots``, and ``max_loras`` of them may be loaded at once. Without ``tokens``
    both listeners must be local and ``insecure_loopback`` be said. ``model_name`` None: the
    checkpoint folder's name, or TINY_MODEL_NAME. A rank is lost when its process ends, when it says
    nothing for ``rank_timeout_s``, when an order takes it longer than ``order_deadline_s`` or a
    step longer than ``step_deadline_s``; then all are started again, as ``recovery`` says. They
    come from ``nursery``, None: one of the engine's own. Profiles are kept in ``profile_root``,
    None: the folder ``profiles`` below ``data_dir``, as far as ``profile_limits`` allow. Spans of
    calls are sent where ``traces`` says: an OTLP endpoint, or ``otel`` for what the ``OTEL_…``
    variables say.
    """

    data_dir: Path
    checkpoint: Path | None = None
    seed: int = 0
    next_weights: Path | None = None
    model_name: str | None = None
    weight_version: str | None = None
    weights_roots: tuple[Path, ...] = ()
    shared_prefix: str = "chadburn-"
    rendezvous_rules: tuple[RendezvousRule, ...] = ()
    profile_root: Path | None = None
    profile_limits: ProfileLimits = field(default_factory=ProfileLimits)
    lora_roots: tuple[Path, ...] = ()
    max_loras: int = 8
    inference_address: str = "127.0.0.1:0"
    admin_address: str = "127.0.0.1:0"
    vllm_control_address: str | None = None
    tokens: TokenSettings | None = None
    inference_tls: TlsFiles | None = None
    admin_tls: TlsFiles | None = None
    insecure_loopback: bool = False
    plaintext_beyond_loopback: bool = False
    reflection: bool = False
    core: CoreSettings = field(default_factory=CoreSettings)
    role: EngineRole = EngineRole.AGGREGATED
    handoff: HandoffSettings = field(default_factory=HandoffSettings)
    startup_deadline_s: float = 300.0
    order_deadline_s: float = 60.0
    step_deadline_s: float = 60.0
    rank_timeout_s: float = 10.0
    recovery: Pace = field(default_factory=Pace)
    stop_grace_s: float = 5.0
    traces: str | None = None
    nursery: Nursery | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """An engine that answers. Addresses as bound, with their real ports. ``next_weights``: the
    folder of the second small checkpoint, where one was wanted."""

    inference_address: str
    admin_address: str
    instance_id: str
    model_name: str
    rank_pids: tuple[int, ...]
    next_weights: str | None = None
    vllm_control_address: str | None = None


def run_engine(
    settings: EngineSettings, ready: Callable[[ServedEngine], None] = lambda _served: None
) -> None:
    """Serve until SIGTERM or SIGINT, then stop in order; ``ready`` is called once it answers.

    Raises ReferenceEngineError with one line for its user when it can not be started.
    """
    asyncio.run(_run(settings, ready))


async def _run(settings: EngineSettings, ready: Callable[[ServedEngine], None]) -> None:
    life = asyncio.ensure_future(_live(settings, ready))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Also in the middle of the start, which is then undone. A second signal cuts the stop
        # short; the ranks end with this process in any case.
        loop.add_signal_handler(number, life.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await life


async def _live(settings: EngineSettings, ready: Callable[[ServedEngine], None]) -> None:
    async with served(settings) as engine:
        ready(engine)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def served(settings: EngineSettings) -> AsyncIterator[ServedEngine]:
    """A served engine for the time of the block. Raises ReferenceEngineError."""
    try:
        async with contextlib.AsyncExitStack() as stack:
            yield await _start(settings, stack)
    except (SettingsError, IssuerConfigError, StoreInUse, StoreUnreadable) as error:
        raise CannotServe(str(error)) from error


async def _start(settings: EngineSettings, stack: contextlib.AsyncExitStack) -> ServedEngine:
    verifier = await _verifier(settings.tokens, stack)
    # Before anything slow: settings that are not safe are refused at once.
    kit = KitSettings(
        data_dir=settings.data_dir,
        inference_address=settings.inference_address,
        admin_address=settings.admin_address,
        vllm_control_address=settings.vllm_control_address,
        inference_verifier=verifier,
        admin_verifier=verifier,
        inference_tls=settings.inference_tls,
        admin_tls=settings.admin_tls,
        insecure_loopback=settings.insecure_loopback,
        plaintext_beyond_loopback=settings.plaintext_beyond_loopback,
        reflection=settings.reflection,
    )
    # The folder that is filled at the start may be one of those below.
    if settings.next_weights is not None and settings.checkpoint is None:
        await asyncio.to_thread(_make, settings.next_weights, 0o777)
    for root in settings.weights_roots:
        if not await asyncio.to_thread(root.is_dir):
            raise CannotServe(f"no directory of weights at {root}")
    for root in settings.lora_roots:
        if not await asyncio.to_thread(root.is_dir):
            raise CannotServe(f"no directory of adapters at {root}")
    if settings.max_loras < 1:
        raise CannotServe("max_loras must be positive")
    sources = SourcePolicy(
        roots=settings.weights_roots,
        shared_prefix=settings.shared_prefix,
        rendezvous_rules=settings.rendezvous_rules,
    )
    await asyncio.to_thread(sweep, sources.shared_prefix, time.time())
    checkpoint, other = await _checkpoints(settings)
    engine = await Engine.start(
        checkpoint,
        settings.core,
        startup_deadline_s=settings.startup_deadline_s,
        order_deadline_s=settings.order_deadline_s,
        step_deadline_s=settings.step_deadline_s,
        rank_timeout_s=settings.rank_timeout_s,
        nursery=settings.nursery,
    )
    stack.push_async_callback(engine.close)
    name = settings.model_name or (checkpoint.name if settings.checkpoint else TINY_MODEL_NAME)
    root = stack.enter_context(opened_root(settings.profile_root or settings.data_dir / "profiles"))
    runtime = ReferenceRuntime(
        engine,
        Intake(
            tokenizer=engine.tokenizer,
            vocab_size=engine.config.vocab_size,
            max_model_len=engine.ready.max_model_len,
            draw_seed=lambda: SystemRandom().getrandbits(64),
        ),
        model_name=name,
        engine_version=__version__,
        weight_version=settings.weight_version,
        sources=sources,
        profiling=Profiling(
            engine,
            root,
            {"model": name, "engine_version": __version__},
            settings.profile_limits,
        ),
        adapters=AdapterPolicy(roots=settings.lora_roots, most=settings.max_loras),
        handoff=settings.handoff,
        role=settings.role,
    )
    try:
        tracing = _tracing(settings, stack)
    except TracesRefused as refused:
        await runtime.close()
        raise CannotServe(str(refused)) from refused
    server = EngineServer(runtime, kit, now=utc_now, new_id=random_id, tracing=tracing)
    try:
        await runtime.open()
        await server.start()
    except (OSError, RuntimeFault) as error:
        await runtime.close()
        raise CannotServe(str(error)) from error
    except BaseException:
        await runtime.close()
        raise
    stack.push_async_callback(server.stop, settings.stop_grace_s)
    # Ends before the server does: what stops is not started again.
    recovery = Recovery(engine, lambda: runtime.gate, settings.recovery)
    await stack.enter_async_context(_recovering(recovery))
    return ServedEngine(
        inference_address=server.inference_address,
        admin_address=server.admin_address,
        instance_id=server.instance_id,
        model_name=name,
        rank_pids=engine.pids,
        next_weights=None if other is None else str(other),
        vllm_control_address=server.vllm_control_address,
    )


def _tracing(settings: EngineSettings, stack: contextlib.AsyncExitStack) -> Tracing:
    """Raises TracesRefused. Only now, when the ranks are there: its thread is none of theirs."""
    if settings.traces is None or not sends_traces(settings.traces):
        return NO_TRACING
    tracing = opened_traces(settings.traces, "chadburn-engine")
    stack.push_async_callback(tracing.close, settings.stop_grace_s)
    return tracing


@contextlib.asynccontextmanager
async def _recovering(recovery: Recovery) -> AsyncIterator[None]:
    task = asyncio.create_task(recovery.run(), name="recovery")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _checkpoints(settings: EngineSettings) -> tuple[Path, Path | None]:
    """What to serve, and other weights for it."""
    if settings.checkpoint is not None:
        return settings.checkpoint, None
    await asyncio.to_thread(_make, settings.data_dir, 0o700)
    wanted = [(settings.data_dir / "models", settings.seed)]
    if settings.next_weights is not None:
        wanted.append((settings.next_weights, settings.seed + 1))
    found = await find_or_make_tiny_checkpoints(wanted, settings.startup_deadline_s)
    return found[0], found[1] if len(found) > 1 else None


def _make(folder: Path, mode: int) -> None:
    """Raises CannotServe."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise CannotServe(f"{folder}: {error.strerror}") from error


async def _verifier(
    tokens: TokenSettings | None, stack: contextlib.AsyncExitStack
) -> TokenVerifier | None:
    """One for both listeners: a token made for the other one is known, and refused as such."""
    if tokens is None:
        return None
    trusted = IssuerConfig(
        issuer=tokens.issuer,
        audience=tokens.admin_audience,
        inference_audiences=(tokens.inference_audience,),
        jwks_uri=tokens.jwks_uri,
        profile=tokens.profile,
    )
    http = await stack.enter_async_context(
        httpx2.AsyncClient(timeout=_KEY_FETCH_TIMEOUT_S, follow_redirects=False)
    )
    verifier = TokenVerifier([trusted], http=http, now=utc_now)
    stack.push_async_callback(verifier.aclose)
    return verifier
