"""Tokens a second while decoding, beside what transformers generates on the same checkpoint.

`python -m tests.benchmarks.decoding FOLDER` prints JSON, in a process of its own: torch and its
threads are as the engine's.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.checkpoints import SMALL, checkpoint
from tests.benchmarks.figures import Figure
from tests.e2e.processes import environment

BATCH = 8
PROMPT = 64
TOKENS = 128
ROUNDS = 3
AIM = 1.5
HOW = (
    f"{BATCH} greedy requests with prompts of {PROMPT} tokens and {TOKENS} tokens of output, "
    "float32, torch with one thread on both sides. Ours: one rank process and its front end, from "
    "the first token of the last request to the last token; transformers: `generate` on the same "
    "prompts as one batch, less the time of a `generate` of one token. "
    f"Median of {ROUNDS} rounds, in turns."
)


def figures(folder: Path) -> list[Figure]:
    found = []
    for name, size, why in (
        ("the engine's own small checkpoint", None, ""),
        ("24 million parameters", SMALL, _BOUND),
    ):
        found.append(_figure(name, checkpoint(folder, size), why))
    return found


_BOUND = (
    "with more parameters both sides spend nearly all their time in the same matrix kernels, "
    "which neither calls better than the other"
)


def _figure(name: str, where: Path, why: str) -> Figure:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.decoding", str(where)],
        env=environment(), stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    rates = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = rates["ours"], rates["transformers"]
    return Figure(
        f"decoding, batch of {BATCH}, {name}",
        f"{ours:.0f} tokens/s", f"{theirs:.0f} tokens/s (transformers)", f"{ours / theirs:.2f}",
        f"≥ {AIM}", ours / theirs >= AIM, HOW, why,
    )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    print(json.dumps(asyncio.run(_rates(folder))))


async def _rates(folder: Path) -> dict[str, float]:
    import torch
    import transformers

    from app.reference_engine.engine import Engine
    from app.reference_engine.limits import CoreSettings

    torch.set_num_threads(1)
    untyped: Any = transformers
    untyped.utils.logging.disable_progress_bar()
    model = untyped.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = CoreSettings(torch_threads=1, max_batched_tokens=BATCH * PROMPT)
    engine = await Engine.start(folder, settings)
    ours, theirs = [], []
    try:
        for number in range(ROUNDS + 1):
            rates = await _ours(engine, number), _theirs(model, number)
            if number:  # the first round warms up
                ours.append(rates[0])
                theirs.append(rates[1])
    finally:
        await engine.close()
    return {"ours": statistics.median(ours), "transformers": statistics.median(theirs)}


def _prompt(number: int, row: int) -> list[int]:
    """Another one each time, so that no prefix is found."""
    return [2 + (number * 31 + row * 7 + at) % 250 for at in range(PROMPT)]


async def _ours(engine: Any, number: int) -> float:
    from app.reference_engine import messages as m

    began: list[float] = []

    async def one(row: int) -> int:
        request = m.GenerationRequest(
            request_id=f"{number}-{row}",
            prompt_ids=tuple(_prompt(number, row)),
            sampling=m.Sampling(temperature=0.0),
            stopping=m.Stopping(max_tokens=TOKENS, ignore_eos=True),
        )
        count = 0
        async for report in engine.generate(request):
            if isinstance(report, m.Tokens):
                if not count:
                    began.append(time.perf_counter())
                count += len(report.tokens)
        return count - 1

    counts = await asyncio.gather(*(one(row) for row in range(BATCH)))
    return sum(counts) / (time.perf_counter() - max(began))


def _theirs(model: Any, number: int) -> float:
    import torch

    ids = torch.tensor([_prompt(number, row) for row in range(BATCH)])

    def took(count: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=1,
                min_new_tokens=count, max_new_tokens=count,
            )  # fmt: skip
        return time.perf_counter() - began

    return BATCH * (TOKENS - 1) / (took(TOKENS) - took(1))


if __name__ == "__main__":
    main()
