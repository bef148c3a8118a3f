"""From settings to the values that the rooms take, and each way in which a start is refused."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from app.auth.identities.certificates import LiveCertificates, ServerFiles
from app.auth.identities.known import (
    LOCAL_ISSUER,
    ClientCertificate,
    CompatIdentity,
    UnixSocket,
)
from app.auth.identities.secret_files import SecretFile
from app.auth.policy.live import LivePolicy
from app.auth.policy.reading import PolicyRefused, read_engines
from app.auth.sessions.clients import LoginAuth, LoginClient, LoginClients, default_name
from app.auth.sessions.house import LoginSetup
from app.auth.sessions.kept import SessionRules
from app.auth.sessions.sealing import SealingKeys, read_key
from app.auth.sessions.wire import private_key
from app.auth.tokens.issuers import (
    ClientAuth,
    DpopUse,
    Introspected,
    IntrospectionConfig,
    IssuerConfig,
    IssuerConfigError,
    PersonProof,
    RoleMap,
    RoleUse,
    TokenProfile,
    is_loopback_host,
    refuse_conflicts,
    without_user,
)
from app.backends.credentials import CredentialSettings, OAuthClientSettings, TlsFiles
from app.backends.reach import ReachPolicy
from app.clock import Clock
from app.domain.errors import ChadburnError, InvalidArgument
from app.domain.scopes import Scope
from app.domain.selectors import Selector
from app.ledger.errors import (
    LedgerInUse,
    LedgerUnavailable,
    SchemaAhead,
    SchemaBehind,
    UpgradeBusy,
)
from app.ledger.ledger import Ledger
from app.ledger.target import shown
from app.operations.deadlines import Deadlines
from app.operations.retention import Retention
from app.settings import CompatIdentitySettings, IssuerSettings, Settings
from app.settings import CredentialSettings as CredentialSection

# What a process that could not start exits with; apart from the codes of the command's verbs.
EXIT_SETTINGS = 2
EXIT_ADDRESS = 10
EXIT_DATA_DIR = 11
EXIT_LEDGER_IN_USE = 12
EXIT_DATABASE = 13
EXIT_SCHEMA = 14

_POLICY_SETTLES_S = 0.5
_SUN_PATH = 107
"""Bytes of a socket's path that the system takes."""


