"""The dashboard's files: read once, and named so that browsers keep them for as long as they hold.

There is no build step. Instead of a digest in each file's name there is one of all of them in the
folder that they are served from: modules import each other by relative paths, which stay in it,
and a page never mixes the files of two releases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import app

SHELL_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No text becomes markup: with trusted types a browser refuses `innerHTML` and its like."""

_SHELL = "index.html"
_KINDS = {
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""By suffix; what has another is not served. Said here, as what `mimetypes` says depends on the
machine, and browsers run no module of another type."""
_LATER = frozenset({"vendor/uplot.mjs"})
"""Modules that only some pages load."""


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes = field(repr=False)
    media_type: str


@dataclass(frozen=True, slots=True)
class DashboardFiles:
    """`assets` by their path below `static/`; none, and no `shell`: it is not installed."""

    shell: str = field(repr=False)
    assets: Mapping[str, Asset] = field(repr=False)
    digest: str

    def page(self, prefix: str) -> str:
        """The page that all addresses of the dashboard show. `prefix`: of all paths of the gateway
        as browsers see them."""
        folder = f"{prefix}/ui/assets/{self.digest}"
        early = "".join(
            f'<link rel="modulepreload" href="{escape(f"{folder}/{path}")}">'
            for path in sorted(self.assets)
            if path.endswith(("js", "mjs")) and path not in _LATER
        )
        return self.shell.replace("<!--early-->", early).replace("{assets}", escape(folder))


def dashboard_files(folder: Path | None = None) -> DashboardFiles:
    """What lies in `static/` at present. `folder` None: as installed."""
    root = folder or _installed()
    shell, assets, digest = "", {}, hashlib.sha256()
    for path in sorted(root.rglob("*")) if root.is_dir() else ():
        name = path.relative_to(root).as_posix()
        if not path.is_file():
            continue
        content = path.read_bytes()
        digest.update(f"{name}\x00{len(content)}\x00".encode() + content)
        if name == _SHELL:
            shell = content.decode()
        elif path.suffix in _KINDS:
            assets[name] = Asset(content, _KINDS[path.suffix])
    return DashboardFiles(shell, assets, digest.hexdigest()[:16])


def _installed() -> Path:
    """In an installed wheel they are part of the package, in a checkout they lie beside it."""
    package = Path(app.__file__).parent
    inside = package / "_static"
    return inside if inside.is_dir() else package.parent / "static"
