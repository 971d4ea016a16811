"""The parent's side of one worker process: start it, send requests, and end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, Any, Self

from trundle.errors import BadModel, TrundleError, UserError

_COMMAND = (sys.executable, "-P", "-m", "trundle.bench.child")
"""-P: a file in the user's folder must not shadow a library of the same name."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class _Worker:
    """One worker process. It ends when the `with` block is left."""

    def __init__(
        self, label: str, *, threads: int, timeout: float, command: Sequence[str] = _COMMAND
    ) -> None:
        self.label = label
        self._timeout = timeout
        self._answers: SimpleQueue[str] = SimpleQueue()
        # A file, because a pipe that no one reads would fill up and block the worker.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads))},
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the workers
        )
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer; a worker that fails, dies or hangs raises an error."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # it died: the missing answer is reported below
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        try:
            line = self._answers.get(timeout=self._timeout)
        except Empty:
            raise TrundleError(
                f"{self.label} gave no answer within {self._timeout:g} s; "
                "allow it more time, or leave it out of the benchmark"
            ) from None
        if not line:
            raise self._died()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            sentence, kind = str(reply["error"]), reply["kind"]
            if kind == "crash":
                sentence = (
                    f"{self.label} failed in the benchmark ({sentence}); try the model alone to see why"
                )
            raise {"model": BadModel, "user": UserError}.get(kind, TrundleError)(sentence)
        return reply

    def close(self) -> None:
        """End the worker, which has no state to lose."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _died(self) -> TrundleError:
        """How the process ended: its signal, or the last line it printed."""
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return TrundleError(
                f"the process of {self.label} was killed from outside; "
                "free some memory, or benchmark fewer models at once"
            )
        self._stderr.seek(0)
        said = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        last = said[-1].strip() if said else signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return TrundleError(f"the process of {self.label} died ({last}); try the model alone to see why")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _read(pipe: IO[str], answers: SimpleQueue[str]) -> None:
    """Collect answers, in a thread so that the parent can time out; an empty answer is the end.

    Other lines (printed while the interpreter starts, or truncated) are skipped.
    """
    for line in pipe:
        if line.startswith("{") and line.endswith("\n"):
            answers.put(line)
    answers.put("")
