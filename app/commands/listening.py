"""Options of commands that serve an engine: where it listens, and to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

InferenceAddress = Annotated[str, typer.Option(help="host:port (0: a free one) or unix:/path.")]
AdminAddress = Annotated[str, typer.Option(help="Takes orders; the same forms.")]
InferenceAudience = Annotated[str, typer.Option(help="Audience of tokens for inference.")]
AdminAudience = Annotated[str, typer.Option(help="Audience of tokens for orders.")]
Certificate = Annotated[
    Path | None, typer.Option(help="PEM file; TLS on both listeners. Goes with --key.")
]
Key = Annotated[Path | None, typer.Option(help="PEM file of its private key.")]
ClientCa = Annotated[
    Path | None, typer.Option(help="PEM file; who orders must show a certificate by it.")
]
RendezvousAllow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST:PORT[-PORT]",
        help="Updates may meet trainers there; HOST is a name or a network. Repeatable.",
    ),
]
