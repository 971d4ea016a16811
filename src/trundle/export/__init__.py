"""Export models to ONNX and OpenVINO."""
