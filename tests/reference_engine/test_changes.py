"""Release, restore and update on two ranks: on all of them or on none."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.reference_engine import change_orders as c
from app.reference_engine import messages as m
from app.reference_engine.assembly import build_rank
from app.reference_engine.change import ChangeOutcome
from app.reference_engine.engine import Engine
from app.reference_engine.errors import OrderRejected, RankLost
from app.reference_engine.limits import CoreSettings
from app.reference_engine.sources import InlineTensor, SourcePolicy, discard
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from tests.reference_engine.ranks import alive
from tests.reference_engine.serving import PROMPT, ask, serving

pytestmark = pytest.mark.anyio

POLICY_PREFIX = "chadburn-test-"
FILE = "model.safetensors"
GATE = "model.layers.1.mlp.gate_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
LONG = 300
KV_BLOCKS = 4096


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another version of the small model."""
    return ensure_tiny_checkpoint(tmp_path_factory.mktemp("other"), 1)


@pytest.fixture(scope="module")
async def two(tiny: Path) -> AsyncIterator[Engine]:
    async with serving(
        tiny, tensor_parallel_size=2, kv_blocks=KV_BLOCKS, step_delay_ms=2
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
async def left_as_found(two: Engine, tiny: Path) -> AsyncIterator[None]:
    """Whole, with the first version, open and idle."""
    yield
    await two.restart()
    await two.abort(None, "the test is over")
    if two.holdings.released:
        await two.carry_out(restore(*two.holdings.released))
    await two.carry_out(update(tiny))
    await two.set_gate(m.SetGate(gate=m.Gate.OPEN))
    assert two.open_requests == ()


def disk(directory: Path, sha256: str | None = None) -> c.DiskSource:
    digests = {} if sha256 is None else {FILE: sha256}
    return SourcePolicy(roots=(directory,)).disk(str(directory), digests)


def update(
    source: Path | c.SharedSource, *, flush: bool = True, finite: bool = False
) -> c.PrepareUpdate:
    return c.PrepareUpdate(
        change_id=uuid4().hex,
        source=disk(source) if isinstance(source, Path) else source,
        flush=flush,
        check_finite=finite,
    )


def release(*resources: c.Resource, preserve: bool) -> c.PrepareRelease:
    return c.PrepareRelease(change_id=uuid4().hex, resources=resources, preserve=preserve)


def restore(*resources: c.Resource) -> c.PrepareRestore:
    return c.PrepareRestore(change_id=uuid4().hex, resources=resources)


def greedy(checkpoint: Path, prompt_ids: tuple[int, ...], count: int) -> list[int]:
    """What a fresh engine on that checkpoint says, here in this process."""
    core = build_rank(checkpoint, CoreSettings(torch_threads=1, kv_blocks=64)).core(CoreSettings())
    core.apply(
        m.Submit(
            m.GenerationRequest(
                request_id="fresh",
                prompt_ids=prompt_ids,
                sampling=m.Sampling(temperature=0.0),
                stopping=m.Stopping(max_tokens=count),
            )
        )
    )
    found: list[int] = []
    while core.runnable:
        for report in core.step():
            if isinstance(report, m.Tokens):
                found += [token.token_id for token in report.tokens]
    return found


async def said(engine: Engine, count: int = 24) -> list[int]:
    return (await ask(engine, uuid4().hex, max_tokens=count, temperature=0.0).whole()).ids


def missing(engine: Engine) -> bool:
    return engine.holdings.weights_missing


async def freeze(engine: Engine) -> None:
    await engine.set_gate(m.SetGate(gate=m.Gate.FROZEN))


async def open_again(engine: Engine) -> None:
    await engine.set_gate(m.SetGate(gate=m.Gate.OPEN))


async def test_each_rank_tells_what_it_holds_and_what_is_kept(two: Engine) -> None:
    load, before = await two.load_and_memory()
    assert load.memory == before[0]
    assert len(before) == 2
    weights = [one.weights for one in before]
    assert all(one.weights and one.kv_cache and not one.kept for one in before)
    await two.carry_out(release(c.Resource.WEIGHTS, preserve=True))
    _, released = await two.load_and_memory()
    assert [(one.weights, one.kept) for one in released] == [(0, held) for held in weights]
    assert [one.kv_cache for one in released] == [one.kv_cache for one in before]
    for now, then in zip(released, before, strict=True):
        assert 0 < now.in_use < then.in_use + then.kv_cache, "of the process, and in bytes"


async def test_update_from_disk_is_the_other_version_exactly(
    two: Engine, tiny: Path, other: Path
) -> None:
    prompt = two.tokenizer.encode(PROMPT)
    assert await said(two) == greedy(tiny, prompt, 24)
    before = two.holdings
    digest = hashlib.sha256((other / FILE).read_bytes()).hexdigest()
    order = c.PrepareUpdate(
        change_id="u", source=disk(other, digest), flush=True, check_finite=True
    )
    outcome = await two.carry_out(order)
    assert await said(two) == greedy(other, prompt, 24)
    assert outcome.committed.blocks_freed > 0
    sums = tuple(one.sha256 for one in outcome.prepared)
    assert two.holdings.sha256 == sums != before.sha256
    assert sums[0] != sums[1]
    assert all(one.tensors > 0 and one.bytes > 0 for one in outcome.prepared)
    # Back again: the checksums are those of the beginning.
    await two.carry_out(update(tiny))
    assert two.holdings.sha256 == before.sha256


@pytest.mark.parametrize("through", ["inline", "shared"])
async def test_update_by_tensors(two: Engine, other: Path, through: str) -> None:
    policy = SourcePolicy(shared_prefix=POLICY_PREFIX)
    words = {torch.float32: "F32", torch.bfloat16: "BF16"}
    source = policy.inline(
        [
            InlineTensor(name, words[tensor.dtype], tuple(tensor.shape), tensor.numpy().tobytes())
            for name, tensor in load_file(other / FILE).items()
        ]
    )
    if through == "shared":
        source = policy.shared(Path(source.path).name, source.tensors)
    try:
        await two.carry_out(update(source))
    finally:
        discard(source)
    prompt = two.tokenizer.encode(PROMPT)
    assert await said(two) == greedy(other, prompt, 24)
    # A lost rank takes such weights along: nobody has them any more, and that is said.
    os.kill(two.pids[1], signal.SIGKILL)
    with pytest.raises(RankLost):
        await two.probe()
    await two.restart()
    assert two.holdings.weights_missing
    with pytest.raises(OrderRejected, match="not there"):
        await two.probe()
    await two.carry_out(update(other))
    assert await said(two) == greedy(other, prompt, 24)


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        tensors = {name: one.clone() for name, one in load_file(directory / FILE).items()}
        change(tensors)
        save_file(tensors, directory / FILE, {"format": "pt"})

    return damage


def truncate(directory: Path) -> None:
    os.truncate(directory / FILE, (directory / FILE).stat().st_size - 4)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN][0, -1] = torch.nan  # a column of the second rank


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, r"rank \d .*not whole"),
        (edit(lambda t: t.pop(GATE)), rf"rank \d .*no tensor '{GATE}'"),
        (edit(lambda t: t.update({"extra.weight": torch.ones(2)})), "extra.weight"),
        (edit(lambda t: t.update({GATE: t[GATE][:-1].clone()})), f"{GATE}.*shape"),
        (edit(lambda t: t.update({GATE: t[GATE].to(torch.int8)})), f"{GATE}.*int8"),
        (edit(poison), f"rank 1 .*{DOWN}.*finite"),
    ],
)
async def test_what_can_not_be_used_changes_nothing(
    two: Engine,
    other: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    named: str,
) -> None:
    before, tokens = two.holdings, await said(two)
    damaged = Path(shutil.copytree(other, tmp_path / "damaged"))
    damage(damaged)
    with pytest.raises(OrderRejected, match=named):
        await two.carry_out(update(damaged, finite=True))
    assert two.holdings == before
    assert await said(two) == tokens


