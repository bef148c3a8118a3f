"""One rank as a process of its own: ``python -m app.reference_engine.worker FD [PEER …]``.

Its life hangs on the socket FD. When the front end goes, however it goes, the socket ends and so
does this process, at once: a reading thread sees it even in the middle of a long step. PEER are
sockets too: the first rank's to each of the others, another rank's to the first.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from app.reference_engine import messages as m
from app.reference_engine import recording_orders as r
from app.reference_engine.errors import OrderRefused, PeerLost, ReferenceEngineError
from app.reference_engine.pulse import Pulse
from app.reference_engine.rank_connection import Followers, FrontEnd, Inbox, follow, leave
from app.reference_engine.shape_orders import BesideSteps

if TYPE_CHECKING:
    from app.reference_engine.core import EngineCore
    from app.reference_engine.follower import Follower
    from app.reference_engine.rank_recording import RankRecording

_FIRST_RANK = 0


def run(front: FrontEnd, inbox: Inbox, peers: list[socket.socket], pulse: Pulse) -> None:
    """Load, report ready, then work until told to stop."""
    try:
        start = front.receive_start()
    except EOFError:
        return  # nobody waited for this rank to be made
    front.start_reading()
    try:
        # Imported here: a rank can then say on its connection that torch itself will not load.
        from app.reference_engine.assembly import build_rank

        # Each change ends with a collection, and steps wait for it. What was only imported is not
        # worth looking at then: that alone would take a tenth of a second.
        gc.freeze()
        built = build_rank(
            Path(start.checkpoint),
            start.settings,
            start.rank,
            Path(start.rendezvous),
            pulse,
            start.weights,
        )
    except (ReferenceEngineError, ImportError, MemoryError, RuntimeError) as error:
        front.send([m.StartFailed(rank=start.rank, message=str(error))])
        return
    from app.reference_engine.rank_recording import RankRecording

    recording = RankRecording(built.holding, start.rank, lambda ack: front.send([ack]))
    built.holding.around_step = recording.step
    try:
        if start.rank == _FIRST_RANK:
            followers = Followers(peers, pulse)
            core = built.core(start.settings, followers.send)
            front.send([built.ready])
            delay_s = start.settings.step_delay_ms / 1000
            lead(front, inbox, followers, core, recording, pulse, delay_s)
        else:
            from app.reference_engine.follower import Follower

            (leader,) = peers
            follow(leader, inbox)
            front.send([built.ready])
            follower = Follower(built.holding)
            compute_along(front, inbox, follower, recording, pulse, start.rank)
    except (PeerLost, OrderRefused, RuntimeError, MemoryError) as error:
        # Said, not shown by dying: which rank is to blame would otherwise be a race between ends.
        by_peer = isinstance(error, PeerLost)
        front.send([m.Broken(rank=start.rank, message=str(error), by_peer=by_peer)])
        threading.Event().wait()
    # Whatever the collective's own threads are at, this process has nothing left to wait for.
    leave()


def lead(
    front: FrontEnd,
    inbox: Inbox,
    followers: Followers,
    core: EngineCore,
    recording: RankRecording,
    pulse: Pulse,
    delay_s: float,
) -> None:
    """The first rank: alternate between orders and steps, and hand both on before doing them."""
    next_step_at = time.monotonic()
    while True:
        wait_s = next_step_at - time.monotonic() if core.runnable else None
        entry = inbox.next(wait_s)
        if isinstance(entry, m.Entry):
            followers.send(entry)
            if isinstance(entry.order, r.RecordingOrder):
                recording.take(entry.index, entry.order)
            elif isinstance(entry.order, BesideSteps):
                _prepare(front, core, entry.index, entry.order, _FIRST_RANK)
            else:
                done = _carry_out(core, entry)
                # First what became of the cache: whoever reads that an order is done may look.
                front.send([*core.cache_changes(), *done])
            if isinstance(entry.order, m.Shutdown):
                return
            continue
        with pulse.step():
            reports = core.step()
        changes = core.cache_changes()
        if changes or reports:
            front.send([*changes, *reports])
        if reports:
            next_step_at = time.monotonic() + delay_s


def _carry_out(core: EngineCore, entry: m.Entry) -> list[m.Report]:
    """What the order brought about, and then its acknowledgement: when a caller reads that an
    abort is done, the ends of the aborted requests are there already."""
    try:
        result, reports = core.apply(entry.order)
    except OrderRefused as refusal:
        return [m.Ack(index=entry.index, rank=_FIRST_RANK, error=str(refusal))]
    return [*reports, m.Ack(index=entry.index, rank=_FIRST_RANK, result=result)]


def _prepare(
    front: FrontEnd, target: EngineCore | Follower, index: int, order: BesideSteps, rank: int
) -> None:
    """In a thread, so that steps and other orders go on; it acknowledges the order at its end."""

    def run() -> None:
        try:
            ack = m.Ack(index=index, rank=rank, result=work())
        except Exception as error:  # nothing is changed yet, whatever went wrong
            ack = m.Ack(index=index, rank=rank, error=str(error) or type(error).__name__)
        front.send([ack])

    try:
        work = target.prepare(order)
    except OrderRefused as refusal:
        front.send([m.Ack(index=index, rank=rank, error=str(refusal))])
        return
    threading.Thread(target=run, name="prepare", daemon=True).start()


def compute_along(
    front: FrontEnd,
    inbox: Inbox,
    follower: Follower,
    recording: RankRecording,
    pulse: Pulse,
    rank: int,
) -> None:
    """Any other rank: what stands in the log, in its order."""
    while True:
        item = inbox.next(None)
        if isinstance(item, m.StepPlan):
            with pulse.step():
                follower.compute(item)
        elif item is not None and isinstance(item.order, r.RecordingOrder):
            recording.take(item.index, item.order)
        elif item is not None and isinstance(item.order, BesideSteps):
            _prepare(front, follower, item.index, item.order, rank)
        elif item is not None:
            try:
                ack = m.Ack(index=item.index, rank=rank, result=follower.apply(item.order))
            except OrderRefused as refusal:
                ack = m.Ack(index=item.index, rank=rank, error=str(refusal))
            front.send([ack])
            if isinstance(item.order, m.Shutdown):
                return


def main() -> None:
    """Entry point of the process; the arguments are numbers of inherited sockets."""
    # The front end alone decides about the end: a Ctrl-C for the group, or a service manager that
    # signals all processes, must not take the rank away while the front end still winds up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connected, *peers = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    inbox, pulse = Inbox(), Pulse()
    run(FrontEnd(connected, inbox, pulse), inbox, peers, pulse)


if __name__ == "__main__":
    main()
