"""The optional packages that serving needs, or the name of the extra that brings them."""

from __future__ import annotations

from trundle.errors import MissingExtra

try:
    import fastapi as fastapi
    import prometheus_client as prometheus_client
    import uvicorn as uvicorn
except ImportError as error:
    raise MissingExtra("serve", "serve") from error
