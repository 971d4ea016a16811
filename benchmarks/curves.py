"""Layer-loss curves of a model at several scales, by what stands before a text (L³Prune, figure 1).

    python benchmarks/curves.py MODEL --data FOLDER [--scales 20,50] [--before nothing,chat]
        [--instruction TEXT] [--tuples 1280] [--max-length 512] [--seeds 0,1,2]

Prints one line of JSON per curve: the losses, and the layers that *small* and *large* would keep. `before` is
"nothing", "instruction" (before queries) or "chat" (the instruction in the model's chat template); neither is
pooled. "messages" is sentence-transformers' own rendering of every text as a message, which is pooled.
"""

from __future__ import annotations

import argparse
import json

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer

from trundle import load, read_corpus
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import prepared
from trundle.methods.depth.curve import measure_curve


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--scales", default="20,50")
    parser.add_argument("--before", default="nothing", help="nothing, instruction, chat and messages")
    parser.add_argument("--instruction", default="", help="a prompt of queries, left out of pooling")
    parser.add_argument("--tuples", type=int, default=1280)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seeds", default="0")
    options = parser.parse_args()
    model = load(options.model)
    told = ContrastOptions(query_prompt=f"{options.instruction}\n", pool_prompts=False)
    make = {
        "nothing": lambda: model,
        "instruction": lambda: prepared(model, told),
        "chat": lambda: prepared(model, told.model_copy(update={"chat": True})),
        "messages": lambda: SentenceTransformer(modules=[Transformer(options.model), model[1]]),
    }
    ways = {before: make[before]() for before in options.before.split(",")}
    for seed in map(int, options.seeds.split(",")):
        corpus = read_corpus([options.data], seed=seed)
        for before, way in ways.items():
            for scale in map(float, options.scales.split(",")):
                curve = measure_curve(
                    way,
                    corpus.examples(),
                    tuples=options.tuples,
                    scale=scale,
                    max_length=options.max_length,
                    seed=seed,
                )
                row = {"seed": seed, "scale": scale, "before": before, **curve.as_json()}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