async def test_digest_that_differs(two: Engine, other: Path) -> None:
    order = c.PrepareUpdate(change_id="u", source=disk(other, "0" * 64), flush=True)
    with pytest.raises(OrderRejected, match="sha256"):
        await two.carry_out(order)


async def test_rollback_is_proved_by_checksums(two: Engine, other: Path) -> None:
    """From every phase, also after the commit, and twice."""
    before, tokens = two.holdings.sha256, await said(two)
    for committed in (False, True):
        change = two.change(update(other))
        for rank in two.ranks:
            await change.prepare(rank)
        if committed:
            for rank in two.ranks:
                await change.commit(rank)
            with pytest.raises(OrderRejected, match="not there"):
                await two.probe()  # between commit and settle nothing is computed
        for _ in range(2):
            undone = [await change.rollback(rank) for rank in two.ranks]
            assert tuple(one.weights_sha256 for one in undone) == before
    assert await said(two) == tokens
    settled = two.change(update(other))
    for rank in two.ranks:
        await settled.prepare(rank)
    for rank in two.ranks:
        await settled.commit(rank)
    await settled.conclude()
    with pytest.raises(OrderRejected, match="given up"):
        await settled.rollback(0)


async def test_requests_go_on_while_an_update_is_prepared(
    two: Engine, tiny: Path, other: Path
) -> None:
    asked = await ask(two, "runs", max_tokens=LONG, temperature=0.0).after(1)
    change = two.change(update(other))
    await asyncio.gather(*(change.prepare(rank) for rank in two.ranks))
    at = len(asked.answer.tokens)
    await asked.after(at + 3)
    for rank in two.ranks:
        await change.rollback(rank)
    expected = greedy(tiny, two.tokenizer.encode(PROMPT), LONG)
    assert (await asked.whole()).ids == expected


