"""Which admin scopes a token grants, by its issuer's mapping."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.auth.tokens.issuers import IssuerConfig, RoleUse
from app.domain.scopes import Scope, admin_scopes


def granted_scopes(config: IssuerConfig, claims: Mapping[str, Any]) -> frozenset[Scope]:
    """The scopes literally present, and those of the roles literally present.

    No prefix and no wildcard means anything: ``*``, ``admin:*`` and scopes unknown here are
    ignored. A claim that is absent or of an unexpected type grants nothing. Where a token has a
    scope claim and the issuer has role maps, :class:`RoleUse` says how they meet.
    """
    from_claims = admin_scopes(
        text.removeprefix(config.scope_prefix)
        for claim in config.scope_claims
        for text in _strings(claims.get(claim), split=True)
        if text.startswith(config.scope_prefix)
    )
    if not config.role_maps:
        return from_claims
    from_roles = frozenset(
        scope
        for role_map in config.role_maps
        for role in _strings(_at(claims, role_map.path), split=False)
        for scope in role_map.scopes.get(role, ())
    )
    if not has_scope_claim(config, claims):
        return from_roles
    return from_claims & from_roles if config.role_use is RoleUse.CAP else from_claims | from_roles


def groups_of(config: IssuerConfig, claims: Mapping[str, Any]) -> frozenset[str]:
    """The groups literally present. A claim that is absent or of an unexpected type has none."""
    return frozenset(
        group
        for path in config.group_paths
        for group in _strings(_at(claims, path), split=False)
        if group
    )


def has_scope_claim(config: IssuerConfig, claims: Mapping[str, Any]) -> bool:
    """Whether any of the issuer's scope claims is there, whatever it holds."""
    return any(claim in claims for claim in config.scope_claims)


def _at(claims: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = claims
    for name in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _strings(value: Any, *, split: bool) -> Iterator[str]:
    if isinstance(value, str):
        # Only the space separates (RFC 6749 §3.3): str.split() would also take the control
        # characters and Unicode spaces that no issuer means as separators.
        yield from value.split(" ") if split else (value,)
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, str))
