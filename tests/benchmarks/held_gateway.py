"""`chadburn` whose orders are taken on and then left lying, so that what one costs up to its 202
can be told from what carrying it out costs.

`python -m tests.benchmarks.held_gateway serve …`
"""

from __future__ import annotations

from app.cli import main
from app.operations.runner import Runner


async def _not_started(_self: Runner) -> None:
    pass


def _not_taken(_self: Runner, *_given: object) -> None:
    pass


if __name__ == "__main__":
    Runner.start = _not_started  # type: ignore[method-assign, assignment]
    Runner.take = _not_taken  # type: ignore[method-assign, assignment]
    main()
