"""A real llama.cpp HTTP server as a child process: the program (`python -m` this module) and its handle, `LlamaChild`.

The server comes from the `xllamacpp` package, which runs it inside a Python process. It gets a process of its own:
loading a model holds the interpreter lock for seconds, and a crash in the library must not take the exporter with it.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

MISSING_PACKAGE = "llama.cpp is not installed: pip install 'roofline-exporter[demo]'"
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_NAME = b"llama-server"
"""What llama.cpp's own program is called: by it, the exporter knows the server of another user."""
_LOG_ERRORS_ONLY = 1
_STDERR_LINES = 20
_POLL_SECONDS = 0.05
_TERMINATE_SECONDS = 3.0


class LlamaChildError(RuntimeError):
    """The server could not be started, or died; the message ends with what it wrote last."""


class LlamaChild:
    """The handle of one running server process; made by `start`, ended by `stop` (or by the end of this process)."""

    def __init__(self, process: asyncio.subprocess.Process, host: str, port: int) -> None:
        self._process = process
        self._host = host
        self._port = port
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._reader = asyncio.create_task(self._read_stderr())

    @classmethod
    async def start(
        cls,
        *,
        model: Path,
        port: int = 0,
        host: str = "127.0.0.1",
        parallel: int = 4,
        ctx_size: int = 4096,
        threads: int | None = None,
        metrics: bool = True,
        slots: bool = True,
        api_key_file: Path | None = None,
        alias: str | None = None,
    ) -> Self:
        """Start a server process and return at once; `wait_ready` waits for the model.

        The process is killed by the kernel when the calling *thread* ends, so call this from a thread that stays.

        Args:
            model: The GGUF file.
            port: The TCP port, 0 for any free one.
            host: The IPv4 address or name to listen on.
            parallel: The number of slots.
            ctx_size: Tokens of context, shared out evenly to the slots.
            threads: Compute threads; by default llama.cpp's own choice.
            metrics: Whether `GET /metrics` answers.
            slots: Whether `GET /slots` answers.
            api_key_file: A file with the accepted API keys, one a line.
            alias: The model's name in answers; by default the file's name.
        """
        port = port or _free_port(host)
        arguments = ["--model", str(model), "--port", str(port), "--host", host, "--parallel", str(parallel)]
        arguments += ["--ctx-size", str(ctx_size), "--parent-pid", str(os.getpid())]
        arguments += ["--metrics" if metrics else "--no-metrics", "--slots" if slots else "--no-slots"]
        for option, value in (("--threads", threads), ("--api-key-file", api_key_file), ("--alias", alias)):
            if value is not None:
                arguments += [option, str(value)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", __name__ if __name__ != "__main__" else "exporter.service.llama_child", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal reaches the parent only, which then stops the child in order
        )
        return cls(process, host, port)

    @property
    def url(self) -> str:
        """The server's base URL, without a trailing slash."""
        return f"http://{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.returncode

    @property
    def stderr_tail(self) -> str:
        """The last lines that the process wrote to its standard error."""
        return "\n".join(self._stderr)

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until the model is loaded.

        Args:
            timeout: Seconds to wait.

        Raises:
            LlamaChildError: The process ended, or was not ready in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._process.returncode is None:
                    if await _is_healthy(self._host, self._port):
                        return
                    await asyncio.sleep(_POLL_SECONDS)
        if self._process.returncode is None:
            raise LlamaChildError(f"llama.cpp was not ready after {timeout:g} s\n{self.stderr_tail}".rstrip())
        with contextlib.suppress(TimeoutError):  # the last words may still be in the pipe
            await asyncio.wait_for(asyncio.shield(self._reader), 1.0)
        reason = f"llama.cpp ended with exit code {self._process.returncode}"
        raise LlamaChildError(f"{reason}\n{self.stderr_tail}".rstrip())

    async def stop(self) -> None:
        """End the process: ask, and after a few seconds insist. Does nothing when it has ended already."""
        try:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                try:
                    await asyncio.wait_for(self._process.wait(), _TERMINATE_SECONDS)
                except TimeoutError:
                    with contextlib.suppress(ProcessLookupError):
                        self._process.kill()
                    await self._process.wait()
        finally:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    async def _read_stderr(self) -> None:
        stream = self._process.stderr
        while stream is not None and (line := await _next_line(stream)) is not None:
            self._stderr.append(line)


async def _next_line(stream: asyncio.StreamReader) -> str | None:
    """Return the next line without its end; None at the end of the stream. An overlong line is dropped."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        return line.decode(errors="replace").rstrip() if line else None


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def _is_healthy(host: str, port: int) -> bool:
    """Ask GET /health without a client library: the child imports this module too, and should stay small."""
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                status = (await reader.readline()).split()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    return status[1:2] == [b"200"]


def _join_the_system(parent_pid: int | None) -> None:
    """Take llama.cpp's name, and end with the parent (on Linux; elsewhere the parent has to stop this process)."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_NAME, _NAME, 0, 0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:  # it ended before we asked
        os._exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llama_child", description="Run llama.cpp's HTTP server until SIGTERM.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--metrics", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--slots", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--alias")
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    return parser


def _serve(options: argparse.Namespace) -> int:
    """Load the model, serve it, and end the process by a signal; return only when that could not begin."""
    try:
        import xllamacpp  # noqa: PLC0415 - an optional dependency
    except ImportError:
        sys.stderr.write(MISSING_PACKAGE + "\n")
        return 1
    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.model_alias = {options.alias or options.model.name}
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.ctx_size
    params.endpoint_metrics = options.metrics
    params.endpoint_slots = options.slots
    params.cors_origins = ""
    params.verbosity = _LOG_ERRORS_ONLY
    if options.threads is not None:
        params.cpuparams.n_threads = options.threads
    # The constructor holds the interpreter lock while it loads, so no Python handler could run: a signal just kills.
    wake, waker = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        if options.api_key_file is not None:
            params.api_keys = options.api_key_file.read_text(encoding="utf-8").split()
        server = xllamacpp.Server(params)
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"cannot serve {options.model} on {options.host}:{options.port}: {error}\n")
        return 1
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _wake)
    sys.stderr.write(f"listening on {server.listening_address}\n")
    os.read(wake, 1)
    os._exit(0)  # the server has nothing to save, and the library's orderly shutdown waits for open requests


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the byte that the interpreter writes to the wakeup pipe is the message."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server in this process.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit code when the server could not start; otherwise the process ends in here, with 0.
    """
    options = _parser().parse_args(arguments)
    _join_the_system(options.parent_pid)
    return _serve(options)


if __name__ == "__main__":
    sys.exit(main())
