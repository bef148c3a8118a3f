"""Which engines a stream's caller may see, as long as the stream goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from app.auth.policy.live import LivePolicy
from app.auth.principal import Principal
from app.domain.scopes import Scope
from app.domain.selectors import Labels
from app.http.roster import Roster
from app.ledger.values import EventFilter, StoredEvent


class Outlook:
    """The policy and the labels may change under an open stream. Engines that come into sight then
    have a past that the reader does not know, so the stream begins anew; one that is registered
    has none."""

    def __init__(
        self,
        live: LivePolicy,
        who: Principal,
        roster: Roster,
        wanted: EventFilter,
        scope: Scope,
        *,
        about: frozenset[str] | None,
    ) -> None:
        """`wanted`: what the reader asked for. `about`: the only engines that have to do with it;
        None: all."""
        self._live = live
        self._who = who
        self._roster = roster
        self._asked_for = wanted
        self._scope = scope
        self._about = about
        self._policy = live.policy
        self._permit = live.permit(who)
        self._labels: Mapping[str, Labels] = {}
        self._seen: frozenset[str] = frozenset()

    @property
    def wanted(self) -> EventFilter:
        """What was asked for, of the engines in sight."""
        return replace(self._asked_for, sight=self._permit.sight(self._scope))

    def sees(self, stored: StoredEvent) -> bool:
        """As of the last look."""
        return self._permit.unlimited or stored.event.engine_id in self._seen

    async def look(self, engine_ids: Collection[str] = ()) -> bool:
        """Look anew, and know of these engines for certain. True: what is in sight is no longer
        what it was, new engines apart. Raises LedgerUnavailable."""
        if self._live.policy is None:
            return False
        labels = await self._roster.labels(engine_ids)
        policy, permit = self._live.policy, self._permit
        if policy is self._policy and labels is self._labels:
            return False
        if policy is not self._policy:
            permit = self._live.permit(self._who)
        sight = permit.sight(self._scope)
        seen = frozenset(one for one, own in labels.items() if sight.sees(one, own))
        before, known = self._seen, self._labels.keys()
        self._policy, self._permit = policy, permit
        self._labels, self._seen = labels, seen
        concerned = known if self._about is None else known & self._about
        return any((one in seen) != (one in before) for one in concerned)
