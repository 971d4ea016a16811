"""Predicted sizes against the truth: parameters by numel and bytes of the saved file, before and after a planned cut.

    python benchmarks/costs.py MODEL [MODEL ...]

For each model: as it is, and with half its layers, half its width and half its MLP neurons, predicted without building
it and then built and saved.
"""

from __future__ import annotations

import argparse
import tempfile

from trundle.model.cost import cost, predict
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.save import weight_bytes
from trundle.model.surgery import Cut, cut, transformer_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    arguments = parser.parse_args()
    print(
        f"{'model':28} {'':8} {'predicted':>13} {'numel':>13} {'bytes':>13} {'file':>13} {'bytes / file':>13}"
    )
    for name in arguments.models:
        model = load(name)
        layout = layout_of(transformer_of(model).model)
        blocks = tuple(range(0, layout.layers, 2))
        kept = {axis: tuple(range(0, layout.sizes[axis], 2)) for axis in ("hidden", "head", "mlp")}
        what = Cut(
            blocks=blocks, hidden=kept["hidden"], head=kept["head"], mlp=(kept["mlp"],) * layout.layers
        )
        counts = {axis: len(indices) for axis, indices in kept.items()}
        half = predict(model, blocks=blocks, hidden=counts["hidden"], head=counts["head"], mlp=counts["mlp"])
        for label, planned, built in (("as it is", cost(model), model), ("halved", half, cut(model, what))):
            with tempfile.TemporaryDirectory() as folder:
                built.save_pretrained(folder, create_model_card=False)
                size = weight_bytes(folder)
            truth = sum(weight.numel() for weight in built.parameters())
            row = f"{planned.parameters:13,} {truth:13,} {planned.file_bytes:13,} {size:13,} {planned.file_bytes / size:13.6f}"
            print(f"{name[-28:]:28} {label:8} {row}")


if __name__ == "__main__":
    main()