async def test_frozen_requests_change_their_version_at_one_token(
    two: Engine, tiny: Path, other: Path
) -> None:
    """Before it as the old version, after it as the new one on the same prefix."""
    prompt = two.tokenizer.encode(PROMPT)
    asked = await ask(two, "frozen", max_tokens=60, temperature=0.0).after(5)
    await freeze(two)
    outcome = await two.carry_out(update(other))
    (switched,) = outcome.committed.switched
    await open_again(two)
    ids = (await asked.whole()).ids
    at = switched.output_tokens
    assert (switched.request_id, 5 <= at < 60) == ("frozen", True)
    assert ids[:at] == greedy(tiny, prompt, at)
    assert ids[at:] == greedy(other, (*prompt, *ids[:at]), 60 - at)


@pytest.mark.parametrize("phase", ["prepare", "commit", "settle"])
async def test_rank_killed_during_an_update(two: Engine, other: Path, phase: str) -> None:
    """In whichever phase: it fails, and a restart goes back to the last version that was settled
    on every rank, byte for byte."""
    before, tokens, pids = two.holdings, await said(two), two.pids
    change = two.change(update(other))
    for name, step in (("prepare", change.prepare), ("commit", change.commit)):
        if name == phase:
            break
        await asyncio.gather(*(step(rank) for rank in two.ranks))
    os.kill(pids[1], signal.SIGSTOP)
    steps = {"prepare": change.prepare, "commit": change.commit}
    if phase == "settle":
        ended: asyncio.Task[object] = asyncio.create_task(change.conclude())
    else:
        await steps[phase](0)
        ended = asyncio.create_task(steps[phase](1))
    await asyncio.sleep(0)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankLost):
        await ended
    for rank in two.ranks:
        with pytest.raises(RankLost, match="rank 1"):
            await change.rollback(rank)
    await two.restart()
    assert not any(map(alive, pids))
    assert two.holdings == before
    assert await said(two) == tokens


