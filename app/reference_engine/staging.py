"""Changes of what a rank holds, from preparation to their end; see ``change_orders``.

A change has an earlier and a later value of :class:`Held`. Preparing computes the later one, in a
thread beside the steps; commit and undo assign the one or the other.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace

from app.reference_engine import adapter_orders as a
from app.reference_engine import change_orders as c
from app.reference_engine.adapter_staging import (
    check_adapters,
    with_adapters,
    with_tensors,
    without_tensors,
)
from app.reference_engine.errors import OrderRefused, ReferenceEngineError
from app.reference_engine.holding import Held, Holding, cache_tensors
from app.reference_engine.host_memory import (
    HostCopy,
    bytes_of,
    give_memory_back,
    memory_in_use,
    sha256_of,
)
from app.reference_engine.lora import is_packed, packed
from app.reference_engine.source_reading import read_source, take_source
from app.reference_engine.weights import Collected


class Stopped(OrderRefused):
    """The preparation was undone while it ran."""


class _Change:
    """``pieces`` None: of an order that comes as a whole. ``ended``: nothing runs for it now."""

    def __init__(self, order: c.BesideSteps, holding: Holding) -> None:
        self.order = order
        self.pieces: Collected | None = None
        self.read = hashlib.sha256()
        self.before = holding.held
        self.after: Held | None = None
        self.fresh: list[HostCopy] = []
        self.committed = False
        self.stop = threading.Event()
        self.ended = threading.Event()
        self.memory_before = memory_in_use(holding.device)
        resources = getattr(order, "resources", (c.Resource.WEIGHTS,))
        self.bytes_before = {one: holding.bytes_held(one) for one in resources}

    def proceed(self) -> None:
        if self.stop.is_set():
            raise Stopped("the preparation was stopped")


class Staging:
    """One change at a time. ``begin`` may run in a thread, all else in the main one."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._change: _Change | None = None
        self._last_settled: str | None = None

    def begin(self, order: c.BesideSteps) -> Callable[[], c.ChangePrepared | c.PieceStaged]:
        """What is to be run, in a thread or here, to prepare. Raises OrderRefused at once or from
        what it returns, then with nothing changed."""
        change = self._change_of(order)
        change.order = order
        change.ended.clear()

        def work() -> c.ChangePrepared | c.PieceStaged:
            try:
                return self._prepare(change)
            except OrderRefused:
                raise
            except (ReferenceEngineError, OSError, RuntimeError, MemoryError) as error:
                raise OrderRefused(str(error)) from error
            finally:
                change.ended.set()

        return work

    def _change_of(self, order: c.BesideSteps) -> _Change:
        """The one that it begins or, as a piece, goes on with. Raises OrderRefused."""
        change = self._change
        whole = isinstance(order, c.PrepareUpdate) and isinstance(order.source, c.Pieces)
        by_pieces = whole or isinstance(order, c.StagePiece)
        if change is not None:
            same = change.order.change_id == order.change_id
            if not (by_pieces and same and change.pieces is not None) or change.after is not None:
                raise OrderRefused("another change is not settled")
            if not change.ended.is_set():
                raise OrderRefused("an earlier piece is not staged yet")
            return change
        self._check(order)
        change = self._change = _Change(order, self._holding)
        if isinstance(order, c.StagePiece | c.PrepareUpdate) and by_pieces:
            change.pieces = Collected(
                self._holding.bare.layout,
                check_finite=order.check_finite,
                proceed=change.proceed,
            )
        return change

    def commit(self, change_id: str) -> c.ChangeCommitted:
        change = self._of(change_id)
        if change.after is None or change.committed:
            raise OrderRefused("the change is not prepared")
        self._holding.held = change.after
        self._holding.unsettled = change.committed = True
        return c.ChangeCommitted()

    def undo(self, change_id: str) -> c.ChangeUndone:
        """Also of a change that never was prepared here, or is undone already; not of one that
        is settled."""
        if change_id == self._last_settled:
            raise OrderRefused("the change is settled: the earlier state is given up")
        change = self._change
        if change is not None and change.order.change_id == change_id:
            change.stop.set()
            change.ended.wait()
            self._holding.held = change.before
            self._holding.unsettled = False
            self._change = None
            for copy in change.fresh:
                copy.close()
            del change
            give_memory_back(self._holding.device)
        found = self._holding.live_sha256()
        held = self._holding.held
        if held.model is not None and found != held.sha256:
            raise OrderRefused(f"the live weights have sha256 {found}, not {held.sha256}")
        return c.ChangeUndone(found)

    def settle(self, change_id: str) -> c.ChangeSettled:
        change = self._of(change_id)
        if not change.committed:
            raise OrderRefused("the change is not committed")
        held = self._holding.held
        for kept in (change.before.kept_weights, change.before.kept_cache):
            if kept is not None and kept not in (held.kept_weights, held.kept_cache):
                kept.close()
        memory_before, bytes_before = change.memory_before, change.bytes_before
        self._holding.unsettled = False
        self._change = None
        self._last_settled = change_id
        # The earlier weights and cache have no other holder than this.
        del change
        give_memory_back(self._holding.device)
        return c.ChangeSettled(
            before_memory=memory_before,
            after_memory=memory_in_use(self._holding.device),
            held=sum(bytes_before.values()),
            kept=self._holding.bytes_kept,
            weights_sha256=held.sha256,
            parts=tuple(
                c.ResourceBytes(resource, before, self._holding.bytes_held(resource))
                for resource, before in bytes_before.items()
            ),
        )

    def _of(self, change_id: str) -> _Change:
        if self._change is None or self._change.order.change_id != change_id:
            raise OrderRefused("no such change")
        return self._change

    def _check(self, order: c.BesideSteps) -> None:
        released = self._holding.held.released
        match order:
            case a.PrepareLoad() | a.PrepareUnload():
                check_adapters(order, self._holding.held)
            case c.PrepareRelease(resources=resources, preserve=preserve):
                # What is preserved can still be discarded.
                kept = frozenset() if preserve else self._holding.held.preserved
                if again := released.intersection(resources) - kept:
                    raise OrderRefused(f"released already: {', '.join(sorted(again))}")
            case c.PrepareRestore(resources=resources):
                if missing := set(resources) - released:
                    raise OrderRefused(f"not released: {', '.join(sorted(missing))}")
            case c.PrepareUpdate() | c.StagePiece():
                if c.Resource.WEIGHTS in released:
                    raise OrderRefused("weights are released: restore them first")

    def _prepare(self, change: _Change) -> c.ChangePrepared | c.PieceStaged:
        match change.order:
            case c.StagePiece(sources=sources):
                return self._staged(change, sources)
            case c.PrepareRelease(resources=resources, preserve=preserve):
                change.after = self._released(change, resources, preserve)
                return c.ChangePrepared()
            case c.PrepareRestore(resources=resources):
                change.after = self._restored(change, resources)
                return c.ChangePrepared()
            case c.PrepareUpdate() as order:
                return self._updated(change, order)
            case a.PrepareLoad() | a.PrepareUnload() as order:
                change.after, prepared = with_adapters(order, self._holding, change.proceed)
                return prepared

    def _released(self, change: _Change, resources: tuple[c.Resource, ...], preserve: bool) -> Held:
        later = replace(change.before, released=change.before.released | frozenset(resources))
        if c.Resource.WEIGHTS in resources:
            kept = None
            if preserve and later.model is not None:
                tensors = {**later.model.weights, **packed(later.adapters.values())}
                kept = HostCopy(tensors, change.proceed)
                change.fresh.append(kept)
            sha256 = later.sha256 if kept is not None else ""
            adapters = without_tensors(later) if kept is not None else {}
            later = replace(later, model=None, kept_weights=kept, sha256=sha256, adapters=adapters)
        if c.Resource.KV_CACHE in resources:
            kept = None
            if preserve and later.cache is not None:
                kept = HostCopy(cache_tensors(later.cache), change.proceed)
                change.fresh.append(kept)
            later = replace(later, cache=None, kept_cache=kept)
        return later

    def _restored(self, change: _Change, resources: tuple[c.Resource, ...]) -> Held:
        """Discarded weights stay missing: there is nothing to restore them from."""
        device = self._holding.device
        later = replace(change.before, released=change.before.released - frozenset(resources))
        if c.Resource.WEIGHTS in resources and later.kept_weights is not None:
            content = later.kept_weights.read(device)
            weights = {name: one for name, one in content.items() if not is_packed(name)}
            if sha256_of(weights, change.proceed) != later.sha256:
                raise OrderRefused("the copy of the weights is damaged")
            model = self._holding.bare.with_weights(weights)
            adapters = with_tensors(later, content, change.proceed)
            later = replace(later, model=model, kept_weights=None, adapters=adapters)
        if c.Resource.KV_CACHE in resources:
            cache = self._holding.new_cache()
            if later.kept_cache is not None:
                cache.use(later.kept_cache.read(device)["cells"])
            later = replace(later, cache=cache, kept_cache=None)
        return later

    def _staged(
        self, change: _Change, sources: tuple[c.DiskSource | c.SharedSource, ...]
    ) -> c.PieceStaged:
        pieces = change.pieces
        assert pieces is not None
        for source in sources:
            take_source(
                source, self._holding.bare.layout, pieces, change.proceed, change.read.update
            )
        return c.PieceStaged(len(pieces))

    def _updated(self, change: _Change, order: c.PrepareUpdate) -> c.ChangePrepared:
        layout, device = self._holding.bare.layout, self._holding.device
        if isinstance(order.source, c.Pieces):
            pieces = change.pieces
            assert pieces is not None
            weights, read, sha256 = pieces.complete(), change.read.hexdigest(), ""
        else:
            found = read_source(
                order.source, layout, check_finite=order.check_finite, proceed=change.proceed
            )
            weights, read, sha256 = found.weights, found.read, found.sha256
        weights = {name: part.to(device) for name, part in weights.items()}
        if not sha256 or device.type != "cpu":
            # What a device holds is looked at there.
            sha256 = sha256_of(weights, change.proceed)
        model = self._holding.bare.with_weights(weights)
        change.after = replace(change.before, model=model, sha256=sha256)
        return c.ChangePrepared(
            tensors=len(weights), bytes=bytes_of(weights), sha256=sha256, read=read
        )
