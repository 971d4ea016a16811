"""The optional package that a cluster needs, or the name of the extra that brings it."""

from __future__ import annotations

from trundle.errors import MissingExtra

try:
    import ray as ray
    import ray.data as ray_data
except ImportError as error:
    raise MissingExtra("--ray", "scale") from error

__all__ = ["ray", "ray_data"]
