"""A model leaves torch: one graph with pooling, dense and normalisation inside, checked before it is written."""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.export.exporting import Exported as Exported
    from trundle.export.exporting import export_model as export_model

__getattr__ = lazy(__name__, {"Exported": "exporting", "export_model": "exporting"})
