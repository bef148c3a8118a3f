"""Adapters through the kit's port on two real ranks: on both or on neither, each with its KV."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from app.domain.commands import (
    Command,
    FlushCaches,
    LoadLora,
    Pause,
    ReleaseResources,
    RestoreResources,
    Resume,
    UnloadLora,
    UpdateWeights,
)
from app.domain.kinds import (
    CacheKind,
    CachePolicy,
    Component,
    ContentPolicy,
    DrainRule,
    OperationKind,
    PauseMode,
    ResourceKind,
)
from app.domain.weight_orders import UnderPause
from app.domain.weight_sources import DiskWeights
from app.enginekit.runtime import Conclusion, Feature, Order, RequestRefused, RuntimeFault
from app.reference_engine.adapter_sources import AdapterPolicy
from app.reference_engine.engine import Engine
from app.reference_engine.errors import RankLost
from app.reference_engine.intake import Intake
from app.reference_engine.runtime import ReferenceRuntime
from app.reference_engine.sources import SourcePolicy
from app.reference_engine.tiny_adapter import write_tiny_adapter
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from app.rpc.openengine.v1 import error_pb2, kv_pb2
from app.rpc.openengine.v1 import generation_pb2 as pb
from tests.reference_engine.adapters import TENSORS, merged_checkpoint
from tests.reference_engine.serving import PATIENCE_S, PROMPT, serving
from tests.reference_engine.test_changes import greedy

pytestmark = pytest.mark.anyio

_NUMBERS = count()
TOKENS = 24
LONG = 250
MOST = 3
GATE_A = "base_model.model.model.layers.1.mlp.gate_proj.lora_A.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_checkpoint(tmp_path_factory.mktemp("other"), 1)


@pytest.fixture(scope="module")
def tone(tiny: Path, folder: Path) -> Path:
    return write_tiny_adapter(tiny, folder / "tone", 1)


@pytest.fixture(scope="module")
def style(tiny: Path, folder: Path) -> Path:
    return write_tiny_adapter(
        tiny, folder / "style", 2, rank=6, use_rslora=True, targets=("q_proj", "down_proj")
    )


@pytest.fixture(scope="module")
async def engine(tiny: Path) -> AsyncIterator[Engine]:
    async with serving(tiny, tensor_parallel_size=2, step_delay_ms=2) as started:
        yield started


def runtime_of(engine: Engine, *roots: Path) -> ReferenceRuntime:
    intake = Intake(
        tokenizer=engine.tokenizer,
        vocab_size=engine.config.vocab_size,
        max_model_len=engine.ready.max_model_len,
        draw_seed=lambda: 0,
    )
    return ReferenceRuntime(
        engine,
        intake,
        model_name="tiny",
        engine_version="0",
        weight_version="v1",
        sources=SourcePolicy(roots=roots),
        adapters=AdapterPolicy(roots=roots[:1], most=MOST),
    )


@pytest.fixture
async def runtime(
    engine: Engine, folder: Path, tiny: Path, other: Path
) -> AsyncIterator[ReferenceRuntime]:
    """Every test leaves the engine open and idle, with its first weights and no adapter."""
    made = runtime_of(engine, folder, tiny, other)
    yield made
    await engine.restart()
    await made.abort(None, "the test is over")
    await carry_out(made, Resume(pause_epoch=1))
    for adapter in engine.holdings.adapters:
        await carry_out(made, UnloadLora(name=adapter.name))
    await carry_out(made, FlushCaches(caches=(CacheKind.PREFIX,)))


def order(command: Command) -> Order:
    return Order(operation_id=f"o{next(_NUMBERS)}", command=command, report=lambda _: None)


async def on_all(runtime: ReferenceRuntime, phase: str, one: Order) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(getattr(runtime, phase)(one, rank) for rank in runtime.ranks))


async def carry_out(runtime: ReferenceRuntime, command: Command) -> Conclusion:
    one = order(command)
    await on_all(runtime, "prepare", one)
    await on_all(runtime, "commit", one)
    return await runtime.conclude(one)


def load(path: Path, name: str | None = None, number: int = 0) -> LoadLora:
    return LoadLora(name=name or path.name, path=str(path), id=number)


async def loaded(runtime: ReferenceRuntime) -> list[str]:
    return [lora.name for lora in (await runtime.observe()).loras]


class Said:
    """A greedy generation, read in the background."""

    def __init__(self, runtime: ReferenceRuntime, adapter: str = "", tokens: int = TOKENS) -> None:
        request = pb.GenerateRequest(
            request_id=f"r{next(_NUMBERS)}", prompt=PROMPT, lora_name=adapter
        )
        request.sampling.temperature = 0.0
        request.stopping.max_tokens = tokens
        self.ids: list[int] = []
        self.last = pb.GenerateResponse()
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._read(runtime, request))

    async def _read(self, runtime: ReferenceRuntime, request: pb.GenerateRequest) -> None:
        async for response in runtime.generate(request):
            self.last = response
            self.ids += [token.token_id for token in response.token.tokens]
            self._news.set()

    async def began(self) -> Said:
        async with asyncio.timeout(PATIENCE_S):
            await self._news.wait()
        return self

    async def end(self) -> Said:
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        assert self.last.WhichOneof("event") == "finished", self.last
        return self


async def said(runtime: ReferenceRuntime, adapter: str = "") -> list[int]:
    return (await Said(runtime, adapter).end()).ids


def expected(
    engine: Engine, checkpoint: Path, adapter: Path, folder: Path, tokens: int = TOKENS
) -> list[int]:
    """What a model says that has the adapter in its weights."""
    target = folder / f"merged{next(_NUMBERS)}"
    merged = merged_checkpoint(checkpoint, adapter, target)
    return greedy(merged, engine.tokenizer.encode(PROMPT), tokens)


async def test_what_is_offered(runtime: ReferenceRuntime, engine: Engine) -> None:
    assert Feature.LORA in runtime.describe().features
    assert runtime.describe().max_loras == MOST
    adapters = {OperationKind.LOAD_LORA, OperationKind.UNLOAD_LORA}
    assert adapters <= runtime.capabilities().operations
    without = runtime_of(engine)
    assert Feature.LORA not in without.describe().features
    assert without.describe().max_loras is None
    assert not adapters & without.capabilities().operations


async def test_each_request_has_its_own(
    runtime: ReferenceRuntime, engine: Engine, tiny: Path, tone: Path, style: Path, tmp_path: Path
) -> None:
    """All at once, in shared steps, each as if its adapter were in the weights."""
    base = await said(runtime)
    concluded = [await carry_out(runtime, load(one)) for one in (tone, style)]
    assert [one.lora for one in concluded] == list((await runtime.observe()).loras)
    assert await loaded(runtime) == ["tone", "style"]
    wanted = {
        "": greedy(tiny, engine.tokenizer.encode(PROMPT), TOKENS),
        "tone": expected(engine, tiny, tone, tmp_path),
        "style": expected(engine, tiny, style, tmp_path),
    }
    assert base == wanted[""]
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    asked = {name: Said(runtime, name) for name in wanted}
    again = {name: Said(runtime, name) for name in wanted}
    for generations in (asked, again):
        for name, one in generations.items():
            assert (await one.end()).ids == wanted[name], name


async def test_on_four_ranks(tiny: Path, tone: Path, folder: Path, tmp_path: Path) -> None:
    async with serving(tiny, tensor_parallel_size=4) as engine:
        runtime = runtime_of(engine, folder)
        await carry_out(runtime, load(tone))
        assert await said(runtime, "tone") == expected(engine, tiny, tone, tmp_path)
        await carry_out(runtime, UnloadLora(name="tone"))
        assert await loaded(runtime) == []


async def test_names_that_are_not_loaded(runtime: ReferenceRuntime, tone: Path) -> None:
    async def refused(name: str) -> None:
        with pytest.raises(RequestRefused) as raised:
            await Said(runtime, name).task
        assert raised.value.code == error_pb2.ERROR_CODE_MODEL_NOT_FOUND

    await refused("tone")
    await carry_out(runtime, load(tone))
    await refused("Tone")
    one = order(UnloadLora(name="tone"))
    await on_all(runtime, "prepare", one)
    await refused("tone")  # it is about to go
    await on_all(runtime, "rollback", one)
    assert await Said(runtime, "tone", 2).end()
    await carry_out(runtime, UnloadLora(name="tone"))
    await refused("tone")
    with pytest.raises(RuntimeFault) as raised:
        await carry_out(runtime, UnloadLora(name="tone"))
    assert (raised.value.reason, raised.value.code) == ("LORA_NOT_FOUND", "NOT_FOUND")


@pytest.mark.parametrize("frozen", [False, True])
async def test_one_that_is_used_stays(
    runtime: ReferenceRuntime, engine: Engine, tiny: Path, tone: Path, tmp_path: Path, frozen: bool
) -> None:
    await carry_out(runtime, load(tone))
    using = await Said(runtime, "tone", LONG).began()
    if frozen:
        await carry_out(runtime, Pause(mode=PauseMode.KEEP))
    one = order(UnloadLora(name="tone"))
    with pytest.raises(RuntimeFault) as raised:
        await on_all(runtime, "prepare", one)
    assert (raised.value.reason, raised.value.retryable) == ("LORA_IN_USE", True)
    await on_all(runtime, "rollback", one)
    if frozen:
        await carry_out(runtime, Resume(pause_epoch=1))
    # The refusal has closed nothing, and the request goes on under its adapter.
    assert len(await said(runtime, "tone")) == TOKENS
    assert (await using.end()).ids == expected(engine, tiny, tone, tmp_path, LONG)
    gone = await carry_out(runtime, UnloadLora(name="tone"))
    assert gone.lora is not None
    assert (gone.lora.name, gone.lora.path) == ("tone", str(tone))


async def test_kv_belongs_to_an_adapter_and_to_its_loading(
    runtime: ReferenceRuntime, engine: Engine, tiny: Path, folder: Path, tone: Path, tmp_path: Path
) -> None:
    def cached(one: Said) -> int:
        return one.last.usage.cached_prompt_tokens

    await carry_out(runtime, load(tone))
    base = await Said(runtime).end()
    first = await Said(runtime, "tone").end()
    assert (cached(base), cached(first)) == (0, 0)
    assert cached(await Said(runtime).end()) == cached(await Said(runtime, "tone").end()) > 0
    # Its blocks go with it, and those of others stay.
    held = (await engine.load()).cached_kv_blocks
    await carry_out(runtime, UnloadLora(name="tone"))
    left = (await engine.load()).cached_kv_blocks
    assert 0 < left < held
    assert cached(await Said(runtime).end()) > 0
    # The same name from the same place, with other content.
    changed = Path(shutil.copytree(tone, folder / "changed"))
    write_tiny_adapter(tiny, changed, 7)
    await carry_out(runtime, load(changed, "tone"))
    second = await Said(runtime, "tone").end()
    assert cached(second) == 0
    assert second.ids == expected(engine, tiny, changed, tmp_path) != first.ids


async def test_cache_events_name_the_adapter(runtime: ReferenceRuntime, tone: Path) -> None:
    told = runtime.kv_events(kv_pb2.SubscribeKvEventsRequest(include_snapshot=True))
    await anext(told)  # the empty cache
    found = await carry_out(runtime, load(tone))
    assert found.lora is not None
    await said(runtime)
    await said(runtime, "tone")
    await carry_out(runtime, UnloadLora(name="tone"))
    await carry_out(runtime, FlushCaches(caches=(CacheKind.PREFIX,)))
    stored: dict[bytes, tuple[str, int]] = {}
    removed: list[bytes] = []
    async for response in told:
        for event in response.batch.events:
            block = event.block_stored
            for each in block.block_hashes:
                stored[each.SerializeToString()] = (block.lora_name, block.lora_id)
            removed += [each.SerializeToString() for each in event.block_removed.block_hashes]
        if any(event.HasField("all_blocks_cleared") for event in response.batch.events):
            break
    assert set(stored.values()) == {("", 0), ("tone", found.lora.id)}
    # Those of the adapter are told to be gone with it, and no others.
    assert {stored[one] for one in removed} == {("tone", found.lora.id)}
    assert len(removed) == sum(1 for name, _ in stored.values() if name)


async def test_an_adapter_too_many_evicts_the_one_idle_longest(
    runtime: ReferenceRuntime, tiny: Path, folder: Path
) -> None:
    made = [write_tiny_adapter(tiny, folder / f"e{n}", n, rank=2) for n in range(5)]
    numbers = []
    for each in made[:MOST]:
        first = await carry_out(runtime, load(each))
        assert first.evicted == ()
        assert first.lora is not None
        numbers.append(first.lora.id)
    await Said(runtime, "e0", 2).end()
    using = await Said(runtime, "e1", LONG).began()
    concluded = await carry_out(runtime, load(made[3]))
    assert [gone.name for gone in concluded.evicted] == ["e2"]
    assert await loaded(runtime) == ["e0", "e1", "e3"]
    assert concluded.lora is not None
    assert concluded.lora.id > max(numbers)  # numbers are not used again
    busy = [using, await Said(runtime, "e0", LONG).began(), await Said(runtime, "e3", LONG).began()]
    one = order(load(made[4]))
    with pytest.raises(RuntimeFault) as raised:
        await on_all(runtime, "prepare", one)
    assert (raised.value.reason, raised.value.retryable) == ("LORA_LIMIT", True)
    await on_all(runtime, "rollback", one)
    for generation in busy:
        await generation.end()
    with pytest.raises(RuntimeFault) as raised:
        await carry_out(runtime, load(made[4], number=concluded.lora.id))
    assert (raised.value.reason, raised.value.code) == ("LORA_ID_TAKEN", "ALREADY_EXISTS")


async def test_rolled_back_from_every_phase(
    runtime: ReferenceRuntime, engine: Engine, tiny: Path, folder: Path, tone: Path
) -> None:
    """The ones that had to make room, too."""
    made = [write_tiny_adapter(tiny, folder / f"r{n}", n, rank=2) for n in range(MOST)]
    for each in made:
        await carry_out(runtime, load(each))
    before = (await loaded(runtime), engine.holdings, await said(runtime, "r0"))
    for command in (load(tone), UnloadLora(name="r0")):
        for phases in ((), ("prepare",), ("prepare", "commit")):
            one = order(command)
            for phase in phases:
                await on_all(runtime, phase, one)
            await on_all(runtime, "rollback", one)
            await on_all(runtime, "rollback", one)
            found = (await loaded(runtime), engine.holdings, await said(runtime, "r0"))
            assert found == before


async def test_a_load_that_can_not_be_leaves_all_as_it_was(
    runtime: ReferenceRuntime, engine: Engine, folder: Path, tone: Path
) -> None:
    damaged = Path(shutil.copytree(tone, folder / "damaged"))
    tensors = load_file(damaged / TENSORS)
    tensors[GATE_A] = tensors[GATE_A][:, 1:].contiguous()
    save_file(tensors, damaged / TENSORS, {"format": "pt"})
    before = engine.holdings
    for path, named in ((damaged, GATE_A), (folder / "nowhere", "not there")):
        one = order(load(path))
        with pytest.raises(RuntimeFault, match=named) as raised:
            await on_all(runtime, "prepare", one)
        assert (raised.value.reason, raised.value.code) == ("ADAPTER_REFUSED", "INVALID_ARGUMENT")
        await on_all(runtime, "rollback", one)
    assert engine.holdings == before
    await carry_out(runtime, load(tone))


async def test_new_weights_under_adapters(
    runtime: ReferenceRuntime, engine: Engine, tiny: Path, other: Path, tone: Path, tmp_path: Path
) -> None:
    """They stay, and change what the new weights compute; KV of the old ones goes."""

    async def update(source: Path) -> None:
        await carry_out(
            runtime,
            UpdateWeights(
                source=DiskWeights(path=str(source)),
                weight_version=source.name,
                cache_policy=CachePolicy.FLUSH,
                components=(Component.TARGET,),
                admission=UnderPause(),
            ),
        )

    await carry_out(runtime, load(tone))
    first = await said(runtime, "tone")
    await update(other)
    assert await loaded(runtime) == ["tone"]
    assert await said(runtime, "tone") == expected(engine, other, tone, tmp_path) != first
    await update(tiny)
    assert await said(runtime, "tone") == first


async def test_released_with_the_weights(
    runtime: ReferenceRuntime, engine: Engine, tiny: Path, tone: Path
) -> None:
    kinds = (ResourceKind.WEIGHTS,)

    async def release(content: ContentPolicy) -> Conclusion:
        command = ReleaseResources(resources=kinds, content=content, drain=DrainRule.WAIT)
        return await carry_out(runtime, command)

    bare = sum(one.bytes_before for one in (await release(ContentPolicy.PRESERVE)).memory)
    await carry_out(runtime, RestoreResources(resources=kinds, release_epoch=1))
    await carry_out(runtime, load(tone))
    before = await said(runtime, "tone")
    memory = (await release(ContentPolicy.PRESERVE)).memory
    assert sum(one.bytes_before for one in memory) > bare
    assert await loaded(runtime) == ["tone"]
    await carry_out(runtime, RestoreResources(resources=kinds, release_epoch=1))
    assert await said(runtime, "tone") == before
    # What is discarded is gone, and an update of the weights does not bring it back.
    await release(ContentPolicy.DISCARD)
    assert await loaded(runtime) == []
    await carry_out(runtime, RestoreResources(resources=kinds, release_epoch=1))
    one = order(load(tone))
    with pytest.raises(RuntimeFault, match="weights are not there"):
        await on_all(runtime, "prepare", one)
    await on_all(runtime, "rollback", one)
    command = UpdateWeights(
        source=DiskWeights(path=str(tiny)),
        weight_version="v1",
        cache_policy=CachePolicy.FLUSH,
        components=(Component.TARGET,),
        admission=UnderPause(),
    )
    await carry_out(runtime, command)
    await carry_out(runtime, load(tone))
    assert await said(runtime, "tone") == before


async def test_found_again_after_a_rank_was_lost(
    runtime: ReferenceRuntime, engine: Engine, tiny: Path, folder: Path, tone: Path
) -> None:
    passing = write_tiny_adapter(tiny, folder / "passing", 3)
    for one in (tone, passing):
        await carry_out(runtime, load(one))
    before = await said(runtime, "tone")
    write_tiny_adapter(tiny, passing, 4)  # other bytes are another adapter
    os.kill(engine.pids[1], signal.SIGKILL)
    with pytest.raises(RankLost):
        await engine.probe()
    await engine.restart()
    assert await loaded(runtime) == ["tone"]
    assert await said(runtime, "tone") == before
