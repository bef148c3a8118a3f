"""How each page's commands are tried, and which of them are not run and why.

A page is typed into a shell beside a running demo, or beside a gateway of its own that has the
settings which the page shows. What is in `ELSEWHERE` is not: each entry says why, and what tries it
instead. Every `chadburn` command, run or not, is parsed by the real parser, and every `make` target
and script is looked for (test_pages.py).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tests.e2e.page_shell import Behind, Ends, Told
from tests.e2e.pages import Command

ANY = "*"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Commands of `page` (or of any) that begin with `text`. `by`: what tries them instead; files
    below the project's root."""

    page: str
    text: str
    why: str
    by: tuple[str, ...]

    def covers(self, command: Command) -> bool:
        return self.page in (ANY, command.page) and f"{command.text}\n".startswith(self.text)


@dataclass(frozen=True, slots=True)
class Way:
    """`before`, `after`: typed too, and no part of the page. `words`: of the page, and what is
    meant by them here. `apart`: each block has a shell of its own, and what runs ends with it.
    `gateway`: beside one of its own, with these settings; else beside the demo. `weights`: folders
    of the machine that hold a small checkpoint."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    words: tuple[tuple[str, str], ...] = ()
    told: tuple[Told, ...] = ()
    behind: tuple[Behind, ...] = ()
    ends: tuple[Ends, ...] = ()
    apart: bool = False
    gateway: str | None = None
    weights: tuple[str, ...] = ()


_SOON = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
# Within what the demo lets trainers have, and not where other tests are.
_TRAINERS_PORT = f"--port={random.randint(29550, 29599)}"
_GENERATES = 'chadburn generate "the bridge rings" --max-tokens 300'
_LEDGER = ".data/demo/gateway/chadburn.db"
_SEALS = "SELECT count(*) FROM audit_seals"
_ONE = "chadburn flush demo --wait --json"
_ITS_ID = Told("ID", r'"id":\s*"([0-9a-f-]{36})"')
_LISTENS = "--admin-address 127.0.0.1:8778 --inference-address 127.0.0.1:8777"
_CREDENTIAL = """
[engine_credentials.llm-sidecar]
bearer_file = "/etc/chadburn/sidecar.token"
bound_to = ["127.0.0.1"]
"""


def _sidecar(*weights: str) -> Way:
    """Beside a gateway that knows its token, at ports of its own."""
    listens = (("--data-dir", f"{_LISTENS} --data-dir"),)
    address = Told("ADDRESS", r"admin (\S+),")
    return Way(words=listens, told=(address,), gateway=_CREDENTIAL, weights=weights)


WAYS: dict[str, Way] = {
    "README.md": Way(
        told=(
            Told("01a22941-…", r"location: /v1/operations/(\S+)"),
            Told('"r3"', r'"revision":(\d+)', r'"r\1"'),
            Told('"pause_epoch":2', r'("pause_epoch":\d+)'),
        ),
        behind=(
            Behind(_GENERATES, "."),
            Behind('chadburn generate "the bridge rings" --max-tokens 20 &', None),
        ),
    ),
    "docs/getting-started.md": Way(
        behind=(
            Behind(_GENERATES, "."),
            Behind("curl -sSN -H @.data/demo/operator.header", "event: snapshot"),
        ),
    ),
    "docs/adapters.md": Way(
        words=(("/home/you/chadburn", "…"),),
        after=("chadburn lora unload demo tone --wait",),
    ),
    "docs/api-by-example.md": Way(words=(("2026-12-31T18:00:00Z", _SOON),)),
    "docs/audit.md": Way(
        before=(f"until [ $(sqlite3 {_LEDGER} '{_SEALS}') -gt 0 ]; do sleep 1; done", _ONE),
        words=(("audit verify", "audit verify --config .data/demo/gateway.toml"),),
    ),
    "docs/backup-and-restore.md": Way(
        words=(("sqlite3 chadburn.db", f"sqlite3 {_LEDGER}"),),
        after=(
            "CHADBURN_DATABASE_URL=sqlite+aiosqlite:///$PWD/backup.db chadburn db check"
            " --config .data/demo/gateway.toml",
        ),
    ),
    "docs/cli.md": Way(),
    "docs/conformance.md": Way(
        words=(
            (
                "--insecure-loopback",
                "--insecure-loopback --admin-address 127.0.0.1:8768"
                " --inference-address 127.0.0.1:8767",
            ),
            ("--destructive", "--destructive --case 'pause.d*'"),
        ),
        apart=True,
    ),
    "docs/dynamo.md": _sidecar("models/MODEL", "weights/step-800"),
    "docs/http-api.md": Way(),
    "docs/migration.md": Way(),
    "docs/operations-and-states.md": Way(
        before=(_ONE,),
        words=(
            ("2026-12-27T08:00:00Z", _SOON),
            ("freeze e1", "freeze demo"),
            ("thaw e1", "thaw demo"),
        ),
        told=(_ITS_ID,),
        # It has ended. One that may be settled is in test_settling.py.
        ends=(Ends("chadburn ops settle", 6),),
    ),
    "docs/policy.md": Way(
        words=(
            (
                ", …}'",
                ', "aud": "chadburn-admin", "client_id": "ada", "exp": 4102444800, "iat": 1,'
                ' "jti": "one", "scope": "admin:read", "groups": ["search"]}\'',
            ),
            ("draft.toml", "policy.toml"),
            ("/etc/chadburn/policy.toml", "policy.toml"),
            ('audience = "chadburn"', 'audience = "chadburn-admin"'),
        ),
        ends=(
            Ends("chadburn policy explain -", 6),  # the demo's operator meets none of the rules
            Ends("chadburn policy explain '{", 5),
        ),
    ),
    "docs/prefill-decode.md": Way(
        words=(("engine-1", "demo"),),
        after=("chadburn reconfigure demo --role aggregated --drain wait --wait",),
    ),
    "docs/profiles.md": Way(
        told=(Told("PROFILE", r"([0-9a-f]{8}-[0-9a-f-]{27})"),),
        behind=(Behind(_GENERATES, "."),),
    ),
    "docs/runbook.md": Way(before=(_ONE,), told=(_ITS_ID,)),
    "docs/sglang-endpoints.md": Way(),
    "docs/sglang.md": _sidecar("models/llm", "weights/step-800"),
    "docs/sglang-sidecar.md": _sidecar("models/llm", "weights/step-800"),
    "docs/train-and-update.md": Way(
        words=(
            ("--steps 2", f"--steps 2 {_TRAINERS_PORT}"),
            ('"previous_weight_version":"v1"', '"previous_weight_version":"…"'),
        )
    ),
    "docs/trtllm.md": _sidecar(),
    "docs/vllm.md": _sidecar("weights/step-800"),
    "docs/vllm-control.md": Way(
        gateway="",
        words=(
            # Another machine's engine is the first one's here.
            ("10.0.0.1:9201", "127.0.0.1:9201 --allow-shared-address"),
            ("10.0.0.2:9201", "127.0.0.1:9202"),
        ),
    ),
    "docs/vllm-endpoints.md": Way(),
    "docs/vllm-sidecar.md": _sidecar(),
    "docs/write-an-engine.md": Way(
        words=(("--time-limit 900", "--time-limit 900 --case 'pause.d*'"),), apart=True
    ),
}

_MAKE = "takes minutes, or installs; the target is looked for in the Makefile"
_OWN = "wants an issuer, a database and hosts of the reader's own"
_PERSON = "wants a person at an identity provider"
_VLLM = "wants a vLLM with the plugin in it"
ELSEWHERE = (
    Elsewhere(ANY, "make ", _MAKE, ("tests/e2e/test_pages.py",)),
    Elsewhere(ANY, "source .venv/bin/activate", "the shell has it already", ("scripts/setup",)),
    Elsewhere(
        "docs/getting-started.md", "git clone", "is what was done to be here", ("scripts/setup",)
    ),
    Elsewhere(
        "docs/getting-started.md",
        'chadburn generate "the bridge rings" --max-tokens 1000 &',
        "before the gateway's end, below",
        ("tests/e2e/test_kills.py",),
    ),
    Elsewhere(
        "docs/getting-started.md",
        "chadburn pause demo --mode drain\n",
        "before the gateway's end, below",
        ("tests/e2e/test_kills.py",),
    ),
    Elsewhere(
        "docs/getting-started.md",
        "kill -9 $(pgrep",
        "would end the gateway of any demo on this machine",
        ("tests/e2e/test_kills.py", "tests/e2e/test_demo_life.py"),
    ),
    Elsewhere("docs/getting-started.md", "chadburn engine ", _OWN, ("tests/e2e/stack.py",)),
    Elsewhere(
        "docs/getting-started.md", "chadburn db upgrade", _OWN, ("tests/cli/test_database.py",)
    ),
    Elsewhere("docs/getting-started.md", "chadburn serve", _OWN, ("tests/e2e/stack.py",)),
    Elsewhere(
        "docs/getting-started.md", "export CHADBURN_URL", _OWN, ("tests/cli/test_looking.py",)
    ),
    Elsewhere(
        "docs/getting-started.md", "chadburn engines register", _OWN, ("tests/cli/test_looking.py",)
    ),
    Elsewhere(
        "docs/getting-started.md", "chadburn engines list\n", _OWN, ("tests/cli/test_looking.py",)
    ),
    Elsewhere("docs/cli.md", "chadburn login", _PERSON, ("tests/cli/test_login.py",)),
    Elsewhere("docs/cli.md", "chadburn pause e1", _PERSON, ("tests/cli/test_login.py",)),
    Elsewhere("docs/cli.md", "curl -H", _PERSON, ("tests/cli/test_login.py",)),
    Elsewhere(
        "docs/conformance.md",
        "chadburn conformance 127.0.0.1:8768 --inference 127.0.0.1:8767 \\\n    --token-file",
        "wants the reader's own engine and hook",
        ("tests/conformance/test_command.py",),
    ),
    Elsewhere(
        "docs/deployment.md",
        "deploy/compose/prepare",
        "is for root, and writes to the checkout",
        ("tests/distribution/test_containers.py",),
    ),
    Elsewhere(
        "docs/deployment.md",
        "docker compose up",
        "wants a container engine",
        ("tests/distribution/test_containers.py",),
    ),
    Elsewhere("docs/deployment.md", "chadburn login", _PERSON, ("tests/cli/test_login.py",)),
    Elsewhere(
        "docs/mutation-report.md",
        "scripts/mutation-test --again",
        "takes hours",
        ("tests/auth/mutating.py",),
    ),
    Elsewhere(
        "docs/train-and-update.md",
        "chadburn engine …",
        "is a part of a command line",
        ("tests/e2e/test_new_weights.py",),
    ),
    Elsewhere("docs/vllm.md", "pip install ./plugins/vllm", _VLLM, ("tests/vllm/test_plugin.py",)),
    Elsewhere("docs/vllm.md", "CHADBURN_VLLM_ROOTS=", _VLLM, ("tests/vllm/test_plugin.py",)),
    Elsewhere("docs/vllm.md", "chadburn update-weights", _VLLM, ("tests/vllm/test_plugin.py",)),
    Elsewhere(
        "docs/vllm-sidecar.md",
        "chadburn conformance",
        "takes many minutes",
        ("tests/sidecars/test_conformance.py", "tests/vllm/test_conformance.py"),
    ),
)


def elsewhere(command: Command) -> Elsewhere | None:
    return next((one for one in ELSEWHERE if one.covers(command)), None)
