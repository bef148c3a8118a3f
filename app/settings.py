"""Everything that can be set, read once at start and frozen.

Sources, the first that names a value wins: arguments, `CHADBURN_…` variables (`__` between the
levels of a nested one; lists and tables as JSON), one TOML file. A key that nobody knows is an
error in all of them: a misspelt safety setting must not silently be its default.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from app.discovery_settings import DiscoverySettings, refuse_twins
from app.domain.kinds import OperationKind
from app.domain.selectors import is_engine_id, is_label_name, is_label_value

PREFIX = "CHADBURN_"
CONFIG_VARIABLE = "CHADBURN_CONFIG"

# Read by other commands of the same program, so not misspellings of a setting.
_FOR_OTHER_COMMANDS = frozenset(
    {
        *(CONFIG_VARIABLE, "CHADBURN_URL", "CHADBURN_TOKEN"),
        *("CHADBURN_CLIENT_ID", "CHADBURN_CLIENT_SECRET"),
    }
)
_FOR_OTHER_PREFIXES = ("CHADBURN_INFERENCE_", "CHADBURN_ENGINE__", "CHADBURN_DEMO__")

Milliseconds = Annotated[int, Field(ge=1, le=24 * 3600 * 1000)]


class SettingsError(Exception):
    """One clear line about settings that must not be started with. Never quotes a value."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RoleMapSettings(_Section):
    """`claim`: a path with dots, or a list of names. `scopes`: role to admin scopes."""

    claim: str | tuple[str, ...]
    scopes: dict[str, tuple[str, ...]]


class IntrospectionSettings(_Section):
    """Asking an issuer about tokens (RFC 7662). `endpoint` None: by discovery. `tokens`: about
    which of them."""

    client_id: str
    client_secret_file: Path
    endpoint: str | None = None
    tokens: Literal["opaque", "jwt", "all"] = "opaque"
    client_auth: Literal["basic", "post"] = "basic"
    cache_s: int = 30


class LoginSettings(_Section):
    """How people log in at an issuer with a browser: the gateway as its client. `client_auth` None:
    `basic` with a secret, else `none`. `name` None: from the issuer's host."""

    client_id: str
    name: str | None = None
    client_auth: Literal["basic", "post", "private_key_jwt", "none"] | None = None
    client_secret_file: Path | None = None
    """The secret, or for `private_key_jwt` the key as PEM."""
    key_algorithm: Literal["RS256", "PS256", "ES256"] = "RS256"
    key_id: str | None = None
    scopes: tuple[str, ...] = ("admin:read",)
    resource: str | None = None
    parameters: dict[str, str] = Field(default_factory=dict)
    own_path: bool = False


class BrowserSessionSettings(_Section):
    """`key_files`: 32 bytes in base64 each; the first encrypts, all decrypt."""

    key_files: tuple[Path, ...] = ()
    idle_s: float = Field(default=1800.0, ge=60, le=30 * 86_400)
    longest_s: float = Field(default=43_200.0, ge=60, le=30 * 86_400)
    most_per_person: int = Field(default=16, ge=1, le=1000)


class IssuerSettings(_Section):
    """One trusted issuer of tokens. `audience` None: the gateway's own `audience`."""

    issuer: str
    audience: str | None = None
    inference_audiences: tuple[str, ...] = ()
    jwks_uri: str | None = None
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    profile: Literal["strict", "compatible", "cross_client"] = "strict"
    scope_claims: tuple[str, ...] = ("scope",)
    scope_prefix: str = ""
    role_maps: tuple[RoleMapSettings, ...] = ()
    role_use: Literal["cap", "add"] = "cap"
    client_id_claims: tuple[str, ...] = ("client_id",)
    group_claims: tuple[str | tuple[str, ...], ...] = ()
    """Each a path as of a role map. Only the policy file gives groups a meaning."""
    subject_claims: tuple[str, ...] = ("sub",)
    clients_without_audience: tuple[str, ...] = ()
    persons: Literal["subject", "claims"] | None = None
    leeway_s: int = 30
    introspection: IntrospectionSettings | None = None
    dpop: Literal["off", "allowed", "required"] = "off"
    dpop_nonce: bool = False
    login: LoginSettings | None = None
    """None: nobody logs in with a browser there."""


