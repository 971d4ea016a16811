"""Speed, latency, memory and size of models side by side, each in a process of its own."""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.bench.results import BenchResult as BenchResult
    from trundle.bench.results import ModelFigures as ModelFigures
    from trundle.bench.results import caution as caution
    from trundle.bench.results import rows as rows
    from trundle.bench.rounds import bench as bench

__getattr__ = lazy(
    __name__,
    {
        "BenchResult": "results",
        "ModelFigures": "results",
        "caution": "results",
        "rows": "results",
        "bench": "rounds",
    },
)
