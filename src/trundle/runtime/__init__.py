"""Using a model without torch: tokenizers, numpy, and onnxruntime or openvino.

from trundle.runtime import Encoder

vectors = Encoder("folder").encode(["a text", "another"])
"""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.runtime.describe import Description as Description
    from trundle.runtime.describe import Graph as Graph
    from trundle.runtime.encoder import Encoder as Encoder

__all__ = ["Description", "Encoder", "Graph"]

__getattr__ = lazy(__name__, {"Description": "describe", "Graph": "describe", "Encoder": "encoder"})
