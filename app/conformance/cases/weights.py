"""Updating weights: what takes effect, and that it is what answers."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from app.conformance import sources
from app.conformance.case import Case, Need, NotPromised, case, expect
from app.conformance.client import completed_of
from app.conformance.placing import Way
from app.conformance.tensors import altered, files_of
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

_OUTSIDE = ("/", "/etc", "/proc/self", "/nowhere/../etc")
_FOREIGN_PREFIX = "not-of-any-engine-"


@case(
    "update.nowhere",
    "An update from a place that does not exist is refused or fails; weights, version and admission"
    " are as before, and the failure says that nothing was changed.",
    Need.DESTRUCTIVE,
)
async def nowhere(trial: Trial) -> None:
    trial.stock.require(Way.DISK)
    await trial.stock.turned_away(trial.orders.update(f"/nowhere/{trial.prefix}"))


@case(
    "update.allowed-roots",
    "Only paths below the engine's allowed roots are read: any other is refused or fails, whatever"
    " lies there.",
    Need.DESTRUCTIVE,
)
async def allowed_roots(trial: Trial) -> None:
    """With a copy of the weights at hand, they lie outside too, whole and right."""
    trial.stock.require(Way.DISK)
    for path in _OUTSIDE:
        await trial.stock.turned_away(trial.orders.update(path))
    if trial.options.weights_copy is None:
        return
    with _outside(trial) as folder:
        await trial.stock.turned_away(trial.orders.update(str(folder)))


@case(
    "update.links",
    "A link below an allowed root that leads out of it is not followed.",
    Need.DESTRUCTIVE,
    Need.COPY,
    Need.SCRATCH,
)
async def links(trial: Trial) -> None:
    trial.stock.require(Way.DISK)
    scratch = trial.options.places.scratch
    assert scratch is not None
    link = scratch / f"{trial.prefix}-link"
    with _outside(trial) as folder:
        link.symlink_to(folder)
        try:
            await trial.stock.turned_away(trial.orders.update(str(link)))
        finally:
            link.unlink()


def _outside(trial: Trial) -> AbstractContextManager[Path]:
    return trial.options.places.folder(trial.stock.copy, below=Path(tempfile.gettempdir()))


@case(
    "update.foreign-segment",
    "Shared memory that is not of the engine's prefix is refused or fails, whatever it holds.",
    Need.DESTRUCTIVE,
    Need.COPY,
    Need.SHARED,
)
async def foreign_segment(trial: Trial) -> None:
    trial.stock.require(Way.SHARED_MEMORY)
    places = trial.options.places
    with places.segment(_FOREIGN_PREFIX, trial.stock.copy) as shared:
        source = pb.TensorWeights(shared_memory=shared)
        await trial.stock.turned_away(trial.orders.load(tensors=source))


@case(
    "update.version-moves-with-success",
    "A successful update moves the version, tells the one before, brings evidence from every rank"
    " or says that it is not verified, and opens admission again if it was open.",
    Need.DESTRUCTIVE,
    Need.WEIGHTS,
)
async def version(trial: Trial) -> None:
    await trial.stock.given()


@case(
    "update.inline",
    "Tensors that come whole within the order are loaded, with evidence from every rank.",
    Need.DESTRUCTIVE,
    Need.COPY,
)
async def inline(trial: Trial) -> None:
    await _loads(trial, Way.INLINE)


@case(
    "update.shared-memory",
    "Tensors in shared memory of the engine's prefix are loaded, with evidence from every rank.",
    Need.DESTRUCTIVE,
    Need.COPY,
    Need.SHARED,
)
async def shared_memory(trial: Trial) -> None:
    await _loads(trial, Way.SHARED_MEMORY)


async def _loads(trial: Trial, way: Way) -> None:
    trial.stock.require(way)
    with trial.stock.order(way, trial.stock.copy) as request:
        await trial.stock.loaded(request)


def _evidence(result: pb.UpdateWeightsResult) -> dict[int, str]:
    return {one.rank: one.sha256.hex() for one in result.evidence}


@case(
    "update.evidence",
    "The same weights give the same evidence on every rank, by whatever way they come, and other"
    " weights give other evidence on every rank.",
    Need.DESTRUCTIVE,
    Need.WEIGHTS,
    Need.COPY,
)
async def evidence(trial: Trial) -> None:
    way = trial.stock.any_way()
    wanted = _evidence(await trial.stock.given())
    if not wanted:
        raise NotPromised("the engine says that its updates are not verified")
    for other in trial.stock.ways():
        with trial.stock.order(other, trial.stock.copy) as request:
            found = _evidence(await trial.stock.loaded(request))
        expect(found == wanted, f"evidence {wanted} of the same weights, {other.value}", found)
    with trial.stock.order(way, altered(trial.stock.copy)) as request:
        found = _evidence(await trial.stock.loaded(request))
    same = [rank for rank in wanted if found[rank] == wanted[rank]]
    expect(not same, "other evidence of other weights", f"the same on ranks {same}")


@case(
    "update.is-what-answers",
    "What a successful update has brought is what answers: other weights give other tokens, and the"
    " earlier weights give the earlier tokens again.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
    Need.WEIGHTS,
    Need.COPY,
)
async def answers(trial: Trial) -> None:
    way = trial.stock.any_way()
    await trial.stock.given()
    before = await trial.stock.answer()
    with trial.stock.order(way, altered(trial.stock.copy)) as request:
        await trial.stock.loaded(request)
    other = await trial.stock.answer()
    expect(other != before, "another answer from other weights", repr(other[1]))
    await trial.stock.given()
    await trial.stock.answers_as(before, "from the earlier weights again")


@case(
    "update.retry",
    "A retry of an update that another has followed is told from memory and brings nothing back.",
    Need.DESTRUCTIVE,
    Need.WEIGHTS,
)
async def retry(trial: Trial) -> None:
    trial.stock.require(Way.DISK)
    request = trial.orders.update(trial.stock.path)
    first = await trial.client.told(request)
    completed_of(first)
    await trial.stock.given()
    async with trial.unchanged("a retry of an update that another has followed"):
        again = await trial.client.told(request)
    expect(again.events == first.events, f"the events as before: {first}", again)


@case(
    "update.damaged",
    "A file whose digest is not the one in the order is refused or rolled back on every rank; with"
    " the right digests it is loaded.",
    Need.DESTRUCTIVE,
    Need.WEIGHTS,
    Need.COPY,
)
async def damaged(trial: Trial) -> None:
    trial.stock.require(Way.DISK)
    assert trial.options.weights_copy is not None
    path, files = trial.stock.path, files_of(trial.options.weights_copy)
    right = [
        pb.FileDigest(name=file.name, sha256=hashlib.sha256(file.read_bytes()).digest())
        for file in files
    ]
    await trial.stock.loaded(
        trial.orders.update(path, disk=pb.DiskWeights(path=path, digests=right))
    )
    wrong = [*right[:-1], pb.FileDigest(name=right[-1].name, sha256=bytes(32))]
    await trial.stock.turned_away(
        trial.orders.update(path, disk=pb.DiskWeights(path=path, digests=wrong))
    )


@case(
    "update.nobody-joins",
    "Where a process group of a trainer's is offered, one that nobody opens is refused or fails"
    " within the order's deadline, and the engine serves as before.",
    Need.DESTRUCTIVE,
)
async def nobody_joins(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS)
    if pb.WEIGHT_SOURCE_KIND_DISTRIBUTED not in trial.profile.weight_sources:
        raise NotPromised("the profile does not offer updates from distributed")
    group = sources.distributed(trial.profile.world_size)
    request = trial.orders.load(distributed=group, deadline_ms=3_000)
    await trial.stock.turned_away(request)
    health = await trial.client.health("openengine.v1.Inference")
    expect(health == "SERVING", "Inference SERVING", health)


CASES: tuple[Case, ...] = (
    nowhere,
    allowed_roots,
    links,
    foreign_segment,
    version,
    inline,
    shared_memory,
    evidence,
    answers,
    retry,
    damaged,
    nobody_joins,
)
