"""One connection to one address: resolved, held to the allow-list, and made anew when it is lost.

gRPC would resolve names by itself, at moments of its own and to whatever comes back. Here the
name is resolved first, every answer is judged, and gRPC is given the IP addresses that passed: what
it connects and reconnects to has always been judged.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import quote

import grpc

from app.backends.credentials import (
    Credential,
    CredentialUnavailable,
    FileStamp,
    belong_together,
    read_pem,
    stamp,
)
from app.backends.port import EngineSilent, Silence
from app.backends.reach import Address, OutOfReach, ReachPolicy
from app.backends.telling import Trouble
from app.backends.watched import Begin, WatchedChannel

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
UNARY_TIMEOUT_S = 10.0
_RESOLVE_TIMEOUT_S = 3.0

_LAST_CALLS_S = 600.0

_Files = tuple[bytes | None, bytes | None, bytes | None]  # authorities, key, certificate

Resolve = Callable[[str, int], Awaitable[tuple[str, ...]]]
"""IP literals of a host name. Raises OSError."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Neither configured nor transparent retries: an order is sent by the runner or not at all.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    # The environment's proxy would be a way round the allow-list.
    ("grpc.enable_http_proxy", 0),
    # Two engines, or an engine before and after a change of its credential, share no connection.
    ("grpc.use_local_subchannel_pool", 1),
    # A peer that is gone without a word is noticed within 70 s, faster than a default server
    # takes offence at (it counts pings that no data came between; orders ask in between).
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # An engine that was restarted is found again at once, not after minutes of backing off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 300),
    ("grpc.max_reconnect_backoff_ms", 600),
)


async def resolve(host: str, port: int) -> tuple[str, ...]:
    """By the system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class DeadlineInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    """No unary call is without a deadline, whoever writes the next one."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[
            [grpc.aio.ClientCallDetails, _Request],
            Awaitable[grpc.aio.UnaryUnaryCall[_Request, _Response]],
        ],
        client_call_details: grpc.aio.ClientCallDetails,
        request: _Request,
    ) -> _Response | grpc.aio.UnaryUnaryCall[_Request, _Response]:
        details = client_call_details
        if details.timeout is None:
            details = grpc.aio.ClientCallDetails(
                method=details.method,
                timeout=UNARY_TIMEOUT_S,
                metadata=details.metadata,
                credentials=details.credentials,
                wait_for_ready=details.wait_for_ready,
            )
        return await continuation(details, request)


