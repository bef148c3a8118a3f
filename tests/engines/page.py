"""docs/engines.md, from what is offered and how it was tried."""

from __future__ import annotations

from app.domain.kinds import OperationKind as Kind
from tests.engines.evidence import Means, Run, runs, tried
from tests.engines.offers import ROOT, ways

_WORDS = {
    Means.NOTHING: "untried",
    Means.DOUBLE: "double",
    Means.REPLAY: "replay",
    Means.RUNTIME: "runtime",
    Means.REAL: "**run**",
}
_HEAD = """# Which order of which engine, and how it was tried

Written by `scripts/gen-engine-matrix`, and held to the code by a test. What is offered is read off
the code that offers it; how it was tried, off the tests that give the order and demand that it
succeeds. What an engine offers in the end depends on how it was started, and on what an operator
allows.

| | |
|---|---|
| **run** | carried out on the real engine, in the run that is named below; of the reference engine: in every run of the tests |
| runtime | carried out by the real server around callbacks of the tests' own: no engine was behind it |
| replay | carried out on a double, which recorded calls of the real server are replayed against |
| double | carried out on a double that was written from documents: nothing of the real one was met |
| untried | offered, and no test is known to give this order and see it succeed |
| | not offered |

"""  # noqa: E501 - rows of a table


def document() -> str:
    recorded = runs()
    columns = [(way, tried(way, recorded)) for way in ways()]
    lines = [
        "| order | " + " | ".join(way.name for way, _ in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for kind in Kind:
        cells = [_WORDS[found[kind]] if kind in found else "" for _, found in columns]
        if any(cells):
            lines.append(f"| {kind.value.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return _HEAD + "\n".join(lines) + "\n\n" + _runs(recorded)


def _runs(recorded: dict[str, Run]) -> str:
    lines = [
        "## Runs against real engines",
        "",
        "| run by | against | on | tests passed | conformance cases passed |",
        "|---|---|---|---|---|",
    ]
    for run in recorded.values():
        if not run.tests:  # none was recorded yet
            continue
        counts = f"{len(run.tests)} | {len(run.cases)}"
        lines.append(f"| `make test-{run.name}` | {run.against} | {run.on} | {counts} |")
    pages = sorted(path.name for path in (ROOT / "docs").glob("*-comparison*.md"))
    links = ", ".join(f"[{page.removesuffix('.md')}]({page})" for page in pages)
    said = "What the endpoint layers answer beside recorded answers, request by request:"
    lines += ["", f"{said} {links}.", ""]
    return "\n".join(lines)
