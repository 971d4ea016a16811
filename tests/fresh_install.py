"""Builds the wheel, installs it alone into a new venv and encodes with it; prints the installed size.

Run it with the Python of a complete install: `make wheel`. The new venv must have no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).parents[1]
READY = ROOT / "models" / "all-mpnet-base-v2-12MB"
NOT_TRUNDLES = ("pip", "setuptools")
# uv has unpacked most packages before, but reads no settings of pip, which is asked where uv fails.
UV: list[str | Path] = [sys.executable, "-m", "uv", "--quiet"]
PIP: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
LINKS = [word for place in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", place)]
ENCODE = """
import importlib.util, sys, trundle
encoder = trundle.Encoder(sys.argv[1])
vectors = encoder.encode_query(["how do I open a file?", "reading files", "a trundle bed"])
assert vectors.shape == (3, encoder.dimensions), vectors.shape
assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] or not sys.argv[2:]
assert importlib.util.find_spec("torch") is None
try:
    trundle.compress("path/to/model", texts=["a text"])
except trundle.TrundleError as error:
    assert "pip install 'trundle[compress]'" in str(error), error
else:
    raise AssertionError("compress ran without its packages")
"""


def main() -> None:
    """Prints one line, or fails."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = READY if READY.is_dir() else exported_pico(place)
        wheels, python = place / "wheels", place / "venv" / "bin" / "python"
        call(UV, ["build", *LINKS, "--wheel", "--out-dir", wheels, ROOT]) or call(
            PIP, ["wheel", "--no-deps", "--wheel-dir", wheels, ROOT], check=True
        )
        [wheel] = wheels.glob("trundle-*.whl")
        venv.create(place / "venv")
        wanted = ["--constraint", ROOT / "constraints.txt", wheel]
        call(UV, ["pip", "install", *LINKS, "--python", python, *wanted]) or call(
            PIP, ["--python", python, "install", "--no-compile", *wanted], check=True
        )
        encode = ["-c", ENCODE, model, *(["ready"] if model == READY else [])]
        call([python], encode, cwd=place, check=True)
        refused = subprocess.run(
            [python, "-m", "trundle", "inspect", model], capture_output=True, text=True, check=False
        )
        assert refused.returncode == 2, refused
        assert "pip install 'trundle[compress]'" in refused.stderr, refused
        [packages] = (place / "venv" / "lib").glob("python*/site-packages")
        print(f"{wheel.name}: {megabytes(packages):.0f} MB installed, encodes with {model.name}")


def exported_pico(place: Path) -> Path:
    """Returns a folder with an exported pico model."""
    import pico
    from trundle.export.exporting import export_model

    model = place / "pico"
    pico.model("bert", str(place / "backbone")).save_pretrained(str(model), create_model_card=False)
    export_model(str(model), to="onnx")
    return model


def megabytes(packages: Path) -> float:
    """Returns the size of the installed packages without pip's own."""
    files = (file for file in packages.rglob("*") if file.is_file() and not file.is_symlink())
    kept = (file for file in files if not file.relative_to(packages).parts[0].startswith(NOT_TRUNDLES))
    return sum(file.stat().st_size for file in kept) / 1e6


def call(
    program: list[str | Path], words: list[str | Path], cwd: Path = ROOT, *, check: bool = False
) -> bool:
    """Runs a command; returns whether it succeeded, or fails with it if `check` is set."""
    command = [str(part) for part in (*program, *words)]
    return subprocess.run(command, check=check, cwd=cwd).returncode == 0


if __name__ == "__main__":
    main()
