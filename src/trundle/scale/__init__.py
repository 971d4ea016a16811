"""Teacher vectors of more texts than one machine can take: the same store, filled by the workers of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.scale.alone import build_alone as build_alone
    from trundle.scale.on_ray import build_on_ray as build_on_ray
    from trundle.scale.teachers import Asked as Asked
    from trundle.scale.teachers import everywhere as everywhere

__getattr__ = lazy(
    __name__,
    {
        "build_alone": "alone",
        "build_on_ray": "on_ray",
        "Asked": "teachers",
        "everywhere": "teachers",
    },
)
