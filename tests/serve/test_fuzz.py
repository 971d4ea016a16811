"""The OpenAPI description, fuzzed: no response is a 5xx or undocumented."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from live_server import LiveServer

pytestmark = pytest.mark.skipif(find_spec("schemathesis") is None, reason="needs schemathesis")

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_no_5xx(server: LiveServer) -> None:
    script = "import sys; from schemathesis.cli import schemathesis; schemathesis()"
    words = ["run", f"{server.url}/openapi.json", "--max-examples", "25", "--checks", CHECKS, "--seed", "0"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words, "--phases", "examples,coverage,fuzzing"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert server.embed(input="still here").status == 200
