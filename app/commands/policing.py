"""`chadburn policy`: whether a policy file is whole, and what it makes of a call."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.ending import CommandFailed, Exit, usage
from app.commands.http import compact
from app.commands.serving import Config, settings_of
from app.domain.errors import ChadburnError
from app.domain.kinds import OperationKind

if TYPE_CHECKING:
    from app.auth.policy.explaining import Explained, RuleFound
    from app.auth.principal import Principal
    from app.explaining import Answer
    from app.settings import Settings

policy = typer.Typer(help="Who may do what on which engines.", no_args_is_help=True)

_IDENTITY = "identity:"

AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@policy.command()
def check(
    file: Annotated[Path, typer.Argument(help="The policy file.")], config: Config = None
) -> None:
    """Read a policy file as the gateway would. With the gateway's settings (--config) its issuers
    are known as well, so that rules for others are found."""
    from app.auth.identities.known import LOCAL_ISSUER
    from app.auth.policy.reading import PolicyRefused, read_policy

    settings = settings_of(config, {})
    known = {one.issuer: bool(one.group_claims) for one in settings.issuers}
    if settings.compat_identity:
        known[LOCAL_ISSUER] = False
    try:
        read = read_policy(file.read_bytes(), known or None)
    except OSError as error:
        raise usage(f"{file}: {error.strerror}") from error
    except PolicyRefused as refused:
        for fault in refused.faults:
            print(f"{file}: {fault}", file=sys.stderr)
        faults = "1 fault" if len(refused.faults) == 1 else f"{len(refused.faults)} faults"
        raise CommandFailed(Exit.REFUSED, f"{file}: {faults}") from refused
    print(f"{file}: good; rules: {len(read.rules)}")


@policy.command()
def explain(
    who: Annotated[
        str,
        typer.Argument(
            metavar="TOKEN|CLAIMS|identity:NAME",
            help="An access token; or claims as a JSON object, which asks no issuer; or - to read "
            "either from standard input; or a compat_identity of the settings.",
        ),
    ],
    method: Annotated[str, typer.Argument(help="Such as POST.")],
    path: Annotated[str, typer.Argument(help="Such as /v1/engines/e1/pause.")],
    file: Annotated[
        Path | None, typer.Option("--policy", help="Instead of the settings' policy_file.")
    ] = None,
    config: Config = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of the engine, once for each; --label '' for none at all."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Whose the operation is; or the id of a new one.")
    ] = None,
    kind: Annotated[
        OperationKind | None, typer.Option(help="Of the operation to cancel or settle.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a call would be allowed, and why: what the token grants, what the route needs,
    what each rule leaves. Exit code 0: allowed; 6: refused; 5: that hangs on labels not given."""
    from app.explaining import Question, answer_to, policy_in
    from app.startup import StartupRefused

    settings = settings_of(config, {})
    question = Question(
        method=method,
        path=path.partition("?")[0],
        engine_id=engine,
        labels=_labels(label),
        kind=kind,
    )
    try:
        whole = sys.stdin.read().strip() if who == "-" else who
        caller = _caller(settings, whole, configured=config is not None)
        in_force = policy_in(settings, file)
        answer = answer_to(question, caller, in_force, settings)
    except StartupRefused as refused:
        raise usage(refused.line) from refused
    _print(answer, caller, method, as_json=as_json)


def _caller(settings: Settings, who: str, *, configured: bool) -> Principal:
    from app.clock import SystemClock
    from app.explaining import caller_of_claims, caller_of_identity, caller_of_token

    try:
        if who.startswith(_IDENTITY):
            caller = caller_of_identity(settings, who.removeprefix(_IDENTITY), SystemClock())
            if caller is None:
                where = "" if configured else "; --config FILE names the settings"
                raise usage(f"no compat_identity of the settings is called so{where}")
            return caller
        if not who.lstrip().startswith("{"):
            return asyncio.run(caller_of_token(settings, who, SystemClock()))
        return caller_of_claims(settings, _object(who), SystemClock())
    except ChadburnError as refused:
        raise CommandFailed(Exit.REFUSED, f"{refused.reason}: {refused.message}") from refused


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise usage("the claims are no JSON") from None
    assert isinstance(found, dict), "what begins with a brace is an object"
    return found


