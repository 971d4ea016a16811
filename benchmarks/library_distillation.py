"""What a user would do without trundle: sentence-transformers' layer reduction and distillation, by its own trainer.

    python benchmarks/library_distillation.py TEACHER TEXTS.json LAYERS STEPS BATCH_SIZE OUTPUT

Evenly spread layers of the teacher are kept and trained with MSELoss on the teacher's vectors, at the learning rate and
warm-up of the library's distillation example. Nothing of trundle is used; `heal.py` calls it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MSELoss
from torch import nn


def reduced(teacher: str, layers: int) -> SentenceTransformer:
    """Evenly spaced layers, as in the example: 1, 4, 7, 10 for 4 of 12."""
    student = SentenceTransformer(teacher)
    backbone: Any = student[0].model
    of = backbone.config.num_hidden_layers
    kept = [number * of // layers + of // layers // 2 for number in range(layers)]
    backbone.encoder.layer = nn.ModuleList([backbone.encoder.layer[number] for number in kept])
    backbone.config.num_hidden_layers = layers
    return student


def main() -> None:
    teacher, texts, layers, steps, batch_size, output = sys.argv[1:]
    student = reduced(teacher, int(layers))
    sentences = json.loads(Path(texts).read_text())
    on_gpu = torch.cuda.is_available()
    vectors = SentenceTransformer(teacher).encode(sentences, batch_size=256 if on_gpu else 32)
    settings = SentenceTransformerTrainingArguments(
        output_dir=f"{output}-trainer",
        max_steps=int(steps),
        per_device_train_batch_size=int(batch_size),
        learning_rate=1e-4,
        warmup_steps=int(steps) // 10,
        bf16=on_gpu,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    table = Dataset.from_dict({"text": sentences, "label": list(vectors)})
    trainer = SentenceTransformerTrainer(
        model=student, args=settings, train_dataset=table, loss=MSELoss(student)
    )
    trainer.train()
    student.save_pretrained(output)


if __name__ == "__main__":
    main()
