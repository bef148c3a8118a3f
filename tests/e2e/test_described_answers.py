"""Whatever is asked of a running gateway with a real engine, the answer is one that the OpenAPI
document describes: status, form and body; never 500, another 5xx only where it is declared."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.generated import Prober, Tried
from tests.e2e.processes import Demo, cleaned

# For each operation and each of the two ways to make a case.
FEW, MANY = 3, 70
# The engine is thrown away afterwards: it is paused, emptied, loaded and reshaped at random.
ENGINE = ("--step-delay-ms=0", "--tensor-parallel-size=1")


def probed(folder: Path, examples: int, seed: int) -> Tried:
    print(f"seed {seed}")
    demo = Demo.begin(folder, *ENGINE)
    with cleaned(demo.process):
        demo.ready = demo.process.ready(folder / "ready.json")
        prober = Prober(
            demo.ready["base_url"],
            demo.ready["tokens"]["operator"],
            demo.ready["engine"],
            demo.ready["next_weights"],
            seed,
        )
        try:
            prober.prepare()
            tried = prober.probe_all(examples)
        finally:
            prober.close()
            (folder / "answers.json").write_text(json.dumps(prober.tried.statuses, indent=1))
        assert demo.process.stop() == 0, demo.logs()
    assert not tried.wrong, f"seed {seed}\n" + "\n\n".join(tried.wrong)
    return tried


def taken(tried: Tried) -> int:
    """Orders that were taken on: what lies behind the schema was reached."""
    return sum(
        counted[202] + counted[200]
        for label, counted in tried.statuses.items()
        if label.startswith("POST /v1/engines/{engine}/")
    )


def test_every_answer_is_as_described(tmp_path: Path) -> None:
    tried = probed(tmp_path / "demo", FEW, seed=7)
    assert tried.cases >= 200
    assert taken(tried) >= 5


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_every_answer_is_as_described_over_thousands_of_cases(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    while total["cases"] < 5000:
        # A new engine each time, since some orders leave one that takes no more.
        seed = random.SystemRandom().getrandbits(32)
        began = time.monotonic()
        tried = probed(tmp_path / f"demo-{seed}", MANY, seed)
        total["cases"] += tried.cases
        total["orders"] += taken(tried)
        print(f"{tried.cases} cases in {time.monotonic() - began:.0f} s")
    assert total["orders"] >= 60
