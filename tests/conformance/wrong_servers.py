"""Engines that are wrong on purpose, one fault each, and the cases that have to catch them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.conformance.faulty import Fault
from tests.conformance.paced_engine import PacedEngine
from tests.conformance.wrong_answers import (
    AlwaysChanged,
    AnyDeadline,
    AnyHoldLimit,
    AnyModel,
    CarriesOutTwice,
    DoesWhatItDoesNotOffer,
    EmptyMeansAll,
    EpochStandsStill,
    FlushesWhatItHas,
    IgnoresExpectedRevision,
    IgnoresPauseEpoch,
    LargeLimit,
    LeavesOperation,
    LowerCaseReasons,
    NamesNobody,
    NoErrorInfo,
    NoInstance,
    OffersTooMuch,
    ReadingCounts,
    RefusesExpectedRevision,
    RepeatIsNewPause,
    ResumesTheOpen,
    RevisionRisesWithoutChange,
    RevisionStandsStill,
    ShortMemory,
    SmallLimit,
    UnimplementedHasEffect,
    UnknownMeansDrain,
    UnspecifiedIsLeftOut,
    UnspecifiedMeansDrain,
)
from tests.conformance.wrong_conduct import (
    AbortLetsLive,
    AbortsAllByOmission,
    AbortsTheOthersToo,
    AlwaysServing,
    AsksForNoToken,
    CancelledYetPaused,
    CancelLies,
    CountsFromOne,
    DeafWhileBusy,
    DrainEndsRequests,
    EchoesInRefusals,
    EchoesInTrailers,
    FinishedAfterAll,
    ForgetsOrders,
    HidesAdmin,
    HidesOpenOperations,
    HoldsInsteadOfRefusing,
    KeepLoses,
    NeverReady,
    OneHealthForAll,
    OneRankWillDo,
    PausedButGenerating,
    PausesInTheProfile,
    PausesOnPaper,
    RefusesInsteadOfHolding,
    ResumeBreaksDrain,
    RunsBeside,
    SameInstance,
    SaysAborted,
    ServesWithoutARank,
    SomeRank,
    StaysBroken,
    SurelyNothing,
)
from tests.conformance.wrong_streams import (
    DetachCancels,
    DetachLetsGo,
    DoubleTerminal,
    EndChanges,
    FindsAnything,
    ForgetsByKey,
    ForgetsKeys,
    ForgetsKeysAtRestart,
    HearsFromNow,
    ManyIds,
    NoAccepted,
    RefusesLongKeys,
    ReplayFromTheMiddle,
    RetryIsJudgedAnew,
    SequenceGap,
    StatusAfterTheEnd,
    TakesAnyKey,
    TakesOtherPayload,
    TerminalMissing,
    TerminalNotLast,
    WrongKind,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongServer:
    """`caught_by`: each of these cases has to fail. `patience_s`: of the suite, where the fault is
    that something does not come."""

    caught_by: tuple[str, ...]
    fault: type[Fault] = Fault
    engine: type[PacedEngine] = PacedEngine
    patience_s: float = 20.0
    token: str | None = None

    @property
    def name(self) -> str:
        return self.engine.__name__ if self.fault is Fault else self.fault.__name__


def _wrong(fault: type[Fault], *caught_by: str, **more: Any) -> WrongServer:
    return WrongServer(caught_by=caught_by, fault=fault, **more)


def _broken(engine: type[PacedEngine], *caught_by: str, **more: Any) -> WrongServer:
    return WrongServer(caught_by=caught_by, engine=engine, **more)


SOON = 2.0
WRONG_SERVERS: tuple[WrongServer, ...] = (
    _wrong(DoubleTerminal, "stream.one-terminal"),
    _wrong(TerminalMissing, "stream.one-terminal"),
    _wrong(TerminalNotLast, "stream.one-terminal"),
    _wrong(SequenceGap, "stream.gap-free"),
    _wrong(NoAccepted, "stream.accepted-first"),
    _wrong(WrongKind, "stream.accepted-first"),
    _wrong(StatusAfterTheEnd, "stream.ends-ok"),
    _wrong(ManyIds, "stream.one-operation"),
    _wrong(EndChanges, "stream.same-end"),
    _wrong(ReplayFromTheMiddle, "attach.replay-from-first", "retry.after-the-effect-is-gone"),
    _wrong(HearsFromNow, "attach.while-running", "attach.replay-from-first"),
    _wrong(CarriesOutTwice, "attach.detach-before-acceptance", "retry.parallel"),
    _wrong(DetachCancels, "attach.detach-while-running", "attach.rpc-deadline"),
    _wrong(DetachLetsGo, "attach.detach-goes-on"),
    _wrong(
        ForgetsKeys,
        "retry.same-payload",
        "retry.parallel",
        "retry.another-connection",
        "retry.after-the-effect-is-gone",
        "refusal.longest-key",
    ),
    _wrong(TakesOtherPayload, "retry.other-payload"),
    _wrong(RetryIsJudgedAnew, "retry.expected-revision"),
    _wrong(TakesAnyKey, "refusal.malformed-key", "unsupported.offered-is-known"),
    _wrong(RefusesLongKeys, "refusal.longest-key"),
    _wrong(ForgetsByKey, "operation.by-id-and-key"),
    _wrong(FindsAnything, "operation.unknown"),
    _wrong(HidesOpenOperations, "operation.open-in-state"),
    _wrong(UnspecifiedMeansDrain, "refusal.unspecified"),
    _wrong(UnspecifiedIsLeftOut, "refusal.unspecified"),
    _wrong(EmptyMeansAll, "refusal.empty-selector"),
    _wrong(UnknownMeansDrain, "refusal.unknown-enum"),
    _wrong(FlushesWhatItHas, "refusal.not-offered-value"),
    _wrong(AnyModel, "refusal.model"),
    _wrong(AnyDeadline, "refusal.deadline", "deadline.running-drain", patience_s=SOON),
    _wrong(AnyHoldLimit, "pause.hold-limit", "pause.hold-limit-range", patience_s=SOON),
    _wrong(NoErrorInfo, "refusal.error-info"),
    _wrong(LowerCaseReasons, "refusal.error-info"),
    _wrong(NamesNobody, "busy.named"),
    _wrong(RunsBeside, "busy.named", "revision.one-of-two-wins"),
    _wrong(DeafWhileBusy, "busy.reads-go-on", patience_s=SOON),
    _wrong(ResumeBreaksDrain, "busy.resume-does-not-break-a-drain"),
    _wrong(LeavesOperation, "refusal.leaves-no-operation"),
    _wrong(SmallLimit, "refusal.oversized"),
    _wrong(LargeLimit, "refusal.oversized"),
    _wrong(
        UnimplementedHasEffect,
        "unsupported.operations",
        "unsupported.stop-profile",
        "unsupported.adapters",
    ),
    _wrong(
        DoesWhatItDoesNotOffer,
        "unsupported.operations",
        "unsupported.stop-profile",
        "unsupported.adapters",
    ),
    _wrong(OffersTooMuch, "profile.consistent", "unsupported.offered-is-known"),
    _wrong(ShortMemory, "profile.key-retention"),
    _wrong(NoInstance, "profile.complete", "profile.discovery"),
    _wrong(HidesAdmin, "profile.discovery"),
    _wrong(ReadingCounts, "profile.reading-changes-nothing"),
    _wrong(IgnoresExpectedRevision, "revision.stale", "refusal.leaves-no-operation"),
    _wrong(RefusesExpectedRevision, "revision.current"),
    _wrong(RevisionRisesWithoutChange, "revision.still-without-a-change"),
    _wrong(RevisionStandsStill, "revision.rises-with-a-change"),
    _wrong(AlwaysChanged, "revision.still-without-a-change"),
    _wrong(RepeatIsNewPause, "revision.still-without-a-change"),
    _wrong(EpochStandsStill, "epoch.rises", "epoch.another-mode"),
    _wrong(IgnoresPauseEpoch, "epoch.stale-resume", "epoch.another-mode"),
    _wrong(ResumesTheOpen, "epoch.resume-when-open"),
    _wrong(CancelLies, "cancel.running-drain", "cancel.ended", "cancel.unknown", patience_s=SOON),
    _wrong(CancelledYetPaused, "cancel.running-drain"),
    _wrong(PausesOnPaper, "pause.each-mode", "health.readiness"),
    _wrong(PausesInTheProfile, "pause.nothing-is-generated", "pause.hold"),
    _broken(PausedButGenerating, "pause.nothing-is-generated", "pause.keep-continues"),
    _broken(AbortLetsLive, "pause.abort-ends", "pause.nothing-is-generated", patience_s=SOON),
    _broken(KeepLoses, "pause.keep-continues"),
    _wrong(DrainEndsRequests, "pause.drain-lets-finish"),
    _wrong(RefusesInsteadOfHolding, "pause.hold"),
    _wrong(HoldsInsteadOfRefusing, "pause.refuse", patience_s=SOON),
    _wrong(AbortsAllByOmission, "abort.unknown"),
    _wrong(AbortsTheOthersToo, "abort.one"),
    _wrong(SaysAborted, "abort.unknown", "abort.one", "abort.all", patience_s=SOON),
    _wrong(SaysAborted, "abort.beside-a-drain", patience_s=SOON),
    _wrong(
        AlwaysServing,
        "health.readiness",
        "health.readiness-while-draining",
        "health.inference-listener",
        "health.core",
    ),
    _wrong(OneHealthForAll, "health.liveness", "health.admin"),
    _wrong(NeverReady, "health.readiness", "health.inference-listener"),
    _wrong(EchoesInRefusals, "credentials.not-echoed"),
    _wrong(EchoesInTrailers, "credentials.not-echoed"),
    _wrong(AsksForNoToken, "credentials.required", token="shown.but.not.needed"),
    _wrong(ForgetsKeysAtRestart, "restart.keys-are-kept"),
    _wrong(SameInstance, "restart.new-instance"),
    _wrong(CountsFromOne, "restart.new-instance"),
    _wrong(IgnoresExpectedRevision, "restart.fences"),
    _wrong(FinishedAfterAll, "restart.open-operation"),
    _wrong(SurelyNothing, "restart.open-operation"),
    _wrong(ForgetsOrders, "restart.serves"),
    _wrong(OneRankWillDo, "rank.killed", "rank.killed-while-draining", "rank.stopped"),
    _wrong(SomeRank, "rank.killed", "rank.killed-while-draining", "rank.stopped"),
    _wrong(StaysBroken, "rank.recovers"),
    _broken(ServesWithoutARank, "rank.killed"),
)