class ClientCertificateSettings(_Section):
    """A listener for TLS that takes certificates by `client_ca`. PEM files. `listen`: `host:port`.
    `names`: DNS names or URIs, of which a certificate has to have one."""

    listen: str
    certificate: Path
    key: Path
    client_ca: Path
    names: tuple[str, ...] = Field(min_length=1)


class CompatIdentitySettings(_Section):
    """A caller of compatible endpoints that can't send a token, and the one thing that proves it.
    `engines`: `all`, or as in a rule of the policy."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    scopes: tuple[str, ...] = Field(min_length=1)
    engines: Literal["all"] | dict[str, Any]
    unix_socket: Path | None = None
    uid: int | None = Field(default=None, ge=0)
    """Who may use the socket. None: the user that the gateway runs as."""
    secret_file: Path | None = None
    tls: ClientCertificateSettings | None = None

    @model_validator(mode="after")
    def _one_proof(self) -> CompatIdentitySettings:
        if [self.unix_socket, self.secret_file, self.tls].count(None) != 2:
            raise ValueError("takes one of unix_socket, secret_file and tls")
        if self.uid is not None and self.unix_socket is None:
            raise ValueError("uid goes with unix_socket")
        return self


class ReachSettings(_Section):
    """Where engines may be. Nothing is reachable that is not named here: whoever sets one of
    these names all of them."""

    hosts: tuple[str, ...] = ()
    cidrs: tuple[str, ...] = ()
    socket_dirs: tuple[Path, ...] = ()
    allow_plaintext_beyond_loopback: bool = False


class OAuthSettings(_Section):
    """Client credentials grant. `parameters`: what the provider wants besides, such as
    `resource` or `audience`."""

    token_url: str
    client_id: str
    client_secret_file: Path
    scope: str | None = None
    parameters: dict[str, str] = Field(default_factory=dict)


class TlsFilesSettings(_Section):
    """PEM files. `authorities` None: those of the system."""

    authorities: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @model_validator(mode="after")
    def _whole(self) -> TlsFilesSettings:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together")
        return self


class CredentialSettings(_Section):
    """How the gateway shows itself to an engine. Files only: no secret stands here.

    `bound_to`: host names and socket paths of engines that may be shown it; empty: any within
    the reach. `server_name`: what their certificate must say.
    """

    bearer_file: Path | None = None
    oauth: OAuthSettings | None = None
    tls: TlsFilesSettings | None = None
    server_name: str | None = None
    bound_to: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> CredentialSettings:
        if self.bearer_file is not None and self.oauth is not None:
            raise ValueError("bearer_file and oauth exclude each other")
        if self.bearer_file is None and self.oauth is None and self.tls is None:
            raise ValueError("names no token and no certificate")
        return self


class _EnginesSettings(_Section):
    """Engines of these ids, with these labels, or both."""

    engines: tuple[str, ...] = ()
    labels: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    @field_validator("labels", mode="before")
    @classmethod
    def _one_value(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: (one,) if isinstance(one, str) else one for name, one in value.items()}

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        if not self.engines and not self.labels:
            raise ValueError("says which engines: name them, or their labels")
        if not all(is_engine_id(one) for one in self.engines):
            raise ValueError("engines: has one that no engine can be called")
        for name, values in self.labels.items():
            if not is_label_name(name) or not values or not all(map(is_label_value, values)):
                raise ValueError("labels: has one that no engine can have")
        return self


class CompatSettings(_EnginesSettings):
    """Engines that are also reached by the administrative HTTP of `layer`. `flavour`: in the shapes
    of which release of vLLM."""

    layer: Literal["vllm", "sglang"]
    flavour: Literal["0.26", "0.32"] = "0.26"

    @model_validator(mode="after")
    def _one_flavour(self) -> CompatSettings:
        if self.layer != "vllm" and "flavour" in self.model_fields_set:
            raise ValueError("flavour: goes with layer vllm")
        return self


class EnginePayloadSettings(_EnginesSettings):
    """Engines that are passed what their own serializer has written, unread."""


_THIS_MACHINE = ReachSettings(hosts=("localhost",), cidrs=("127.0.0.0/8", "::1/128"))


class Settings(BaseSettings):
    """Times say their unit in their name. `port` 0: any free one."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    data_dir: Path = Path("chadburn-data")
    database_url: SecretStr | None = None
    """None: `chadburn.db` (SQLite) in the data directory. May hold a password, so it is masked
    wherever settings are shown; `ledger_url` gives it."""
    database_pool_size: int = Field(default=10, ge=1, le=200)
    database_wait_s: float = Field(default=15.0, gt=0, le=60)
    """For a connection of the pool to come free."""
    upgrade_on_start: bool = True

    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    public_url: str | None = None
    """What callers see, and what the OAuth metadata says; never guessed from a request."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host` beside those of `public_url` and `host`."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose X-Forwarded-For is believed."""

    issuers: tuple[IssuerSettings, ...] = ()
    audience: str | None = None
    read_only: bool = False
    """Refuse every order and every change of the register."""
    clients_may_settle: bool = False
    """Whether a token that shows no person, as client credentials give, may settle operations,
    unless the policy says."""
    policy_file: Path | None = None
    """What each caller may do on which engines. None: what its token says, on all of them."""

    dpop_nonce_key_file: Path | None = None
    """32 bytes in base64, where several gateways give out nonces for proofs. None: a key of its
    own for each start."""

    browser_sessions: BrowserSessionSettings = BrowserSessionSettings()
    """Of people who log in with a browser, where an issuer has `login`."""

    compat: tuple[CompatSettings, ...] = ()
    """Empty: no engine is reached by endpoints of its own. The first that takes one counts."""
    engine_payloads: tuple[EnginePayloadSettings, ...] = ()
    """Empty: no engine is passed weights that it alone can read (pickled ones)."""
    compat_identity: tuple[CompatIdentitySettings, ...] = ()
    """Callers of compatible endpoints that can't send a token."""

    engine_reach: ReachSettings = _THIS_MACHINE
    engine_credentials: dict[str, CredentialSettings] = Field(default_factory=dict)
    discovery: tuple[DiscoverySettings, ...] = ()
    """Where engines are found that are registered by nobody."""
    profile_roots: dict[str, Path] = Field(default_factory=dict)
    """Per engine: the folder, as this machine sees it, below which the engine keeps its profiles.
    Files of engines that are not named here can't be downloaded."""
    observe_interval_s: float = Field(default=5.0, gt=0, le=3600)
    operation_deadline_ms: dict[OperationKind, Milliseconds] = Field(default_factory=dict)
    """Default and maximum for a kind, beside the built-in ones."""
    max_queued_orders: int = Field(default=16, ge=1, le=1000)
    """Waiting for one engine (`"when_busy": "queue"`); more get 429."""
    key_retention_hours: int = Field(default=24, ge=24, le=24 * 366)
    lease_s: float = Field(default=15.0, ge=1, le=300)
    """How long the orders of an engine stay with a gateway that says nothing any more; then
    another one on the same ledger goes on with them."""
    operation_retention_days: int = Field(default=90, ge=1, le=36_525)
    """How long an operation and its events are kept after its end; never shorter than its key."""
    audit_retention_days: int = Field(default=400, ge=1, le=36_525)
    """How long an entry of the audit is kept; never shorter than operations are."""
    audit_seal_s: float = Field(default=60.0, ge=1, le=3600)
    """How often what came to the audit is sealed."""

    max_body_bytes: int = Field(default=1 << 20, ge=1024, le=1 << 30)
    max_update_bytes: int = Field(default=16 << 20, ge=1024, le=1 << 30)
    """Of the body of an update of weights, which may hold tensors as base64; never less than
    `max_body_bytes`."""
    max_bodies_bytes: int = Field(default=64 << 20, ge=1024)
    """Of all bodies that are held at once; never less than `max_update_bytes`."""
    max_connections: int = Field(default=4096, ge=16)
    max_concurrent_requests: int = Field(default=256, ge=1)
    max_concurrent_changes: int = Field(default=192, ge=1)
    """Of the concurrent requests: those that are no reads."""
    max_refusals_per_minute: int = Field(default=600, ge=0)
    """401s from one address, and 403s of one caller; more get 429. 0: no limit, here and below."""
    max_changes_per_s: int = Field(default=100, ge=0)
    """Orders and changes of one caller, over some seconds; more get 429."""
    max_changes_per_s_of_address: int = Field(default=400, ge=0)
    max_waiting: int = Field(default=128, ge=0)
    """Callers who wait for an operation's end."""
    max_engine_reads: int = Field(default=64, ge=1)
    max_reads_per_engine: int = Field(default=16, ge=1)
    max_open_operations: int = Field(default=64, ge=1)
    """Of one engine."""
    request_timeout_s: float = Field(default=60.0, ge=30, le=3600)
    """For everything up to an answer's first byte; longer than anybody may ask to wait."""
    receive_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """For a request's head to arrive, and then for its body."""
    max_streams: int = Field(default=512, ge=1)
    max_streams_per_caller: int = Field(default=256, ge=1)
    stream_max_s: float = Field(default=3600.0, gt=0)
    stream_send_timeout_s: float = Field(default=30.0, gt=0)
    shutdown_grace_s: float = Field(default=10.0, gt=0, le=600)
    keep_alive_s: int = Field(default=75, ge=1)

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """A listener of its own for `/metrics`, without tokens. None: none."""
    traces: str | None = None
    """Where spans are sent: an OTLP endpoint, or `otel` for what the `OTEL_…` variables say."""

    @field_validator("public_url")
    @classmethod
    def _plain_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http or https URL")
        if parts.query or parts.fragment or parts.username or parts.password:
            raise ValueError("must have no user, query or fragment")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _says_where_it_is(self) -> Settings:
        if self.public_url is None and self.host in ("0.0.0.0", "::", ""):  # noqa: S104
            raise ValueError("public_url is needed when host is every address of the machine")
        return self

    @model_validator(mode="after")
    def _can_be_accounted_for(self) -> Settings:
        refuse_twins(self.discovery)
        if self.audit_retention_days < self.operation_retention_days:
            raise ValueError("audit_retention_days must not be below operation_retention_days")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """No .env and no secrets folder: two places to look are enough."""
        del settings_cls, dotenv_settings, file_secret_settings
        return init_settings, env_settings

    @property
    def ledger_url(self) -> str:
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite+aiosqlite:///{self.data_dir.absolute() / 'chadburn.db'}"

    @property
    def base_url(self) -> str:
        """Where callers find the gateway, without a slash at the end."""
        if self.public_url is not None:
            return self.public_url
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def load_settings(config: Path | None = None, **values: Any) -> Settings:
    """Read the file, the environment and `values`. Raises SettingsError with one line.

    `config` None: the file that `CHADBURN_CONFIG` names, if any.
    """
    if config is None and os.environ.get(CONFIG_VARIABLE):
        config = Path(os.environ[CONFIG_VARIABLE])
    from_file = {} if config is None else _read_toml(config)
    for key in from_file:
        if key not in Settings.model_fields:
            raise SettingsError(f"unknown setting {key!r} in {config}")
    _refuse_unknown_variables(os.environ)

    class WithFile(Settings):
        """The file comes last, and is merged table by table with what stands above it."""

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del dotenv_settings, file_secret_settings
            return init_settings, env_settings, InitSettingsSource(settings_cls, from_file)

    try:
        return WithFile(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_lines(error))) from None
    except SourceError as error:  # a variable that should be JSON and is not
        raise SettingsError(str(error)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper in _FOR_OTHER_COMMANDS:
            continue
        if upper.startswith(_FOR_OTHER_PREFIXES):
            continue
        key = upper.removeprefix(PREFIX).partition("__")[0].lower()
        if key not in Settings.model_fields:
            raise SettingsError(f"unknown setting in the environment: {name}")


def _lines(error: ValidationError) -> Iterator[str]:
    # Without the input: a setting may be a secret that was put in the wrong place.
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        place = ".".join(str(part) for part in fault["loc"]) or "settings"
        if fault["type"] == "extra_forbidden":
            yield f"unknown setting {place!r}"
        else:
            yield f"{place}: {fault['msg']}"
