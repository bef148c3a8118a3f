"""How a command ends: one line for a person and a code for a script."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Codes of every command; documented in docs/cli.md."""

    OK = 0  # the order succeeded or, without --wait, was accepted
    FAULT = 1  # a fault of this program
    USAGE = 2
    FAILED = 3  # the operation ended failed
    CANCELLED = 4  # the operation ended cancelled
    UNKNOWN = 5  # how it ends, or has ended, is not known
    REFUSED = 6  # the gateway or the engine said no; nothing was done
    UNREACHABLE = 7  # nobody answered, or answered that it cannot now
    INTERRUPTED = 130


class CommandFailed(Exception):
    """Ends the command with this code; `line` is the one line for stderr."""

    def __init__(self, exit_: Exit, line: str) -> None:
        super().__init__(line)
        self.exit = exit_
        self.line = " ".join(line.split())


class OutcomeLost(CommandFailed):
    """No answer to something that was sent: it may have been done."""


def usage(line: str) -> CommandFailed:
    return CommandFailed(Exit.USAGE, line)
