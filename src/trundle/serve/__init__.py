"""The small model at work: an OpenAI-style server over the torch-free runtime, and a page to compare searches.

settings    what an operator may set            batching    texts of many clients, run together
models      who answers which request           wire        what requests and answers look like
body        bodies read within limits           guard       keys, and a last resort for failures
app         the routes                          metrics     figures for Prometheus
corpora     texts to search on the page         playground  the page's own routes
running     from a command line to a server
"""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.serve.app import make_app as make_app
    from trundle.serve.models import Served as Served
    from trundle.serve.models import open_served as open_served
    from trundle.serve.running import run_server as run_server
    from trundle.serve.settings import Settings as Settings

__getattr__ = lazy(
    __name__,
    {
        "Served": "models",
        "Settings": "settings",
        "make_app": "app",
        "open_served": "models",
        "run_server": "running",
    },
)
