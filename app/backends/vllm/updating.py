"""New weights: initialise, pause, start, pieces, finish, read back, resume. ONE order.

Before the start nothing of the weights is touched, and an update that ends there leaves no trace.
From the start on there is no way back: whatever goes wrong leaves them inconsistent and the engine
paused, until an update succeeds. vLLM itself would resume, and die with the next request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from app.backends.port import EngineRefused
from app.backends.vllm.aims import MODES
from app.backends.vllm.errands import Errand
from app.backends.vllm.groups import is_in
from app.backends.vllm.kept import HeldPause
from app.backends.vllm.members import Calls, EngineDead
from app.backends.vllm.observing import (
    BEGUN,
    FINISHING,
    PAUSING,
    PREPARING,
    STARTING,
    UPDATING,
)
from app.backends.vllm.payloads import init_infos, update_info
from app.backends.vllm.refusals import dead, unknown
from app.backends.vllm.sessions import Lapsed, OpenSession, aborted
from app.backends.vllm.statuses import Done, Lost, Refused, Said, words_of
from app.backends.vllm.update_ends import (
    BEFORE,
    FINISHING_AS,
    conclude_update,
    lapsed,
    miscounted,
)
from app.backends.vllm.verdicts import first_error, restarts
from app.domain.commands import PauseAround, UpdateWeights
from app.domain.kinds import (
    CachePolicy,
    Component,
    PauseMode,
)
from app.domain.operation import OperationError, Progress
from app.domain.transitions import (
    EngineAccepted,
    Fact,
    Progressed,
    Warned,
)
from app.domain.weight_sessions import AbortSession, Chunk, CommitSession, Payload, SessionWeights
from app.domain.weight_sources import DiskWeights
from app.rpc.vllm import control_pb2 as pb


class _Failure(Exception):
    """`error` None: a reply is missing, and what is read decides."""

    def __init__(self, error: OperationError | None, why: str = "") -> None:
        super().__init__(why)
        self.error = error
        self.why = why


class _Update:
    def __init__(self, errand: Errand, command: UpdateWeights, session: OpenSession | None) -> None:
        self._errand = errand
        self._command = command
        self._session = session
        source = command.source
        assert isinstance(source, SessionWeights | DiskWeights)
        self._source = source
        self._transfer = source.transfer if isinstance(source, SessionWeights) else source

    async def run(self) -> AsyncGenerator[Fact, None]:
        errand = self._errand
        errand.judge()
        infos = init_infos(self._transfer, errand.reading)
        await errand.begin(PREPARING)
        await errand.first_calls()
        yield EngineAccepted(engine_operation_id=errand.order.operation_id)
        try:
            calls = await self._calls(PREPARING)
            if not is_in(errand.kept, self._transfer):
                yield Progressed(progress=Progress("initialising"))
                requests = [pb.InitWeightTransferEngineRequest(init_info_json=one) for one in infos]
                answers = await calls.order("InitWeightTransferEngine", requests, errand.longest_s)
                if all(isinstance(one, Refused) for one in answers.values()):
                    await errand.give_up(EngineRefused(first_error(answers)))
                self._require(answers)
            await self._pause()
            await errand.step(BEGUN)
            async for fact in self._pieces():
                yield fact
        except _Failure as failure:
            async for fact in conclude_update(errand, self._command, failure.error, failure.why):
                yield fact

    # ---- admission ----

    async def _pause(self) -> None:
        """Paused, and its caches dropped if the order wants that. Raises _Failure."""
        errand, rule = self._errand, self._command.admission
        paused = errand.reading.paused is True
        flush = self._command.cache_policy is CachePolicy.FLUSH
        if paused and not flush:
            return
        held = errand.kept.pause
        if not paused:
            assert isinstance(rule, PauseAround)  # or it had been refused
            mode = rule.mode
        else:
            mode = (held.mode if held else None) or PauseMode.KEEP
        request = pb.PauseGenerationRequest(mode=MODES[mode], clear_cache=flush)
        calls = await self._calls(PREPARING if paused else PAUSING)
        answers = await calls.order("PauseGeneration", request, errand.longest_s)
        self._require(answers)
        try:
            reading = await errand.read()
        except EngineDead as gone:
            raise _Failure(dead()) from gone
        if reading.paused is not True:
            raise _Failure(unknown("NOT_CONFIRMED", "it says that it is paused, and is not"))
        if not paused:
            by = errand.order.operation_id
            await errand.write(errand.kept.paused(HeldPause(mode=mode, by=by, since=errand.now())))

    # ---- pieces ----

    async def _pieces(self) -> AsyncGenerator[Fact, None]:
        errand, session = self._errand, self._session
        if session is None:
            await self._stage(None)
            yield Progressed(progress=Progress("staged"))
            async for fact in self._finish(self._command.weight_version):
                yield fact
            return
        session.working()  # so far it was the engine that took its time
        while True:
            try:
                piece = await session.piece(max(errand.left_s, 0.0))
            except Lapsed as over:
                raise _Failure(lapsed(late=over.late)) from over
            match piece:
                case AbortSession():
                    yield Warned(warning=aborted(piece))
                    async for fact in conclude_update(errand, self._command, None, called_off=True):
                        yield fact
                    return
                case Chunk():
                    await self._stage(piece.payload)
                    session.staged += 1
                    session.working()
                    yield Progressed(progress=session.progress("staged"))
                case CommitSession(chunks=chunks):
                    if chunks != session.staged or not chunks:
                        raise _Failure(miscounted(chunks, session.staged))
                    version = piece.weight_version or self._command.weight_version
                    yield Progressed(progress=session.progress("completing"))
                    async for fact in self._finish(version):
                        yield fact
                    return

    async def _stage(self, payload: Payload | None) -> None:
        """The first one starts the update at the engine. Raises _Failure."""
        errand = self._errand
        info = update_info(self._transfer, payload, check_finite=self._command.check_finite)
        way = errand.kept.under_way
        assert way is not None
        if way.step != UPDATING:
            await self._start()
        calls = await self._calls(UPDATING)
        request = pb.UpdateWeightsRequest(update_info_json=info)
        self._require(await calls.order("UpdateWeights", request, errand.longest_s))

    async def _start(self) -> None:
        errand = self._errand
        left_open = errand.kept.session_open
        # Of all calls this one does harm to an engine that the order was not prepared at.
        await self._same_processes()
        if errand.reading.paused is not True:
            message = "the engine is not paused any more; nothing was begun"
            raise _Failure(OperationError("FAILED_PRECONDITION", "NOT_PAUSED", message))
        calls = await self._calls(STARTING)
        if left_open:
            # What an update before this one has left open; there may be none any more. It waits
            # for a call of that one which the engine is still at.
            closing = await calls.order(
                "FinishWeightUpdate", pb.FinishWeightUpdateRequest(), errand.longest_s
            )
            if any(isinstance(one, Lost) for one in closing.values()):
                self._require(closing)
        draft = self._command.components == (Component.DRAFT,)
        rpc = "StartDraftWeightUpdate" if draft else "StartWeightUpdate"
        request = pb.StartDraftWeightUpdateRequest() if draft else pb.StartWeightUpdateRequest()
        answers = await calls.order(rpc, request, errand.longest_s)
        if not left_open and all(isinstance(one, Refused) for one in answers.values()):
            await errand.step(BEGUN)  # judged, and nothing begun
        self._require(answers)
        await self._same_processes()

    async def _same_processes(self) -> None:
        """Raises _Failure: there is another one, and what is read decides."""
        try:
            await self._errand.read()
        except EngineDead as gone:
            raise _Failure(dead()) from gone
        if restarts(self._errand.kept, self._errand.reading):
            raise _Failure(None, "the engine was restarted")

    async def _finish(self, version: str) -> AsyncGenerator[Fact, None]:
        errand = self._errand
        way = errand.kept.under_way
        assert way is not None
        told_as = {**way.request, FINISHING_AS: version, BEFORE: errand.kept.version}
        named = replace(way, step=FINISHING, request=told_as)
        await errand.write(replace(errand.kept, under_way=named))
        calls = await errand.calls()
        request = pb.FinishWeightUpdateRequest(weight_version=version)
        answers = await calls.order("FinishWeightUpdate", request, errand.longest_s)
        told = {place for place, one in answers.items() if isinstance(one, Done)}
        why = next((why for one in answers.values() if (why := words_of(one))), "")
        async for fact in conclude_update(errand, self._command, None, why, finished=told):
            yield fact

    async def _calls(self, step: str) -> Calls:
        """For what the step begins with. Written down first, which finds out whether the order is
        this process's still. Raises _Failure: its deadline is over."""
        if self._errand.left_s <= 0:
            raise _Failure(lapsed(late=True))
        await self._errand.step(step)
        return await self._errand.calls()

    def _require(self, answers: dict[int, Said]) -> None:
        """Raises _Failure, unless every member has done it."""
        failing = {place for place, one in answers.items() if not isinstance(one, Done)}
        if not failing:
            return
        lost = [one for one in answers.values() if isinstance(one, Lost)]
        if lost:
            raise _Failure(None, lost[0].why)
        error = replace(first_error(answers), ranks=self._errand.reading.ranks(failing))
        raise _Failure(error)


def update(
    errand: Errand, command: UpdateWeights, session: OpenSession | None
) -> AsyncGenerator[Fact, None]:
    """As `EngineBackend.carry_out` promises. `session`: where its further calls come in; None: it
    has none."""
    return _Update(errand, command, session).run()
