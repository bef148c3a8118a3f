"""What can be set about finding engines: a section of `app.settings`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.domain.engine import Dialect
from app.domain.selectors import is_label_name, is_label_value

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KubernetesSettings(_Section):
    """Engines behind the services of one namespace: each endpoint of their EndpointSlices is one.

    `selector`: of labels, which a slice has from its service. `admin_port`, `control_port`: names
    of ports; `control_port` None: the admin port. Where the API server is, and what it is shown,
    comes from the pod's service account unless it stands here.
    """

    selector: str = Field(min_length=1)
    namespace: str | None = None
    """None: the gateway's own."""
    admin_port: str = "admin"
    control_port: str | None = None
    dialect: Dialect = Dialect.OPENENGINE
    credential: str | None = None
    server_name: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    """On every engine, beside `kubernetes/namespace` and `kubernetes/service`."""
    api_url: str | None = Field(default=None, pattern=r"^https?://[^/?#@]+$")
    """None: as every pod is told."""
    token_file: Path | None = _SERVICE_ACCOUNT / "token"
    ca_file: Path | None = _SERVICE_ACCOUNT / "ca.crt"
    namespace_file: Path = _SERVICE_ACCOUNT / "namespace"

    @model_validator(mode="after")
    def _labels_are_some(self) -> KubernetesSettings:
        for name, value in self.labels.items():
            if not is_label_name(name) or not is_label_value(value):
                raise ValueError("labels: has one that no engine can have")
        return self


class DiscoverySettings(_Section):
    """A source of engines. `name` None: `file` or `kubernetes`, as it is one. `remove_after_s`:
    how long one has to be missing before it is taken off the register; None: at once from a file,
    a minute from Kubernetes, where pods come back."""

    name: str | None = Field(default=None, pattern=r"^[a-z0-9]([a-z0-9-]{0,29}[a-z0-9])?$")
    file: Path | None = None
    kubernetes: KubernetesSettings | None = None
    remove_after_s: float | None = Field(default=None, ge=0, le=30 * 86_400)

    @model_validator(mode="after")
    def _one_kind(self) -> DiscoverySettings:
        if (self.file is None) == (self.kubernetes is None):
            raise ValueError("takes one of file and kubernetes")
        return self

    @property
    def known_as(self) -> str:
        return self.name or ("kubernetes" if self.file is None else "file")

    @property
    def patience_s(self) -> float:
        if self.remove_after_s is not None:
            return self.remove_after_s
        return 60.0 if self.file is None else 0.0


def refuse_twins(sources: tuple[DiscoverySettings, ...]) -> None:
    """Raises ValueError: an engine's label says which source brought it, by name."""
    names = [one.known_as for one in sources]
    if len(set(names)) != len(names):
        raise ValueError("discovery: each source has a name of its own")
