"""A model leaves torch: one graph with pooling, dense and normalisation inside, checked before it is written."""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.export.exporting import Exported as Exported
    from trundle.export.exporting import export_model as export_model
    from trundle.export.loss import Limits as Limits
    from trundle.export.loss import calibration_texts as calibration_texts
    from trundle.export.opening import open_embedder as open_embedder
    from trundle.export.opening import open_encoder as open_encoder
    from trundle.export.opening import open_sides as open_sides
    from trundle.export.sentence_transformer import as_sentence_transformer as as_sentence_transformer

__getattr__ = lazy(
    __name__,
    {
        "Exported": "exporting",
        "export_model": "exporting",
        "Limits": "loss",
        "calibration_texts": "loss",
        "open_embedder": "opening",
        "open_encoder": "opening",
        "open_sides": "opening",
        "as_sentence_transformer": "sentence_transformer",
    },
)
