"""Predicted parameters and bytes against those of the built and saved model, as it is and halved.

    python benchmarks/costs.py MODEL [MODEL ...]

Halved is every second layer, and half of the width, head dimensions and MLP neurons.
"""

from __future__ import annotations

import tempfile

import harness
from trundle.measure import cost, predict
from trundle.model import Cut, cut, layout_of, load, transformer_of, weight_bytes


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("models", nargs="+")
    for name in parser.parse_args().models:
        model = load(name)
        layout = layout_of(transformer_of(model).model)
        blocks = tuple(range(0, layout.layers, 2))
        kept = {axis: tuple(range(0, layout.sizes[axis], 2)) for axis in ("hidden", "head", "mlp")}
        mlps = (kept["mlp"],) * layout.layers
        small = cut(model, Cut(blocks=blocks, hidden=kept["hidden"], head=kept["head"], mlp=mlps))
        half = predict(model, blocks=blocks, **{axis: len(places) for axis, places in kept.items()})
        for label, planned, built in (("as it is", cost(model), model), ("halved", half, small)):
            with tempfile.TemporaryDirectory() as folder:
                built.save_pretrained(folder, create_model_card=False)
                size = weight_bytes(folder)
            truth = sum(weight.numel() for weight in built.parameters())
            print(
                f"{name[-28:]:28} {label:8} parameters {planned.parameters:13,} predicted {truth:13,} real   "
                f"bytes {planned.file_bytes:13,} predicted {size:13,} real {planned.file_bytes / size:9.6f}"
            )


if __name__ == "__main__":
    main()
