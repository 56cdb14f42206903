"""Servers as child processes, for the scripts that measure through HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO

HOST = "127.0.0.1"
START_SECONDS, STOP_SECONDS = 180.0, 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A command that answers on `port`; a context manager: ready when it is entered."""

    def __init__(self, command: Sequence[str], port: int, log: Path, threads: int) -> None:
        self.port = port
        self.log = log
        self._command = list(command)
        self._env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._output: IO[bytes]

    def __enter__(self) -> Server:
        self._output = self.log.open("wb")
        self.process = subprocess.Popen(
            self._command, env=self._env, stdout=self._output, stderr=subprocess.STDOUT
        )
        try:
            self._await_health()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Ask it to end as a service manager does; its exit code, negative for a signal."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._output.close()
        return self.process.returncode

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self._command[0]} ended at once:\n{self._tail()}")
            if self._is_healthy():
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self._command[0]} is not healthy after {START_SECONDS:.0f} s")

    def _is_healthy(self) -> bool:
        connection = HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])


def starquill(model: str, log: Path, threads: int, *flags: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "starquill", "serve", model, "--port", str(port), *flags]
    return Server(command, port, log, threads)


def llama_cpp(binary: str, model: Path, log: Path, threads: int, *flags: str) -> Server:
    """llama.cpp's own server. Nothing of old requests is kept: it would only take time here."""
    port = free_port()
    command = [binary, "-m", str(model), "--host", HOST, "--port", str(port)]
    command += ["-t", str(threads), "-tb", str(threads), "--cache-ram", "0", *flags]
    return Server(command, port, log, threads)