async def test_restart_after_an_update_has_the_new_version_or_none(
    two: Engine, other: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(other, tmp_path / "copied"))
    await two.carry_out(update(copied))
    tokens = await said(two)
    for gone in (False, True):
        if gone:
            edit(lambda t: t[GATE].add_(1.0))(copied)
        os.kill(two.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost):
            await two.probe()
        await two.restart()
        assert two.holdings.weights_missing is gone
        if not gone:
            assert await said(two) == tokens


def returned(outcome: ChangeOutcome) -> list[float]:
    return [(one.before_memory - one.after_memory) / one.held for one in outcome.settled]


async def test_kv_cache_is_given_back_and_its_prefixes_are_gone(two: Engine) -> None:
    tokens = await said(two)
    outcome = await two.carry_out(release(c.Resource.KV_CACHE, preserve=False))
    assert all(share > 0.9 for share in returned(outcome)), outcome.settled
    assert all(one.held > 30 << 20 and one.kept == 0 for one in outcome.settled)
    assert outcome.committed.blocks_freed > 0
    assert two.holdings.released == {c.Resource.KV_CACHE: False}
    with pytest.raises(OrderRejected, match="not there"):
        await two.probe()
    with pytest.raises(OrderRejected, match="released already"):
        await two.carry_out(release(c.Resource.KV_CACHE, preserve=False))
    await two.carry_out(restore(c.Resource.KV_CACHE))
    again = await ask(two, "again", max_tokens=24, temperature=0.0).whole()
    assert again.ids == tokens
    assert again.finished.usage.cached_prompt_tokens == 0


async def test_preserved_content_comes_back_to_the_bit(two: Engine) -> None:
    """In two stages, with a request that is frozen in between and goes on as if nothing was."""
    expected = await said(two, 60)
    await two.flush_prefix_cache()
    before = two.holdings.sha256
    asked = await ask(two, "frozen", max_tokens=60, temperature=0.0).after(5)
    with pytest.raises(OrderRejected, match="in flight"):
        await two.carry_out(release(c.Resource.WEIGHTS, preserve=True))
    await freeze(two)
    with pytest.raises(OrderRejected, match="frozen"):
        await two.carry_out(release(c.Resource.KV_CACHE, preserve=False))
    outcome = await two.carry_out(release(c.Resource.WEIGHTS, c.Resource.KV_CACHE, preserve=True))
    assert all(one.kept == one.held for one in outcome.settled), outcome
    assert all(share > 0.9 for share in returned(outcome)), outcome.settled
    await two.carry_out(restore(c.Resource.WEIGHTS))
    assert two.holdings.released == {c.Resource.KV_CACHE: True}
    await two.carry_out(restore(c.Resource.KV_CACHE))
    assert two.holdings.sha256 == before
    await open_again(two)
    assert (await asked.whole()).ids == expected


async def test_discarded_weights_are_missing_until_an_update(
    two: Engine, tiny: Path, other: Path
) -> None:
    await two.carry_out(release(c.Resource.WEIGHTS, preserve=False))
    assert missing(two)
    with pytest.raises(OrderRejected, match="restore them first"):
        await two.carry_out(update(other))
    await two.carry_out(restore(c.Resource.WEIGHTS))
    assert missing(two)
    await two.carry_out(update(other))
    assert not missing(two)
    assert await said(two) == greedy(other, two.tokenizer.encode(PROMPT), 24)


async def test_what_was_released_is_released_again_after_a_loss(two: Engine) -> None:
    tokens = await said(two)
    await two.carry_out(release(c.Resource.WEIGHTS, preserve=True))
    await two.carry_out(release(c.Resource.KV_CACHE, preserve=False))
    before = two.holdings
    os.kill(two.pids[1], signal.SIGKILL)
    with pytest.raises(RankLost):
        await two.load()
    await two.restart()
    assert two.holdings == before
    with pytest.raises(OrderRejected, match="not there"):
        await two.probe()
    await two.carry_out(restore(c.Resource.WEIGHTS, c.Resource.KV_CACHE))
    assert await said(two) == tokens
