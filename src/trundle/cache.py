from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where costly intermediate results are kept: $TRUNDLE_CACHE, or a folder among the user's other caches."""
    given = os.environ.get("TRUNDLE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given).expanduser() if given else base / "trundle"