def _labels(given: list[str] | None) -> dict[str, str] | None:
    if given is None:
        return None
    labels = {}
    for text in given:
        name, equals, value = text.partition("=")
        if text and not equals:
            raise usage(f"--label {text}: NAME=VALUE")
        if text:
            labels[name] = value
    return labels


def _print(answer: Answer, caller: Principal, method: str, *, as_json: bool) -> None:
    route, found = answer.route, answer.explained
    if route is None:
        raise CommandFailed(Exit.REFUSED, "no route: the gateway answers 404 or 405")
    if as_json:
        print(compact(_document(answer, caller)))
    else:
        print(f"caller  {_named(caller)}")
        print(f"token   grants {_list(caller.scopes)}")
        print(f"route   {method.upper()} {route.template}")
        for line in _lines(found):
            print(line)
        if answer.flushing is not None:
            print(f"flush   {_flush(answer.flushing)}")
    ending = {"allowed": Exit.OK, "refused": Exit.REFUSED, "depends": Exit.UNKNOWN}
    code = Exit.OK if found is None else ending[found.verdict]
    if code is not Exit.OK:
        raise typer.Exit(code)


def _lines(found: Explained | None) -> list[str]:
    if found is None:
        return ["answer  allowed: the route is open to all"]
    lines = [f"needs   {_list(found.needed) if found.needed else 'any scope'}"]
    lines += [f"rule    {_rule(rule)}" for rule in found.rules]
    if found.lacks:
        lines.append(f"missing {_list(found.lacks)}: the token does not grant it")
    if found.left_out:
        lines.append(f"missing {_list(found.left_out)}: no rule leaves it")
    return [*lines, f"answer  {found.verdict}: {found.reason}"]


def _flush(found: Explained) -> str:
    """Of a pause at a compatible endpoint."""
    unless = "unless mode=keep or clear_cache=false"
    return f"needs {_list(found.needed)} too, {unless}: {found.verdict}: {found.reason}"


def _rule(rule: RuleFound) -> str:
    if rule.unmet:
        return f"{rule.rule!r}: not for this caller ({', '.join(rule.unmet)})"
    takes = {"yes": "", "no": ", not this one", "perhaps": ", if it is one"}[rule.takes]
    return f"{rule.rule!r}: leaves {_list(rule.leaves)} on {rule.engines}{takes}"


def _named(caller: Principal) -> str:
    client = f" by client {caller.client_id}" if caller.client_id else ""
    groups = f", groups {', '.join(sorted(caller.groups))}" if caller.groups else ""
    return f"{caller.subject} of {caller.issuer}{client}, a {caller.kind}{groups}"


def _list(scopes: Any) -> str:
    return " ".join(sorted(scopes)) or "nothing"


def _document(answer: Answer, caller: Principal) -> dict[str, Any]:
    route, found = answer.route, answer.explained
    assert route is not None
    return {
        "caller": {
            "issuer": caller.issuer,
            "subject": caller.subject,
            "client_id": caller.client_id,
            "kind": caller.kind.value,
            "groups": sorted(caller.groups),
            "scopes": sorted(caller.scopes),
        },
        "route": route.template,
        "verdict": "allowed" if found is None else found.verdict.value,
        "reason": "the route is open to all" if found is None else found.reason,
        "needs": [] if found is None else list(found.needed),
        "flush_needs": [] if answer.flushing is None else list(answer.flushing.needed),
        "flush_verdict": None if answer.flushing is None else answer.flushing.verdict.value,
        "token_lacks": [] if found is None else list(found.lacks),
        "policy_leaves_out": [] if found is None else list(found.left_out),
        "rules": []
        if found is None
        else [
            {
                "rule": rule.rule,
                "unmet": list(rule.unmet),
                "leaves": sorted(rule.leaves),
                "engines": rule.engines,
                "takes": rule.takes.value,
            }
            for rule in found.rules
        ],
    }