class StartupRefused(Exception):
    """One line for whoever starts the process, and the exit code. Holds no secret."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.line = line
        self.exit_code = exit_code


def issuers_of(settings: Settings) -> tuple[IssuerConfig, ...]:
    """Raises StartupRefused: an open gateway is never what a missing setting means."""
    if not settings.issuers:
        raise StartupRefused(
            "no token issuer is configured: set issuers and audience", EXIT_SETTINGS
        )
    try:
        issuers = tuple(_issuer(issuer, settings.audience) for issuer in settings.issuers)
        refuse_conflicts(issuers)
        return issuers
    except (IssuerConfigError, ValueError) as error:
        raise StartupRefused(str(error), EXIT_SETTINGS) from error


def _issuer(issuer: IssuerSettings, audience: str | None) -> IssuerConfig:
    ours = issuer.audience or audience
    if ours is None:
        raise ValueError(f"issuer {without_user(issuer.issuer)!r}: no audience is set")
    return IssuerConfig(
        issuer=issuer.issuer,
        audience=ours,
        inference_audiences=issuer.inference_audiences,
        jwks_uri=issuer.jwks_uri,
        algorithms=issuer.algorithms,
        profile=TokenProfile(issuer.profile),
        scope_claims=issuer.scope_claims,
        scope_prefix=issuer.scope_prefix,
        role_maps=tuple(
            RoleMap(
                claim=role_map.claim,
                scopes={
                    role: frozenset(Scope(name) for name in names)
                    for role, names in role_map.scopes.items()
                },
            )
            for role_map in issuer.role_maps
        ),
        role_use=RoleUse(issuer.role_use),
        client_id_claims=issuer.client_id_claims,
        group_claims=issuer.group_claims,
        subject_claims=issuer.subject_claims,
        clients_without_audience=issuer.clients_without_audience,
        persons=None if issuer.persons is None else PersonProof(issuer.persons),
        leeway_s=issuer.leeway_s,
        introspection=_introspection(issuer),
        dpop=DpopUse(issuer.dpop),
        dpop_nonce=issuer.dpop_nonce,
    )


def _introspection(issuer: IssuerSettings) -> IntrospectionConfig | None:
    asks = issuer.introspection
    if asks is None:
        return None
    _secret_in(
        asks.client_secret_file,
        f"issuer {without_user(issuer.issuer)!r}: introspection.client_secret_file",
    )
    return IntrospectionConfig(
        client_id=asks.client_id,
        client_secret_file=asks.client_secret_file,
        endpoint=asks.endpoint,
        tokens=Introspected(asks.tokens),
        client_auth=ClientAuth(asks.client_auth),
        cache_s=asks.cache_s,
    )


def logins_of(settings: Settings, issuers: tuple[IssuerConfig, ...]) -> LoginSetup | None:
    """None: no issuer has a login. Raises StartupRefused."""
    try:
        clients = LoginClients(
            _login(given, config)
            for given, config in zip(settings.issuers, issuers, strict=True)
            if given.login is not None
        )
        if not len(clients):
            return None
        base = urlsplit(settings.base_url)
        if base.scheme != "https" and not is_loopback_host(base.hostname or ""):
            raise ValueError("login needs an https public_url: a session's cookie goes over TLS")
        return LoginSetup(
            clients=clients,
            keys=_session_keys(settings),
            base_url=settings.base_url,
            rules=SessionRules(
                idle_s=settings.browser_sessions.idle_s,
                longest_s=settings.browser_sessions.longest_s,
                most_of_person=settings.browser_sessions.most_per_person,
            ),
        )
    except (IssuerConfigError, ValueError) as error:
        raise StartupRefused(str(error), EXIT_SETTINGS) from error


def nonce_key_of(settings: Settings) -> bytes | None:
    """None: none is set. Raises StartupRefused."""
    file = settings.dpop_nonce_key_file
    if file is None:
        return None
    try:
        return read_key(_secret_in(file, f"{file}"))
    except ValueError as error:
        raise StartupRefused(f"dpop_nonce_key_file: {error}", EXIT_SETTINGS) from error


def _login(issuer: IssuerSettings, config: IssuerConfig) -> LoginClient:
    given = issuer.login
    assert given is not None
    auth = given.client_auth or ("none" if given.client_secret_file is None else "basic")
    client = LoginClient(
        config=config,
        name=given.name or default_name(issuer.issuer),
        client_id=given.client_id,
        auth=LoginAuth(auth),
        secret_file=given.client_secret_file,
        key_algorithm=given.key_algorithm,
        key_id=given.key_id,
        scopes=given.scopes,
        resource=given.resource,
        parameters=given.parameters,
        own_path=given.own_path,
    )
    if client.secret_file is not None:
        place = f"issuer {without_user(issuer.issuer)!r}: login.client_secret_file"
        secret = _secret_in(client.secret_file, place)
        if client.auth is LoginAuth.PRIVATE_KEY_JWT:
            try:
                private_key(secret, client.key_algorithm)
            except Exception:  # whatever the library says of it, it may quote the file
                raise ValueError(f"{place}: is no key for {client.key_algorithm}") from None
    return client


def _session_keys(settings: Settings) -> tuple[bytes, ...]:
    files = settings.browser_sessions.key_files
    if not files:
        raise ValueError(
            "browser_sessions.key_files: login needs a key, in a file (openssl rand -base64 32)"
        )
    keys = []
    for file in files:
        place = f"browser_sessions.key_files: {file}"
        try:
            keys.append(read_key(_secret_in(file, place)))
        except ValueError as error:
            told = str(error)
            raise ValueError(told if told.startswith(place) else f"{place} {told}") from None
    try:
        SealingKeys(keys, lambda size: b"\x00" * size)
    except ValueError as error:
        raise ValueError(f"browser_sessions.key_files: {error}") from None
    return tuple(keys)


def _secret_in(file: Path, place: str) -> str:
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{place}: cannot be read ({type(error).__name__})") from error
    if not secret:
        raise ValueError(f"{place}: is empty")
    return secret


def policy_of(settings: Settings, issuers: tuple[IssuerConfig, ...]) -> LivePolicy:
    """Raises StartupRefused with all faults of the file."""
    known = {issuer.issuer: bool(issuer.group_claims) for issuer in issuers}
    if settings.compat_identity:
        known[LOCAL_ISSUER] = False
    try:
        return LivePolicy(settings.policy_file, known, settle_s=_POLICY_SETTLES_S)
    except PolicyRefused as refused:
        line = f"policy_file {settings.policy_file}: {refused}"
        raise StartupRefused(line, EXIT_SETTINGS) from refused


def identities_of(settings: Settings) -> tuple[CompatIdentity, ...]:
    """Raises StartupRefused."""
    found: list[CompatIdentity] = []
    secrets: set[bytes] = set()
    taken: set[object] = set()
    for given in settings.compat_identity:
        try:
            one = _identity(given)
            if one.name in {other.name for other in found}:
                raise ValueError("is there twice")
            if isinstance(one.shows, SecretFile):
                digests = one.shows.digests()
                if not secrets.isdisjoint(digests):
                    raise ValueError("secret_file: another identity has the same secret")
                secrets.update(digests)
            elif isinstance(one.shows, ClientCertificate):
                _take(taken, (one.shows.host, one.shows.port), "tls.listen")
                LiveCertificates(one.shows.files)
            else:
                _take(taken, one.shows.path, "unix_socket")
        except (PolicyRefused, OSError, ValueError) as error:
            what = "tls: its files cannot be used" if isinstance(error, OSError) else str(error)
            line = f"compat_identity {given.name!r}: {what}"
            raise StartupRefused(line, EXIT_SETTINGS) from error
        found.append(one)
    return tuple(found)


def _take(taken: set[object], place: object, setting: str) -> None:
    if place in taken:
        raise ValueError(f"{setting}: another identity has it")
    taken.add(place)


def _identity(given: CompatIdentitySettings) -> CompatIdentity:
    shows: UnixSocket | SecretFile | ClientCertificate
    if given.unix_socket is not None:
        if not given.unix_socket.is_absolute() or len(os.fsencode(given.unix_socket)) > _SUN_PATH:
            raise ValueError(f"unix_socket: an absolute path of {_SUN_PATH} bytes at most")
        shows = UnixSocket(given.unix_socket, os.geteuid() if given.uid is None else given.uid)
    elif given.secret_file is not None:
        shows = SecretFile(given.secret_file)
    else:
        assert given.tls is not None
        host, _, port = given.tls.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError("tls.listen: host:port")
        files = ServerFiles(given.tls.certificate, given.tls.key, given.tls.client_ca)
        names = {name if ":" in name else name.lower() for name in given.tls.names}
        shows = ClientCertificate(host.strip("[]"), int(port), files, frozenset(names))
    return CompatIdentity(
        name=given.name,
        scopes=frozenset(map(_scope, given.scopes)),
        engines=Selector() if given.engines == "all" else read_engines(given.engines),
        shows=shows,
    )


def _scope(name: str) -> Scope:
    if name not in {scope.value for scope in Scope}:
        raise ValueError(f"scopes: {name!r} is no scope; there are no wildcards")
    return Scope(name)


def reach_of(settings: Settings) -> ReachPolicy:
    """Raises StartupRefused."""
    reach = settings.engine_reach
    try:
        return ReachPolicy(
            hosts=reach.hosts,
            cidrs=reach.cidrs,
            socket_dirs=tuple(str(folder) for folder in reach.socket_dirs),
            allow_plaintext_beyond_loopback=reach.allow_plaintext_beyond_loopback,
        )
    except ValueError as error:
        raise StartupRefused(f"engine_reach: {error}", EXIT_SETTINGS) from error


def credentials_of(settings: Settings) -> dict[str, CredentialSettings]:
    """Raises StartupRefused."""
    found = {}
    for name, section in settings.engine_credentials.items():
        try:
            found[name] = _credential(section)
        except ValueError as error:
            raise StartupRefused(f"engine_credentials.{name}: {error}", EXIT_SETTINGS) from error
    return found


def _credential(section: CredentialSection) -> CredentialSettings:
    oauth, tls = section.oauth, section.tls
    return CredentialSettings(
        bearer_file=section.bearer_file,
        oauth=None
        if oauth is None
        else OAuthClientSettings(
            token_url=oauth.token_url,
            client_id=oauth.client_id,
            client_secret_file=oauth.client_secret_file,
            scope=oauth.scope,
            parameters=dict(oauth.parameters),
        ),
        tls=None
        if tls is None
        else TlsFiles(authorities=tls.authorities, certificate=tls.certificate, key=tls.key),
        server_name=section.server_name,
        bound_to=section.bound_to,
    )


def deadlines_of(settings: Settings) -> Deadlines:
    """Raises StartupRefused."""
    try:
        return Deadlines(settings.operation_deadline_ms)
    except ValueError as error:
        raise StartupRefused(f"operation_deadline_ms: {error}", EXIT_SETTINGS) from error


def retention_of(settings: Settings) -> Retention:
    return Retention(
        operations=timedelta(days=settings.operation_retention_days),
        audit=timedelta(days=settings.audit_retention_days),
    )


@dataclass(frozen=True, slots=True)
class Meant:
    """What the settings mean."""

    issuers: tuple[IssuerConfig, ...]
    reach: ReachPolicy
    credentials: dict[str, CredentialSettings]
    deadlines: Deadlines
    policy: LivePolicy
    login: LoginSetup | None
    identities: tuple[CompatIdentity, ...]
    nonce_key: bytes | None


def checked(settings: Settings) -> Meant:
    """All that can be found wrong with the settings before anything is opened. Raises
    StartupRefused."""
    issuers = issuers_of(settings)
    return Meant(
        issuers,
        reach_of(settings),
        credentials_of(settings),
        deadlines_of(settings),
        policy_of(settings, issuers),
        logins_of(settings, issuers),
        identities_of(settings),
        nonce_key_of(settings),
    )


def prepare_data_dir(settings: Settings) -> None:
    """Make the folder if it is not there, for its owner alone. Raises StartupRefused."""
    folder = settings.data_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupRefused(
            f"the data directory {folder} cannot be made: {error.strerror}", EXIT_DATA_DIR
        ) from error
    try:
        with tempfile.TemporaryFile(dir=folder):  # what permissions say is not all that counts
            pass
    except OSError as error:
        raise StartupRefused(
            f"the data directory {folder} is not writable: {error.strerror}", EXIT_DATA_DIR
        ) from error


async def opened_ledger(settings: Settings, clock: Clock) -> Ledger:
    """Raises StartupRefused."""
    where = shown(settings.ledger_url)
    try:
        return await Ledger.open(
            settings.ledger_url,
            clock=clock,
            migrate=settings.upgrade_on_start,
            pool_size=settings.database_pool_size,
            wait_s=settings.database_wait_s,
        )
    except LedgerInUse as error:
        raise StartupRefused(f"{where}: {error.message}", EXIT_LEDGER_IN_USE) from error
    except SchemaBehind as error:
        raise StartupRefused(
            f"{where}: {error.message}; run: chadburn db upgrade", EXIT_SCHEMA
        ) from error
    except (SchemaAhead, UpgradeBusy) as error:
        raise StartupRefused(f"{where}: {error.message}", EXIT_SCHEMA) from error
    except LedgerUnavailable as error:
        raise StartupRefused(f"{where}: {error.message}", EXIT_DATABASE) from error
    except InvalidArgument as error:
        raise StartupRefused(f"database_url: {error.message}", EXIT_SETTINGS) from error
    except ChadburnError as error:
        raise StartupRefused(f"{where}: {error.message}", EXIT_DATABASE) from error
