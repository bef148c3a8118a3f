"""The composition root: the one module that knows all the others.

`create_app` makes the application, `serve` runs it as a process. Everything is opened in the
lifespan and given back there in the opposite order, so that two applications share nothing.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2
from fastapi import FastAPI
from prometheus_client import start_http_server

from app.auth.identities.known import Identities
from app.auth.requires import Gate
from app.auth.sessions.house import open_house
from app.auth.tokens.issuers import DpopUse
from app.auth.tokens.nonces import Nonces
from app.auth.tokens.verifier import TokenVerifier
from app.backends.credentials import Credentials
from app.backends.registry import Backends
from app.clock import Clock, IdSource, SystemClock, uuid7
from app.domain.engine import Registration
from app.domain.events import TERMINAL_EVENTS
from app.edges import edge_of, exposures_of, hosts_of, selector_of
from app.finding import finding_of, sources_of
from app.http.allowances import Allowances
from app.http.api import OF_THE_KIND, ApiSettings, build_api
from app.http.closing import Closing
from app.http.listening import Listening, ListenRefused, bound_at, listening
from app.http.payloads import PayloadRule
from app.http.policing import follow_policy
from app.http.records import record_refused_callers
from app.http.rooms import OpenStreams, Rooms
from app.http.roster import Roster
from app.http.route import EdgeRoute, declaration_of, refuse_undeclared
from app.http.routers.identity import metadata_url
from app.http.server import GatewayServer
from app.http.tail import Tail
from app.http.waiting import Waiting
from app.ledger.ledger import Ledger
from app.ledger.values import EngineFilter, StoredEvent
from app.observability.calls import EngineCalls
from app.observability.log import configure_logging, logger
from app.observability.metrics import Metrics
from app.observability.refused_callers import RefusedCallers
from app.observability.spans import NO_TRACING, Tracing
from app.observability.traces import TracesRefused, opened_traces, sends_traces
from app.operations.artifacts import Artifacts
from app.operations.deadlines import Deadlines
from app.operations.fleet import Fleet
from app.operations.freezing import Freezes
from app.operations.groups import Groups
from app.operations.orders import Orders
from app.operations.pace import Pace
from app.operations.profiles import Profiles
from app.operations.retention import forget_sessions, keep_proofs_short, keep_within
from app.operations.round_trips import RoundTrips
from app.operations.runner import Runner
from app.operations.sealing import Sealer
from app.operations.sessions import Sessions
from app.operations.settling import Settlements
from app.operations.watched import Watched
from app.posture import DOES_NOT_START, Posture, Remark, RouteNeed, posture_of
from app.settings import Settings
from app.startup import (
    EXIT_ADDRESS,
    EXIT_SETTINGS,
    StartupRefused,
    checked,
    identities_of,
    opened_ledger,
    prepare_data_dir,
    retention_of,
)

_HOUSEKEEPING_S = 5.0
_KEY_FETCH_TIMEOUT_S = 5.0
_ENGINES_AT_MOST = 1_000
_log = logger("chadburn.main")


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """What a test puts between the gateway and its ledger and engines, to end the process at a
    named point of an order's course. No setting leads here: what is served has nothing between.
    `pace` None: as the settings say.
    """

    ledger: Callable[[Ledger], Ledger] = lambda ledger: ledger
    backends: Callable[[Backends], Backends] = lambda backends: backends
    pace: Pace | None = None


_NOTHING_BETWEEN = Between()


def create_app(
    settings: Settings,
    *,
    clock: Clock | None = None,
    new_id: IdSource = uuid7,
    closing: Closing | None = None,
    between: Between = _NOTHING_BETWEEN,
) -> FastAPI:
    """The whole gateway. Its lifespan raises StartupRefused when it cannot begin.

    `closing`: set by whoever runs the server, before connections are asked to close, so that
    streams end with a farewell; without one they end when the server lets go of them.
    """
    clock = clock or SystemClock()
    closing = closing or Closing()
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        refuse_undeclared(app)  # also what was added after `build_api`
        routes = tuple(_needs_of(app))
        async with _opened(settings, clock, new_id, closing, metrics, between, routes) as state:
            yield state

    return build_api(
        ApiSettings(
            allowed_hosts=hosts_of(settings),
            max_body_bytes=settings.max_body_bytes,
            max_update_bytes=settings.max_update_bytes,
            max_bodies_bytes=settings.max_bodies_bytes,
            max_concurrent_requests=settings.max_concurrent_requests,
            max_concurrent_changes=settings.max_concurrent_changes,
            receive_timeout_s=settings.receive_timeout_s,
            trusted_proxies=settings.trusted_proxies,
            https=settings.base_url.startswith("https:"),
            compat=frozenset(one.layer for one in settings.compat),
        ),
        metrics=metrics,
        lifespan=lifespan,
        new_id=new_id,
        new_trace_id=lambda: secrets.token_hex(16),
    )


def posture_at(settings: Settings, engines: Iterable[Registration] | None = None) -> Posture:
    """What a gateway with these settings would be open to. Starts nothing; reads the files that the
    settings name."""
    found = posture_of(settings, _needs_of(create_app(settings)), engines)
    try:
        checked(settings)
        sources_of(settings)
    except StartupRefused as refused:
        remark = Remark(DOES_NOT_START, "settings", refused.line)
        return replace(found, warnings=(remark, *found.warnings))
    return found


def serve(settings: Settings, *, ready: Callable[[str], None] | None = None) -> int:
    """Run until SIGTERM or SIGINT; the exit code. `ready` is told the address once it answers.

    A start that is refused is one line on standard error and an exit code of its own (see
    `app.startup`). The end takes at most about twice `shutdown_grace_s`.
    """
    configure_logging(settings.log_level, settings.log_format)
    try:
        with (
            bound_at(settings.host, settings.port) as listener,
            listening(identities_of(settings)) as others,
        ):
            at = settings.model_copy(update={"port": listener.getsockname()[1]})
            asyncio.run(_serve(at, listener, others, ready or _print_address))
    except ListenRefused as refused:
        print(f"chadburn: {refused}", file=sys.stderr)
        return EXIT_ADDRESS
    except StartupRefused as refused:
        print(f"chadburn: {refused.line}", file=sys.stderr)
        return refused.exit_code
    return 0


async def _serve(
    settings: Settings,
    listener: socket.socket,
    others: Listening,
    ready: Callable[[str], None],
) -> None:
    closing = Closing()
    app = create_app(settings, closing=closing)
    server = GatewayServer(
        app,
        closing,
        grace_s=settings.shutdown_grace_s,
        keep_alive_s=settings.keep_alive_s,
        receive_timeout_s=settings.receive_timeout_s,
        send_timeout_s=settings.stream_send_timeout_s,
        max_connections=settings.max_connections,
        on_ready=lambda: ready(settings.base_url),
        tls=others.tls_listeners(),
    )
    await server.serve(sockets=[listener, *others.sockets])


def _print_address(url: str) -> None:
    print(f"chadburn: serving {url}", flush=True)


@asynccontextmanager
async def _opened(
    settings: Settings,
    clock: Clock,
    new_id: IdSource,
    closing: Closing,
    metrics: Metrics,
    between: Between,
    routes: tuple[RouteNeed, ...],
) -> AsyncIterator[dict[str, Any]]:
    # What can be wrong with the settings is found before anything is opened.
    meant = checked(settings)
    sources = sources_of(settings)
    issuers, policy, login = meant.issuers, meant.policy, meant.login
    prepare_data_dir(settings)
    async with AsyncExitStack() as held:
        # First, so that it ends last.
        tracing = _tracing_of(settings, held)
        ledger = await opened_ledger(settings, clock)
        held.push_async_callback(ledger.close)
        await _tell_posture(settings, ledger, routes)
        ledger = between.ledger(ledger)
        http = await held.enter_async_context(
            httpx2.AsyncClient(timeout=_KEY_FETCH_TIMEOUT_S, follow_redirects=False)
        )
        nonces = Nonces(meant.nonce_key or secrets.token_bytes(32), clock.now)
        verifier = TokenVerifier(
            issuers, http=http, now=clock.now, proofs=ledger.proofs, nonces=nonces
        )
        bound = any(issuer.dpop is not DpopUse.OFF for issuer in issuers)
        held.push_async_callback(verifier.aclose)
        house = None
        if login is not None:
            house = open_house(
                login,
                ledger=ledger,
                judge=verifier,
                http=http,
                clock=clock,
                random=secrets.token_bytes,
            )
            held.push_async_callback(house.aclose, settings.shutdown_grace_s)
        backends = between.backends(
            Backends(
                meant.reach,
                Credentials(meant.credentials, clock),
                clock,
                kept=ledger.kept_states,
                watcher=EngineCalls(metrics, tracing),
            )
        )
        # For people who look who drives an engine; the id is what tells one life from another.
        owner = f"{socket.gethostname()}:{os.getpid()}:{new_id()}"
        fleet, runner, orders, sessions = _use_cases(
            settings,
            ledger,
            backends,
            clock,
            new_id,
            owner,
            meant.deadlines,
            between.pace,
            Watched(metrics, tracing),
        )
        finding = finding_of(sources, ledger, fleet, clock, owner, metrics)
        sealer = Sealer(ledger, owner, settings.audit_seal_s)
        tail = Tail(ledger, on_event=_counting(ledger, metrics))
        closing.tell(tail.wake)
        rooms = Rooms(
            ledger=ledger,
            fleet=fleet,
            orders=orders,
            profiles=Profiles(ledger, fleet, clock, Artifacts(settings.profile_roots)),
            sessions=sessions,
            settlements=Settlements(ledger, runner, clock),
            freezes=Freezes(ledger, fleet, clock),
            groups=Groups(ledger, fleet, clock),
            clock=clock,
            new_id=new_id,
            tail=tail,
            metrics=metrics,
            refused_callers=RefusedCallers(),
            edge=edge_of(settings),
            closing=closing,
            streams=OpenStreams(settings.max_streams, settings.max_streams_per_caller),
            waiting=Waiting(settings.max_waiting),
            round_trips=RoundTrips(
                most=settings.max_engine_reads, most_of_engine=settings.max_reads_per_engine
            ),
            allowances=Allowances(
                refusals_per_minute=settings.max_refusals_per_minute,
                changes_per_s=settings.max_changes_per_s,
                changes_per_s_of_address=settings.max_changes_per_s_of_address,
            ),
            issuer_states=verifier.issuer_states,
            policy_ok=lambda: policy.ok,
            finding_ok=lambda: finding.ok,
            roster=Roster(ledger),
            exposures=exposures_of(settings),
            payloads=PayloadRule(tuple(map(selector_of, settings.engine_payloads))),
            logins=None if house is None else house.logins,
            browser_sessions=None if house is None else house.desk,
        )
        # After all that is still written down.
        held.push_async_callback(sealer.stop)
        await tail.start()
        held.push_async_callback(tail.stop)
        await fleet.start()
        held.push_async_callback(fleet.stop)
        await runner.start()
        held.push_async_callback(runner.stop, settings.shutdown_grace_s)
        held.push_async_callback(_write_refused_callers, rooms, settings.shutdown_grace_s)
        pruning = keep_within(ledger, clock, retention_of(settings))
        proofs = keep_proofs_short(ledger, in_use=bound or login is not None)
        sessions_kept = forget_sessions(ledger)
        following = follow_policy(policy, rooms, gateway=owner)
        keys = verifier.keep_ready()
        held.push_async_callback(finding.stop)
        looks = (
            finding.run(),
            _housekeeping(rooms),
            pruning,
            proofs,
            sessions_kept,
            following,
            sealer.run(),
            keys,
        )
        for background in looks:
            held.push_async_callback(_ended, asyncio.create_task(background))
        if settings.metrics_port is not None:
            held.callback(_exposed(settings.metrics_host, settings.metrics_port, metrics))
        held.callback(closing.set)
        yield {
            "rooms": rooms,
            "gate": Gate(
                verifier,
                settings.read_only,
                settings.clients_may_settle,
                policy,
                dpop_at=settings.base_url if bound else None,
                sessions=None if house is None else house.desk,
                identities=Identities(meant.identities, clock) if meant.identities else None,
            ),
            "resource_metadata": metadata_url(settings.base_url),
            "tracing": tracing,
        }


def _tracing_of(settings: Settings, held: AsyncExitStack) -> Tracing:
    """Raises StartupRefused."""
    if settings.traces is None or not sends_traces(settings.traces):
        return NO_TRACING
    try:
        tracing = opened_traces(settings.traces, "chadburn-gateway")
    except TracesRefused as refused:
        raise StartupRefused(str(refused), EXIT_SETTINGS) from refused
    held.push_async_callback(tracing.close, settings.shutdown_grace_s)
    return tracing


async def _tell_posture(settings: Settings, ledger: Ledger, routes: tuple[RouteNeed, ...]) -> None:
    engines = (await ledger.engines.page(EngineFilter(), None, _ENGINES_AT_MOST)).items
    found = posture_of(settings, routes, [engine.registration for engine in engines])
    for remark in found.warnings:
        _log.warning("posture", code=remark.code, about=remark.about, why=remark.message)


def _needs_of(app: FastAPI) -> Iterator[RouteNeed]:
    for route in app.routes:
        assert isinstance(route, EdgeRoute)  # or `refuse_undeclared` would have refused it
        declared = declaration_of(route)
        need = None if declared is None else declared.need
        scopes = None if need is None else tuple(scope.value for scope in need.scopes)
        for method in sorted(route.methods or ()):
            yield RouteNeed(
                method,
                route.path,
                scopes,
                person=need is not None and need.person,
                of_kind=route.name in OF_THE_KIND,
            )


def _exposed(host: str, port: int, metrics: Metrics) -> Callable[[], None]:
    """Open the listener for figures alone; what is given closes it. Raises StartupRefused."""
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else "no such address"
        line = f"cannot listen on {host}:{port} for metrics: {why}"
        raise StartupRefused(line, EXIT_ADDRESS) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return close


def _use_cases(
    settings: Settings,
    ledger: Ledger,
    backends: Backends,
    clock: Clock,
    new_id: IdSource,
    owner: str,
    deadlines: Deadlines,
    pace: Pace | None,
    watched: Watched,
) -> tuple[Fleet, Runner, Orders, Sessions]:
    fleet = Fleet(ledger, backends, clock, observe_interval_s=settings.observe_interval_s)
    runner = Runner(
        ledger,
        fleet,
        clock,
        owner=owner,
        pace=pace or Pace(lease_ttl_s=settings.lease_s),
        watched=watched,
    )
    orders = Orders(
        ledger,
        fleet,
        runner,
        clock,
        new_id,
        deadlines=deadlines,
        key_retention_s=settings.key_retention_hours * 3600.0,
        queue_limit=settings.max_queued_orders,
        max_open=settings.max_open_operations,
        watched=watched,
    )
    sessions = Sessions(
        ledger, fleet, runner, clock, key_retention_s=settings.key_retention_hours * 3600.0
    )
    return fleet, runner, orders, sessions


def _counting(ledger: Ledger, metrics: Metrics) -> Callable[[StoredEvent], Any]:
    async def count(stored: StoredEvent) -> None:
        if stored.event.type in TERMINAL_EVENTS:
            operation = await ledger.operations.get(stored.event.operation_id)
            if operation is not None:
                metrics.operation_ended(operation)

    return count


async def _housekeeping(rooms: Rooms) -> None:
    while True:
        await asyncio.sleep(_HOUSEKEEPING_S)
        try:
            await record_refused_callers(
                rooms.ledger, rooms.refused_callers, rooms.clock, all_of_them=False
            )
        except Exception as error:
            # It is tried again; nothing else may end for it.
            _log.warning("housekeeping_interrupted", exc_info=error)


async def _write_refused_callers(rooms: Rooms, within_s: float) -> None:
    """A database that says nothing any more must not keep the process from its end."""
    try:
        async with asyncio.timeout(within_s):
            await record_refused_callers(
                rooms.ledger, rooms.refused_callers, rooms.clock, all_of_them=True
            )
    except TimeoutError:
        _log.warning("refused_callers_not_written")


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
