"""The clients a development issuer knows, and what each may ask for."""

from dataclasses import dataclass

from app.domain.scopes import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class DevClient:
    """A client with its one audience and the most it may be granted."""

    client_id: str
    audience: str
    scopes: frozenset[str]


def demo_clients(
    *, admin_audience: str, inference_audience: str, engine_audience: str
) -> tuple[DevClient, ...]:
    """The four roles of the demonstration.

    ``operator`` may do everything but hand over pickled weights, ``reader`` only look,
    ``inference`` only generate, and ``engine`` is what the gateway itself shows to an engine's
    admin listener.
    """
    everything = frozenset(scope.value for scope in Scope) - {Scope.WEIGHTS_UNSAFE.value}
    return (
        DevClient(client_id="operator", audience=admin_audience, scopes=everything),
        DevClient(client_id="reader", audience=admin_audience, scopes=frozenset([Scope.READ])),
        DevClient(
            client_id="inference",
            audience=inference_audience,
            scopes=frozenset(["inference:generate"]),
        ),
        DevClient(client_id="engine", audience=engine_audience, scopes=everything),
    )