class Line:
    """The way to one address. Belongs to the event loop it is first used in."""

    def __init__(
        self,
        address: Address,
        reach: ReachPolicy,
        credential: Credential,
        *,
        resolver: Resolve = resolve,
        begin: Begin | None = None,
    ) -> None:
        """`begin`: told of each call that is made on it."""
        self._begin = begin
        self._address = address
        self._trouble = Trouble(log, f"engine at {self.name}")
        self._reach = reach
        self._credential = credential
        self._resolver = resolver
        self._lock = asyncio.Lock()
        self._channel: grpc.aio.Channel | None = None
        self._made_of: tuple[str, _Files] | None = None
        self._stamps: tuple[FileStamp, ...] = ()
        self._leaving: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._suspect = False

    @property
    def name(self) -> str:
        """As it is registered, for the log."""
        address = self._address
        return address.socket or f"{address.host}:{address.port}"

    async def channel(self) -> grpc.aio.Channel:
        """The channel to use now: a new one when a file of TLS was replaced, so that the first
        order after it is not the one that finds out. Raises EngineSilent when there is no way that
        may be used."""
        async with self._lock:
            if self._channel is None or self._suspect or self._stamps != self._found():
                await self._renew()
                self._suspect = False
            assert self._channel is not None
            return self._channel

    @property
    def connected(self) -> bool:
        return (
            self._channel is not None
            and self._channel.get_state() is grpc.ChannelConnectivity.READY
        )

    def doubt(self) -> None:
        """It did not answer: before the next use the name is resolved and the files are read
        again. A channel whose parts have not changed is kept; it reconnects by itself."""
        self._suspect = True

    async def close(self) -> None:
        async with self._lock:
            channel, self._channel = self._channel, None
            leaving, self._leaving = self._leaving, {}
        for task in leaving:
            task.cancel()
        for one in (channel, *leaving.values()):
            if one is not None:
                await one.close()

    async def _renew(self) -> None:
        try:
            target = await self._target()
            stamps = self._found()
            files = self._files()
        except OutOfReach as refused:
            self._trouble.seen(logging.ERROR, f"its address may not be used: {refused.message}")
            await self._drop()
            raise EngineSilent(Silence.REFUSED) from refused
        except CredentialUnavailable as missing:
            self._trouble.seen(logging.ERROR, f"no credential: {missing}")
            raise EngineSilent(Silence.AUTH_REFUSED) from missing
        except (OSError, TimeoutError) as failed:
            said = f"its name could not be resolved: {type(failed).__name__}"
            self._trouble.seen(logging.WARNING, said, "name")
            raise EngineSilent(Silence.UNREACHABLE) from failed
        self._stamps = stamps
        if self._half_replaced():
            said = "certificate and key do not belong together yet"
            self._trouble.seen(logging.WARNING, said)
            if self._made_of is None:
                raise EngineSilent(Silence.AUTH_REFUSED)
            files = self._made_of[1]
        else:
            self._trouble.over()
        if (target, files) == self._made_of and self._channel is not None:
            return
        if self._made_of is not None and self._made_of[0] == target:
            self._let_go()
        await self._drop()
        self._channel = self._open(target, files)
        self._made_of = (target, files)

    def _let_go(self) -> None:
        """What was begun with the old certificate goes on to its end."""
        channel, self._channel = self._channel, None
        if channel is not None:
            task = asyncio.create_task(channel.close(_LAST_CALLS_S))
            self._leaving[task] = channel
            task.add_done_callback(lambda done: self._leaving.pop(done, None))

    async def _drop(self) -> None:
        channel, self._channel = self._channel, None
        self._made_of = None
        if channel is not None:
            await channel.close()

    async def _target(self) -> str:
        address = self._address
        if address.socket:
            self._reach.check_socket(address.socket)
            # gRPC reads a URI. Unquoted, `%2e%2e` would be judged as a name and used as `..`, and
            # a `?` would end the path.
            return f"unix:{quote(address.socket)}"
        literals: tuple[str, ...] = (address.host,)
        if address.ip is None:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                literals = await self._resolver(address.host, address.port)
        ips = [ipaddress.ip_address(literal.partition("%")[0]) for literal in literals]
        if not ips:
            raise OSError("the name has no address")
        for ip in ips:
            # All of them: gRPC picks which one to use.
            self._reach.check_ip(address, ip, encrypted=self._credential.encrypted)
        family = ips[0].version
        places = [_place(ip, address.port) for ip in ips if ip.version == family]
        return f"ipv{family}:{','.join(places)}"

    def _files(self) -> _Files:
        tls = self._credential.tls
        if tls is None:
            return (None, None, None)
        return (read_pem(tls.authorities), read_pem(tls.key), read_pem(tls.certificate))

    def _half_replaced(self) -> bool:
        tls = self._credential.tls
        if tls is None or tls.certificate is None or tls.key is None:
            return False
        return not belong_together(tls.certificate, tls.key)

    def _found(self) -> tuple[FileStamp, ...]:
        tls = self._credential.tls
        paths = () if tls is None else (tls.authorities, tls.key, tls.certificate)
        return tuple(stamp(path) for path in paths if path is not None)

    def _open(self, target: str, files: _Files) -> grpc.aio.Channel:
        name = self._credential.server_name or self._address.host or "localhost"
        options: list[tuple[str, str | int]] = [*_OPTIONS, ("grpc.default_authority", name)]
        interceptors = [DeadlineInterceptor()]
        if self._credential.tls is None:
            made = grpc.aio.insecure_channel(target, options, interceptors=interceptors)
        else:
            options.append(("grpc.ssl_target_name_override", name))
            credentials = grpc.ssl_channel_credentials(*files)
            made = grpc.aio.secure_channel(target, credentials, options, interceptors=interceptors)
        return made if self._begin is None else WatchedChannel(made, self._begin)


def _place(ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> str:
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"
