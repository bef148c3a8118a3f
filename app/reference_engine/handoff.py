"""Prefill here and decode there: one engine computes a prompt, another goes on from its KV.

The prefill side holds the KV of each prompt as a session, for the time of a lease. The decode side
is given the session by its caller, fetches the KV from the other engine, and computes the last
token of the prompt and all that follows: the tokens are those that one engine alone would give.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from secrets import token_bytes

from app.domain.kinds import AbortOutcome
from app.reference_engine import messages as m
from app.reference_engine.engine import Engine
from app.reference_engine.errors import (
    InvalidRequest,
    KvSessionGone,
    KvTransferFailed,
    OrderRejected,
    Overloaded,
    RankLost,
)
from app.reference_engine.handoff_messages import CollectKv, KvSource, KvWritten
from app.reference_engine.kv_fetch import Claim, Fetched, FetchFailed, SessionGone, fetch
from app.reference_engine.kv_peers import PeerList, PeerRefused
from app.reference_engine.kv_reference import BACKEND, PROTOCOL, reference_of, secret_of
from app.reference_engine.kv_server import KvServer
from app.reference_engine.kv_sessions import KvSessions, SessionEnd
from app.reference_engine.kv_wire import (
    SCHEMA,
    Offer,
    Part,
    digest_of_model,
    digest_of_prompt,
    part_bytes,
)
from app.reference_engine.memory_file import MemoryFile
from app.reference_engine.responses import response_of, usage_of
from app.reference_engine.sharding import Layout
from app.rpc.openengine.v1 import generation_pb2, kv_pb2

_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """``address``: host:port (port 0: any free one) at which a prefill engine is asked for KV, as
    the others reach it. ``peers``: from whom a decode engine fetches, see `PeerList`. A session
    that nobody fetches ends after ``lease_s``; all sessions together hold ``max_held_bytes`` of
    host memory at most. Nothing of it is encrypted, so beyond this machine it has to be allowed by
    ``beyond_loopback``."""

    address: str = "127.0.0.1:0"
    peers: tuple[str, ...] = ()
    beyond_loopback: bool = False
    lease_s: float = 60.0
    transfer_deadline_s: float = 30.0
    max_held_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        host, port = self.place
        PeerList(self.peers, beyond_loopback=self.beyond_loopback)
        if not self.beyond_loopback:
            PeerList((host if ":" not in host else f"[{host}]",))
        if host in ("0.0.0.0", "::"):  # noqa: S104 (refused)
            raise ValueError("the address for KV must be one that others can connect to")
        if not 0 <= port < 65536:
            raise ValueError(f"not a port: {port}")
        if min(self.lease_s, self.transfer_deadline_s, self.max_held_bytes) <= 0:
            raise ValueError("lease, deadline and memory for KV must be positive")

    @property
    def place(self) -> tuple[str, int]:
        """Raises ValueError."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


