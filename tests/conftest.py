"""What holds for every test: one event loop implementation, one thread per torch process."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, Phase, settings

pytest_plugins = ["tests.postgres"]

# Before anything imports torch: tests run in parallel, and their arithmetic has to be the same
# on a machine with more cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts a run in the background has it ignore SIGINT, and every process below it
# would inherit that. With a handler here, they start with the usual disposition.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Slow machines and a busy neighbour are no defects: examples have no time limit of their own,
# pytest-timeout bounds the test as a whole.
settings.register_profile(
    "usual", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# For scripts/mutation-test, which asks only whether a test fails, thousands of times.
settings.register_profile(
    "few",
    settings.get_profile("usual"),
    max_examples=25,
    phases=[Phase.explicit, Phase.generate],
    database=None,
)
settings.register_profile("full", settings.get_profile("usual"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests and the processes that they started have used; scripts/run-rooms shows it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in used)
    terminalreporter.write_line(f"processors {seconds:.0f} s")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio: grpc.aio and SQLAlchemy know no other loop."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps the event loop over all tests of a process. gRPC hands what comes late, of a channel
    that is gone, to the loop that the channel was of; if that is closed, the test that happens to
    run fails of it."""
    yield  # noqa: PT022 (a fixture that is over lets the loop go)
