"""How an order of one call ended: by what the members answered, and by what is read afterwards.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from app.backends.vllm.aims import Aim
from app.backends.vllm.kept import End, Kept
from app.backends.vllm.readings import EngineReading
from app.backends.vllm.refusals import restarted, unknown
from app.backends.vllm.statuses import Broke, Done, Lost, Refused, Said
from app.domain.kinds import FailureEffect, Verification
from app.domain.operation import OperationError
from app.domain.transitions import Completed, Failed


@dataclass(frozen=True, slots=True)
class Verdict:
    """`kept`: with nothing under way any more."""

    end: End
    kept: Kept


class NoEffect(Exception):
    """The engine process it was sent to shows that it was not carried out."""


class Undecided(Exception):
    """What is seen would be the same either way."""


def verdict(
    aim: Aim,
    kept: Kept,
    reading: EngineReading,
    now: datetime,
    answers: Mapping[int, Said] | None = None,
) -> Verdict:
    """`kept`: as before the order, which is under way in it. `answers`: by place; None: nobody
    heard them. Raises NoEffect, Undecided, where an answer is missing."""
    assert kept.under_way is not None
    anew = restarts(kept, reading)
    if anew:
        after = kept
        if aim.verified is Verification.UNVERIFIED and len(anew) < len(reading.members):
            # Of a member that is the old one yet, reading will not show what was done to it.
            after = aim.took(kept, kept.under_way, now, settled=False)
        return ended(after, Failed(error=restarted(reading.ranks(anew))))
    shown = {place for place, member in enumerate(reading.members) if aim.shown(member)}
    unlike = set(range(len(reading.members))) - shown
    if answers is not None and not any(isinstance(one, Lost) for one in answers.values()):
        return _heard(aim, kept, reading, now, answers, unlike)
    if aim.shown_before(kept):
        raise Undecided
    if not shown:
        raise NoEffect
    way = kept.under_way
    if unlike:
        error = unknown(
            "MEMBERS_DIFFER",
            "some members show it and some do not",
            reading.ranks(unlike),
            in_part=True,
        )
        return ended(aim.took(kept, way, now, settled=False), Failed(error=error))
    unsettled = aim.unsettled(reading.ranks(set(range(len(reading.members)))))
    after = aim.took(kept, way, now, settled=unsettled is None)
    return _completed(aim, after) if unsettled is None else ended(after, Failed(error=unsettled))


def _heard(
    aim: Aim,
    kept: Kept,
    reading: EngineReading,
    now: datetime,
    answers: Mapping[int, Said],
    unlike: set[int],
) -> Verdict:
    way = kept.under_way
    assert way is not None
    failing = {place for place, one in answers.items() if not isinstance(one, Done)}
    if not failing and not unlike:
        return _completed(aim, aim.took(kept, way, now))
    if not failing:
        message = "it says that it is done, and does not show it"
        error = unknown("NOT_CONFIRMED", message, reading.ranks(unlike), in_part=True)
        return ended(aim.took(kept, way, now, settled=False), Failed(error=error))
    done = set(answers) - failing
    # A member that answers INTERNAL may have done it before that; it shows, unless it did before.
    broken = {place for place in failing if isinstance(answers[place], Broke)} - unlike
    touched = bool(done) or (bool(broken) and not aim.shown_before(kept))
    error = replace(
        first_error(answers),
        ranks=reading.ranks(failing),
        effect=FailureEffect.APPLIED_IN_PART if touched else FailureEffect.NONE,
    )
    if any(isinstance(answers[place], Broke) for place in failing) and not touched:
        error = replace(error, effect=FailureEffect.UNKNOWN)
    after = aim.took(kept, way, now, settled=False) if touched else kept
    return ended(after, Failed(error=error))


def first_error(answers: Mapping[int, Said]) -> OperationError:
    for one in answers.values():
        if isinstance(one, Refused | Broke):
            return one.error
    raise ValueError("no member has failed")


def restarts(kept: Kept, reading: EngineReading) -> set[int]:
    """The places of members that are other processes than the order was sent to."""
    known = dict(enumerate(kept.instance_ids))
    ids = enumerate(reading.instance_ids)
    return {place for place, instance_id in ids if known.get(place) != instance_id}


def _completed(aim: Aim, after: Kept) -> Verdict:
    end = Completed(
        result={"changed": True, **aim.result(after)},
        revision=after.revision,
        verification=aim.verified,
    )
    return ended(after, end)


def ended(after: Kept, end: End) -> Verdict:
    if end.revision is None:
        end = replace(end, revision=after.revision)
    return Verdict(end, after.over(end))