class Handoff:
    """Lives on one event loop. ``weight_version`` says what the weights are called, for people."""

    def __init__(
        self,
        engine: Engine,
        settings: HandoffSettings,
        *,
        weight_version: Callable[[], str | None],
        new_id: Callable[[], str],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._weight_version = weight_version
        self._peers = PeerList(settings.peers, beyond_loopback=settings.beyond_loopback)
        self._sessions = KvSessions(lease_s=settings.lease_s, new_id=new_id)
        self._server = KvServer(self._sessions, deadline_s=settings.transfer_deadline_s)
        self._model = digest_of_model(engine.config)
        self._coming_bytes = 0  # of prompts that are being computed
        self._continuing: dict[str, str] = {}  # request to session

    @property
    def sessions(self) -> int:
        """Held for others."""
        return len(self._sessions)

    def connector(self) -> kv_pb2.KvConnectorInfo:
        place = self._server.address
        endpoints = []
        if place is not None:
            endpoints = [kv_pb2.KvEndpoint(host=place[0], port=place[1], protocol=PROTOCOL)]
        return kv_pb2.KvConnectorInfo(
            enabled=True,
            transfer_backend=BACKEND,
            local_endpoints=endpoints,
            supported_protocols=[PROTOCOL],
            supports_remote_prefill=True,
            supports_decode_pull=True,
            supports_abort_cleanup=True,
            supports_drain=False,
            schema_version=SCHEMA,
        )

    async def listen(self) -> None:
        """Be there to be asked for KV, from here on. Raises OSError."""
        await self._server.start(*self._settings.place)

    async def close(self) -> None:
        await self._server.close()
        self._sessions.end_all()

    # ---- prefill ----

    async def prefill(
        self, request: m.GenerationRequest
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Ends with the session. Raises as `Engine.generate`, and Overloaded where the sessions
        leave no memory."""
        sizes = self._part_sizes(len(request.prompt_ids))
        size = sum(sizes)
        if self._sessions.size_bytes + self._coming_bytes + size > self._settings.max_held_bytes:
            raise Overloaded("the sessions of KV that nobody has fetched yet take all the room")
        with contextlib.ExitStack() as unheld:
            parts = [MemoryFile(f"kv of rank {rank}") for rank in range(len(sizes))]
            for part in parts:
                unheld.callback(part.close)
            self._coming_bytes += size
            unheld.callback(self._came, size)
            computed = replace(request, export_to=tuple(part.handle for part in parts))
            async with contextlib.aclosing(self._engine.generate(computed)) as reports:
                async for report in reports:
                    if not isinstance(report, m.Prefilled):
                        yield response_of(report)
                        continue
                    offer = await self._collected(request, sizes)
                    place = self._place()
                    session = self._sessions.open(token_bytes(_SECRET_BYTES), offer, parts)
                    unheld.pop_all()
                    self._came(size)
                    yield _ready(report, reference_of(session, *place))

    def _came(self, size: int) -> None:
        self._coming_bytes -= size

    async def _collected(self, request: m.GenerationRequest, sizes: tuple[int, ...]) -> Offer:
        """Of every rank what it wrote: none may be at it any more when one has failed."""
        issued = self._engine.issue(CollectKv(request.request_id))
        answers = await asyncio.gather(
            *(self._engine.ack(issued, rank) for rank in self._engine.ranks),
            return_exceptions=True,
        )
        written = []
        for answer, size in zip(answers, sizes, strict=True):
            match answer:
                case KvWritten(bytes=found) if found == size:
                    written.append(answer)
                case RankLost():
                    raise answer
                case OrderRejected(cause=cause):
                    raise KvTransferFailed(cause, again=True)
                case _:
                    raise KvTransferFailed("a rank has written something else", again=False)
        return Offer(
            model=self._model,
            weights=tuple(one.weights for one in written),
            weight_version=self._weight_version() or "",
            prompt=digest_of_prompt(request.prompt_ids),
            tokens=len(request.prompt_ids),
            parts=tuple(Part(one.bytes, one.sha256) for one in written),
        )

    def _place(self) -> tuple[str, int]:
        place = self._server.address
        if place is None:
            raise KvTransferFailed("this engine is not there to be asked for KV", again=False)
        return place

    # ---- decode ----

    async def decode(
        self, request: m.GenerationRequest, claim: Claim
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Raises as `Engine.generate`, and InvalidRequest, KvSessionGone or KvTransferFailed before
        the first response."""
        fetched: list[Fetched] = []

        async def bring_kv() -> KvSource:
            there = await self._fetch(request, claim)
            fetched.append(there)
            handles = tuple(part.handle for part in there.parts)
            return KvSource(handles, there.offer.weights, there.offer.tokens)

        waiting = replace(request, awaits_kv=True)
        self._continuing[request.request_id] = claim.session_id
        try:
            async with contextlib.aclosing(self._engine.generate(waiting, bring_kv)) as reports:
                async for report in reports:
                    # With its first token all ranks have taken the KV in.
                    _close(fetched)
                    yield response_of(report)
        except OrderRejected as error:
            raise KvTransferFailed(error.cause, again=False) from error
        finally:
            self._continuing.pop(request.request_id, None)
            _close(fetched)

    async def _fetch(self, request: m.GenerationRequest, claim: Claim) -> Fetched:
        deadline_s = self._settings.transfer_deadline_s
        try:
            return await fetch(claim, self._peers, lambda o: self._check(o, request), deadline_s)
        except PeerRefused as error:
            raise InvalidRequest("kv.session.endpoints", str(error)) from error
        except SessionGone as error:
            raise KvSessionGone("there is no such session, or not any more") from error
        except FetchFailed as error:
            raise KvTransferFailed(str(error), again=error.again) from error

    def _check(self, offer: Offer, request: m.GenerationRequest) -> None:
        """Raises InvalidRequest or KvTransferFailed for KV that would give other tokens. That the
        weights are still those is looked at again when the ranks take it."""
        if offer.tokens != len(request.prompt_ids) or offer.prompt != digest_of_prompt(
            request.prompt_ids
        ):
            raise InvalidRequest("kv.session", "the session is of another prompt")
        own = self._engine.holdings.sha256
        why = None
        if offer.model != self._model:
            why = "the session is of another model"
        elif len(offer.weights) != len(own):
            why = f"it was computed by {len(offer.weights)} ranks, and this engine has {len(own)}"
        elif not request.adapter and offer.weights != own:
            # Of an adapter's content the ranks know alone.
            versions = f"{offer.weight_version or 'unnamed'}, {self._weight_version() or 'unnamed'}"
            why = f"the session was computed by other weights (versions there and here: {versions})"
        elif tuple(part.size_bytes for part in offer.parts) != self._part_sizes(offer.tokens):
            why = "its parts are not of this engine's shape"
        if why is not None:
            raise KvTransferFailed(why, again=False)

    # ---- both ----

    async def abort(
        self, reference: kv_pb2.KvSessionRef, *, by_admin: bool, message: str
    ) -> AbortOutcome:
        """End a session that is held here, and the requests that go on from one of elsewhere.
        Without ``by_admin`` the reference must have the secret of a held session. Raises RankLost
        or InvalidRequest."""
        name = reference.session_id
        session = self._sessions.find(name)
        if session is not None:
            if not by_admin and not hmac.compare_digest(secret_of(reference), session.secret):
                return AbortOutcome.NOT_FOUND
            self._sessions.end(session, SessionEnd.ABORTED)
            return AbortOutcome.ABORTED
        going_on = tuple(request for request, of in self._continuing.items() if of == name)
        if going_on and by_admin:
            await self._engine.abort(going_on, message)
            return AbortOutcome.ABORTED
        known = self._sessions.ended(name) is not None
        return AbortOutcome.ALREADY_FINISHED if known else AbortOutcome.NOT_FOUND

    def _part_sizes(self, tokens: int) -> tuple[int, ...]:
        config, ranks = self._engine.config, self._engine.ranks
        return tuple(
            part_bytes(config, len(Layout(config, rank, len(ranks)).kv_heads), tokens)
            for rank in ranks
        )


def _ready(report: m.Prefilled, session: kv_pb2.KvSessionRef) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        request_id=report.request_id,
        prefill_ready=generation_pb2.PrefillReady(kv_session=session),
        usage=usage_of(report.usage),
    )


def _close(fetched: list[Fetched]) -> None:
    while fetched:
        fetched.pop().close()
