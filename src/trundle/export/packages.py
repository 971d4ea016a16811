"""The optional packages that every export needs, or the name of the extra that brings them."""

from __future__ import annotations

from trundle.errors import MissingExtra

try:
    import onnx as onnx
    import onnxruntime as onnxruntime
except ImportError as error:
    raise MissingExtra("export", "export") from error
