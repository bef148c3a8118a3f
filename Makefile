# make demo              everything running on this machine; ARGS goes to `chadburn demo`
# make test              all checks and tests (CI runs this)
# make test-full         the same with every long figure; writes docs/test-report.md
# make test-vllm         against real vLLM, which it builds in .vllm (Linux, 6 GB; not in make test)
# make test-sglang       against real SGLang, in .sglang (Linux, 4 GB; not in make test)
# make test-dynamo       against Dynamo's own runtime, in .dynamo (Linux, 300 MB; not in make test)
# make lint              the checks alone
# make mutation-test     change app/auth in thousands of ways; writes docs/mutation-report.md
# make proto             generate app/rpc/ and docs/operation-fields.md from proto/
# make bench             figures of speed; ARGS="costs ledger" prints those parts alone
# make topology          gateways behind nginx, PostgreSQL and engines as plain processes, driven end to end
#
# Needs Python 3.11 or later, git and make; the targets install the rest into .venv.
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := test
.PHONY: demo test test-full test-vllm test-sglang test-dynamo lint mutation-test proto bench topology

demo:
	@scripts/setup demo
	@exec .venv/bin/chadburn demo $(ARGS)

test: lint
	@scripts/test

test-full: lint
	@scripts/test --full

test-vllm:
	@scripts/setup dev
	@scripts/setup-vllm
	@scripts/test-engine vllm $(ARGS)

test-sglang:
	@scripts/setup dev
	@scripts/setup-sglang
	@scripts/test-engine sglang $(ARGS)

test-dynamo:
	@scripts/setup dev
	@scripts/setup-dynamo
	@scripts/test-engine dynamo $(ARGS)

lint:
	@scripts/setup dev
	@scripts/lint

mutation-test:
	@scripts/setup dev
	@.venv/bin/python scripts/mutation-test

proto:
	@scripts/setup dev
	@scripts/gen-proto
	@.venv/bin/python scripts/gen-operation-fields

bench:
	@scripts/setup dev
	@.venv/bin/python -m tests.benchmarks $(ARGS)

topology:
	@scripts/setup dev
	@scripts/need nginx
	@.venv/bin/python -m tests.topology $(ARGS)
