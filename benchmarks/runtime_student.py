"""How much faster a small student is than its teacher when the same runtime runs both.

    python benchmarks/runtime_student.py TEACHER BACKBONE --data texts.parquet [--layers 3] [--tokens 8000] [--work FOLDER]

The student is BACKBONE (a small model, or the teacher itself) with its first layers and the most useful tokens of `--data`;
it is not trained, as that changes no speed. Both are exported to each form in `FORMS`, whatever int8 loses, and every form is
a process of its own, asked in turns. Ratios are to the teacher's first form, and to the teacher in the student's own form.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from trundle.bench.results import _ModelFigures, caution, rows
from trundle.bench.rounds import BenchOptions, bench
from trundle.bench.workload import workload
from trundle.data.corpus import read_corpus
from trundle.export.exporting import export_model
from trundle.export.quantise import ExportOptions, Limits
from trundle.model.load import load
from trundle.pipeline.compress import compress
from trundle.recipe import parse_recipe

if TYPE_CHECKING:
    from trundle.precision import EngineName, Precision

FORMS: tuple[tuple[EngineName, Precision], ...] = (
    ("onnx", "float32"),
    ("onnx", "int8"),
    ("openvino", "int8"),
)
ANY_LOSS = Limits(cosine=1, agreement=1)
AT_ONCE = 256


def exported(source: str, folder: Path) -> str:
    """A folder with every form of the model but torch's; what is there already is kept."""
    work = workload()
    if not folder.is_dir():
        load(source, device="cpu").save_pretrained(str(folder))
        for to, precision in FORMS:
            how = ExportOptions(calibrate=[*work.short, *work.long], limits=ANY_LOSS)
            export_model(str(folder), to=to, precision=precision, options=how)
        for weights in folder.rglob("*.safetensors"):
            weights.unlink()
    return str(folder)


def show_ratios(found: tuple[_ModelFigures, ...], teacher: str, student: str) -> None:
    """Texts a second of each form of the student, against the teacher as it is and against its same form."""
    theirs = {each.engine: each for each in found if each.model == teacher}
    first = next(iter(theirs.values()))
    for mine in (each for each in found if each.model == student):
        for kind in ("short", "long"):
            rate = getattr(mine, f"{kind}_texts_per_second").value
            beside = {first.engine: first} | (
                {mine.engine: theirs[mine.engine]} if mine.engine in theirs else {}
            )
            ratios = [
                f"{rate / getattr(their, f'{kind}_texts_per_second').value:.1f} × the teacher's {engine}"
                for engine, their in beside.items()
            ]
            print(f"student {mine.engine}, {kind} texts/s: {', '.join(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("backbone")
    parser.add_argument("--data", required=True)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--work", type=Path, help="keeps the graphs between runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trundle-student-") as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "cut").is_dir():
            steps = f"steps: [vocabulary: {{keep: {options.tokens}}}, depth: {{keep: {options.layers}}}]"
            corpus = read_corpus([options.data], seed=0)
            compress(
                options.backbone,
                parse_recipe(steps, name="student"),
                output=work / "cut",
                corpus=corpus,
                compare=False,
            )
        teacher = exported(options.teacher, work / "teacher")
        student = exported(str(work / "cut"), work / "student")
        result = bench(
            [teacher, student],
            options=BenchOptions(rounds=options.rounds, seconds=options.seconds, batch_size=AT_ONCE),
            all_engines=True,
        )
    for row in rows(result):
        print("".join(f"{cell:>30}" for cell in row))
    show_ratios(result.models, teacher, student)
    if warning := caution(result):
        print(warning)


if __name__ == "__main__":
    main()
