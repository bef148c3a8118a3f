"""Where the processes of ranks come from: forked off one that has loaded torch and done no more.

    front end ──order: environment, sockets──▶ nursery ──fork──▶ (between) ──fork──▶ rank
        ◀────────────────── its process id ──────┘

Loading torch takes a second of processor time: for each rank at each start, and again for each when
ranks were lost and nothing is served until there are others. A fork has it at once, and shares its
pages. To fork is sound where it is done: there is one thread, no device has been touched, and no
lock is held. A rank is the front end's own child, which it can wait for, see stopped and kill: the
process between the two ends at once, and the front end adopts what it leaves.

    python -m app.reference_engine.nursery FD WORKER        run by `Nursery`
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

from app.reference_engine.errors import StartupFailed
from app.reference_engine.processes import WORKER, own_environment, own_module, stopped

RANK_NAME = "chadburn-rank"  # of the process, as ps shows it; the kernel keeps 15 bytes

_MODULE = "app.reference_engine.nursery"
_HEADER = struct.Struct("!I")
_PID = struct.Struct("!q")
_MOST_SOCKETS = 253  # as many as Linux passes on with one message
_LOOK_S = 0.25
_SET_NAME, _SET_ADOPTS = 15, 36  # prctl(2): PR_SET_NAME, PR_SET_CHILD_SUBREAPER

# Who adopts is a property of the process, whatever nurseries it has: on for the one that asks, and
# off again, since what other orphans there are is not for this process to bury.
_ADOPTING = threading.RLock()


class ForkedProcess:
    """A child of this process that it did not start itself. Lives on one event loop."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._handle = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._handle, self._reap)

    def kill(self) -> None:
        if not self._code.done():
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Its exit code; negative is a signal's number."""
        return await asyncio.shield(self._code)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        _, status = os.waitpid(self.pid, 0)
        self._code.set_result(os.waitstatus_to_exitcode(status))


class Nursery:
    """Makes ranks that run the module ``worker``. Its own process starts with the first, and again
    where that has ended or was stopped."""

    def __init__(self, worker: str = WORKER) -> None:
        self._worker = worker
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def rank(self, sockets: Sequence[int]) -> ForkedProcess:
        """A process with nothing of this one but its environment and those descriptors. Raises
        StartupFailed, or OSError. Whoever gives up waiting leaves a rank without a peer, which
        ends by itself."""
        made = asyncio.get_running_loop().run_in_executor(
            None, self._fork, tuple(map(os.dup, sockets))
        )
        try:
            return ForkedProcess(await asyncio.shield(made))
        except asyncio.CancelledError:
            made.add_done_callback(_forget)
            raise

    def close(self) -> None:
        """End its process; ranks go on. May be called again, and while a rank is made."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
        with _ADOPTING:  # whoever waits for its answer sees its end first, and lets go
            if self._control is not None and self._process is process:
                self._process = None
                self._control.close()

    def _fork(self, sockets: tuple[int, ...]) -> int:
        """The new child's process id. Takes as long as torch takes to load, the first time."""
        order = json.dumps(
            # Ranks meet on this machine alone; left to themselves, gloo takes whatever address the
            # host name has and NCCL the first network card. The profiler's own library would tell
            # of each recording.
            own_environment()
            | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "KINETO_LOG_LEVEL": "99"}
        ).encode()
        try:
            with _ADOPTING:
                process, control = self._opened()
                _prctl(_SET_ADOPTS, 1)
                try:
                    socket.send_fds(control, [_HEADER.pack(len(order))], sockets)
                    control.sendall(order)
                    answer = self._answer(process, control)
                finally:
                    _prctl(_SET_ADOPTS, 0)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        finally:
            for one in sockets:
                os.close(one)
        if len(answer) < _PID.size:
            code = process.wait()
            raise StartupFailed(f"the process that makes ranks ended (exit code {code})")
        (pid,) = _PID.unpack(answer)
        if pid < 0:
            raise StartupFailed(f"no process for a rank: {os.strerror(-pid)}")
        return int(pid)

    def _opened(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        process, control = self._process, self._control
        if process is not None and control is not None:
            if process.poll() is None and not stopped(process.pid):
                return process, control
            self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603 (a module of this package)
                [*own_module(_MODULE), str(theirs.fileno()), self._worker],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=own_environment(),
            )
        ours.settimeout(_LOOK_S)
        self._process, self._control = process, ours
        return process, ours

    def _answer(self, process: subprocess.Popen[bytes], control: socket.socket) -> bytes:
        """Empty: it has ended. One that is stopped would never answer, and is not waited for."""
        while True:
            try:
                return control.recv(_PID.size)
            except TimeoutError:
                if stopped(process.pid):
                    process.kill()


def _forget(made: asyncio.Future[int]) -> None:
    """Nobody waits for that rank any more: see that it is gone."""
    if not made.cancelled() and made.exception() is None:
        ForkedProcess(made.result()).kill()


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> NoReturn:
    """Entry point of the process. It ends with the front end, whose end of the socket is the only
    one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control, worker = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    # A rank then tries it by itself, and says on its connection what is the matter.
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        importlib.import_module("app.reference_engine.assembly")
    gc.collect()
    gc.freeze()  # a collection would write into pages that are shared
    while True:
        header, sockets, _, _ = socket.recv_fds(control, _HEADER.size, _MOST_SOCKETS)
        if len(header) < _HEADER.size:
            os._exit(0)
        (length,) = _HEADER.unpack(header)
        order = bytearray()
        while len(order) < length:
            order += (more := control.recv(length - len(order)))
            if not more:
                os._exit(0)
        control.sendall(_PID.pack(_forked(control, worker, sockets, json.loads(order))))
        for one in sockets:
            os.close(one)


def _forked(
    control: socket.socket, worker: str, sockets: list[int], environment: dict[str, str]
) -> int:
    """The rank's process id, or the number of the error, negative."""
    read, write = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _leave_behind(control, worker, sockets, environment, write)
        os.close(write)
        write = -1
        told = os.read(read, _PID.size)
        os.waitpid(between, 0)
    except OSError as error:
        return -(error.errno or 1)
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
    return int(_PID.unpack(told)[0])


def _leave_behind(
    control: socket.socket,
    worker: str,
    sockets: list[int],
    environment: dict[str, str],
    write: int,
) -> NoReturn:
    """The process between: its child is the front end's as soon as it has ended itself."""
    told = -1
    try:
        _prctl(_SET_NAME, RANK_NAME.encode())  # for the child: it has it from the beginning
        told = os.fork()
    except OSError as error:
        told = -(error.errno or 1)
    if told == 0:
        os.close(write)
        control.close()
        _be_rank(worker, sockets, environment)
    os.write(write, _PID.pack(told))
    os._exit(0)


def _be_rank(worker: str, sockets: list[int], environment: dict[str, str]) -> NoReturn:
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [worker, *map(str, sockets)]
        importlib.import_module(worker).main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
