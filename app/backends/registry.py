"""The way to each registered engine: one backend per registration, replaced when that changes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial

from app.backends.channels import Line, Resolve, resolve
from app.backends.core_control import CoreControl
from app.backends.credentials import Credential, Credentials
from app.backends.endpoint import Endpoint
from app.backends.kept_states import KeptStates
from app.backends.openengine import OpenEngineBackend
from app.backends.port import EngineBackend
from app.backends.reach import ReachPolicy
from app.backends.streams import StreamLimits
from app.backends.vllm.backend import VllmBackend
from app.backends.vllm.members import Crew, Seat
from app.backends.watched import CallWatcher
from app.clock import Clock
from app.domain.engine import Dialect, Member, Registration, TlsNames
from app.domain.errors import FieldFault, InvalidArgument, UnsupportedDialect

_DEFAULT_LIMITS = StreamLimits()


def _span_id() -> str:
    return secrets.token_hex(8)


class Backends:
    """Belongs to one event loop; connects at the first call, not here."""

    def __init__(
        self,
        reach: ReachPolicy,
        credentials: Credentials,
        clock: Clock,
        *,
        kept: KeptStates | None = None,
        limits: StreamLimits = _DEFAULT_LIMITS,
        resolver: Resolve = resolve,
        span_id: Callable[[], str] = _span_id,
        watcher: CallWatcher | None = None,
    ) -> None:
        """`kept`: where is kept what engines of dialect `vllm` do not keep, and those that have no
        admin service; None: nowhere, so that there are none of that dialect. `watcher`: of all
        calls."""
        self._watcher = watcher
        self._reach = reach
        self._credentials = credentials
        self._clock = clock
        self._kept = kept
        self._limits = limits
        self._resolver = resolver
        self._span_id = span_id
        self._open: dict[str, tuple[Registration, EngineBackend]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def check(self, dialect: Dialect, members: tuple[Member, ...], tls: TlsNames) -> Credential:
        """Judge a registration before it is kept; what it connects to is judged again each time.

        Raises UnsupportedDialect, InvalidArgument (OutOfReach among them) with the field named.
        """
        if dialect is Dialect.VLLM and self._kept is None:
            raise UnsupportedDialect("engines of this dialect are not supported here")
        if dialect is Dialect.OPENENGINE and len(members) != 1:
            detail = "an openengine engine has one member, with one admin address for all ranks"
            raise InvalidArgument(detail, faults=(FieldFault("/members", detail),))
        ranks = sorted(member.rank for member in members)
        if dialect is Dialect.VLLM and ranks != list(range(len(members))):
            detail = "the members of an engine have the ranks 0, 1, 2 …"
            raise InvalidArgument(detail, faults=(FieldFault("/members", detail),))
        if len({member.admin for member in members}) != len(members):
            detail = "each member of an engine has an address of its own"
            raise InvalidArgument(detail, faults=(FieldFault("/members", detail),))
        addresses = tuple(
            (f"/members/{place}/{name}", address)
            for place, member in enumerate(members)
            for name, address in (("admin", member.admin), ("control", member.control))
        )
        credential = self._credentials.of(
            tls.credential, tls.server_name, tuple(address for _, address in addresses)
        )
        for pointer, address in addresses:
            try:
                self._reach.check(address, encrypted=credential.encrypted)
            except InvalidArgument as refused:
                refused.faults = (FieldFault(pointer, refused.message),)
                raise
        return credential

    def of(self, registration: Registration) -> EngineBackend:
        """The same one as long as the registration has the same generation. Raises as `check`:
        the settings may have changed since it was registered."""
        known = self._open.get(registration.id)
        if known is not None:
            if known[0].generation == registration.generation:
                return known[1]
            self.forget(registration.id)
        credential = self.check(registration.dialect, registration.members, registration.tls)
        backend = self._make(registration, credential)
        self._open[registration.id] = (registration, backend)
        return backend

    def forget(self, engine_id: str) -> None:
        """It was removed, or changed: its connections are given back."""
        known = self._open.pop(engine_id, None)
        if known is not None:
            closing = asyncio.get_running_loop().create_task(known[1].close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for engine_id in list(self._open):
            self.forget(engine_id)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._credentials.close()

    def _make(self, registration: Registration, credential: Credential) -> EngineBackend:
        members = sorted(registration.members, key=lambda member: member.rank)
        if registration.dialect is Dialect.VLLM:
            assert self._kept is not None  # or `check` had refused it
            crew = Crew([self._seat(member, registration, credential) for member in members])
            return VllmBackend(registration.id, crew, self._kept, self._clock, limits=self._limits)
        admin, control = (
            self._endpoint(address, registration, credential)
            for address in (members[0].admin, members[0].control)
        )
        return OpenEngineBackend(
            admin,
            control,
            self._clock,
            core=CoreControl(control, registration.id, self._kept),
            limits=self._limits,
        )

    def _seat(self, member: Member, registration: Registration, credential: Credential) -> Seat:
        orders = self._endpoint(member.admin, registration, credential)
        if member.control == member.admin:
            return Seat(member.rank, orders, orders)
        return Seat(member.rank, orders, self._endpoint(member.control, registration, credential))

    def _endpoint(
        self, address: str, registration: Registration, credential: Credential
    ) -> Endpoint:
        parsed = self._reach.check(address, encrypted=credential.encrypted)
        begin = None
        if self._watcher is not None:
            begin = partial(self._watcher.begin, registration.dialect.value, registration.id)
        line = Line(parsed, self._reach, credential, resolver=self._resolver, begin=begin)
        return Endpoint(line, credential.bearer, self._span_id)
