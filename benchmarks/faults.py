"""Kills and fails every command that writes, at points spread over its file-system calls; runs two at once.

    python benchmarks/faults.py kill [--jobs folder,index] [--points 30]
    python benchmarks/faults.py fail [--jobs …] [--points 10]      each of ENOSPC, EIO and EROFS
    python benchmarks/faults.py together [--jobs …] [--rounds 3]   every pair of jobs that write to one place
    python benchmarks/faults.py kill fail together                several in one process

Commands run on pico models, each in a process forked from this one, so that torch is imported once. After a
fault the old or the new state must be complete, the same command must finish, and no scratch may be left.
Needs Linux and a C compiler. Exits with code 1 if a state is lost.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from trundle.errors import TrundleError

if TYPE_CHECKING:
    from trundle.index.rows import _RowBatch

HERE = Path(__file__).parent
FAULTS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}
SCRATCH = (".part", ".old", ".lock", ".tmp", ".new")
PATIENCE = 300
State = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command: what it needs, what it does, and how to tell its result."""

    name: str
    run: Callable[[Path], None]
    prepare: Callable[[Path], None] = lambda _root: None
    state: Callable[[Path], State] = lambda root: contents(root / "out")
    place: str = "out"
    """Jobs with the same place write to the same folder."""
    grows: bool = False
    """Whether what was stored so far stays and is resumed, so that the state may also lie between."""


def contents(folder: Path) -> State:
    """The digest of each file whose bytes do not depend on time; of others, that they are there."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.is_file() and not any(part.startswith(".") for part in Path(name).parts):
            timed = file.suffix in (".jsonl", ".json", ".md", ".html") or "sqlite" in file.name
            found[name] = "" if timed else blake2b(file.read_bytes(), digest_size=8).hexdigest()
    return found


def leftovers(root: Path) -> list[str]:
    """Names of scratch files and folders, outside the cache."""
    found = (path for path in root.rglob("*") if path.relative_to(root).parts[0] != "cache")
    return [str(path.relative_to(root)) for path in found if path.name.endswith(SCRATCH)]


def trundle(*words: str) -> Callable[[Path], None]:
    """The command line in this process, with paths relative to the job's folder."""

    def run(root: Path) -> None:
        from trundle.cli.app import main

        os.chdir(root)
        sys.argv = ["trundle", *words]
        main()

    return run


def pico_model(root: Path) -> None:
    shutil.copytree(root.parent / "pico", root / "model")
    for name in ("texts.txt", "pairs.jsonl", "labels.jsonl"):
        shutil.copy(root.parent / name, root)


def after(*runs: Callable[[Path], None]) -> Callable[[Path], None]:
    """A preparation that runs commands in processes of their own."""

    def prepare(root: Path) -> None:
        for run in runs:
            code, output = finished(forked(run, root))
            assert code == 0, output

    return prepare


def plain_folder(root: Path) -> None:
    from trundle.folders import atomic_folder

    with atomic_folder(root / "out", replace=True, keep=True) as scratch:
        (scratch / "config.json").write_text("{}")
        (scratch / "1_Pooling").mkdir()
        (scratch / "1_Pooling" / "weights.bin").write_bytes(b"new" * 10_000)


def old_folder(root: Path) -> None:
    (root / "out").mkdir()
    (root / "out" / "modules.json").write_text("{}")
    (root / "out" / "weights.bin").write_bytes(b"old" * 10_000)


def vectors_of(texts: Sequence[str]) -> object:
    import numpy as np

    rows = [np.frombuffer(blake2b(text.encode(), digest_size=32).digest(), np.uint8) for text in texts]
    return np.stack(rows).astype(np.float32) + 1


def fill_index(root: Path, *, force: bool = False, count: int = 60) -> None:
    from trundle.index.base import Wanted
    from trundle.index.readers import build_index, create_store

    wanted = Wanted(model="model", dimensions=32, precision="int8")
    with create_store(str(root / "out"), wanted, force=force) as store:
        build_index(store, [f"text {number}" for number in range(count)], vectors_of, at_once=20)  # type: ignore[arg-type]


def indexed(root: Path) -> State:
    """The texts of an index whose vectors are found, and whether it opens."""
    if not (root / "out" / "index.json").is_file():
        return {}
    found = {"index": ""}
    for batch in stored_rows(root / "out"):
        assert (vectors_of(batch.texts) == batch.vectors).all()
        found |= dict.fromkeys(batch.texts, "")
    return found


def stored_rows(folder: Path) -> list[_RowBatch]:
    """The rows of an index, of which there may be none."""
    from contextlib import closing

    from trundle.index.readers import open_reader, open_store

    with closing(open_store(str(folder))) as store:
        if not store.count():
            return []
    with closing(open_reader(str(folder))) as reader:
        return list(reader.rows())


def fill_targets(root: Path) -> None:
    from trundle.data.texts import Text
    from trundle.embedder import Embedder
    from trundle.teacher.labelling import build_targets
    from trundle.teacher.shards import Manifest

    encode = vectors_of
    teacher = Embedder(name="t", text=encode, query=encode, document=encode)  # type: ignore[arg-type]
    texts = [Text(text=f"text {number}", kind=None) for number in range(60)]
    build_targets(texts, teacher, Manifest(teacher="t", shard_size=20), root / "out")


def targeted(root: Path) -> State:
    """The texts of a folder of targets, each shard checked."""
    from trundle.teacher.shards import is_intact, read_manifest

    manifest = read_manifest(root / "out")
    if manifest is None:
        return {}
    assert all(is_intact(root / "out", number, shard) for number, shard in enumerate(manifest.shards))
    return {f"shard {number}": "" for number in range(len(manifest.shards))} | {
        "manifest": "",
        **({"complete": ""} if manifest.complete else {}),
    }


def built_index(root: Path) -> State:
    """Whether the index opens, and its texts."""
    if not (root / "out" / "index.json").is_file():
        return {}
    texts = [text for batch in stored_rows(root / "out") for text in batch.texts]
    return dict.fromkeys(texts, "") | {"index": ""}


def cached_graphs(root: Path) -> State:
    """The complete graphs in the cache."""
    return {"graphs": str(len(list((root / "cache").glob("graphs/*/encoder.json"))))}


def exported(root: Path) -> State:
    """The graphs of the model's folder that run and agree with torch, and the model's own files."""
    from trundle.errors import BadModel
    from trundle.runtime.description import FILE, is_exported, read_description
    from trundle.runtime.encoder import Encoder

    model = root / "model"
    own = {name: digest for name, digest in contents(model).items() if not name.startswith(("onnx/", FILE))}
    if not is_exported(model):
        return own
    found = {}
    for graph in read_description(model).graphs:
        try:
            Encoder(model, graph=f"{graph.engine}-{graph.precision}").encode(["a text"])
        except BadModel:
            if (model / graph.path).is_file():
                raise
            continue
        found[graph.path] = ""
    return own | found


_TRAIN = ("--steps", "2", "--batch-size", "4", "-q")
_TEXTS = ("--data", "texts.txt")
_OUT = ("-o", "out", "-q")
_RECIPE = "steps:\n  - depth: {keep: 2}\n  - align: {teacher: model, steps: 2, batch_size: 4}\n"


def jobs() -> dict[str, Job]:
    """All jobs; the first three need no model and take milliseconds."""
    depth = trundle("depth", "model", "--keep", "2", *_OUT)
    forced = trundle("depth", "model", "--keep", "3", *_OUT, "--force")
    built = trundle("index", "build", "model", *_TEXTS, *_OUT)
    graph = trundle("export", "model", "-q")
    half = trundle("export", "model", "--half", "-q")

    def with_model(*runs: Callable[[Path], None]) -> Callable[[Path], None]:
        def prepare(root: Path) -> None:
            pico_model(root)
            (root / "recipe.yaml").write_text(_RECIPE)
            after(*runs)(root)

        return prepare

    def beside(*runs: Callable[[Path], None]) -> Callable[[Path], None]:
        def prepare(root: Path) -> None:
            with_model(*runs)(root)
            (root / "out").mkdir()

        return prepare

    def small(root: Path) -> None:
        fill_index(root, count=10)

    model = with_model()
    words = {
        "width": ("--widths", "1/2", *_TEXTS, *_TRAIN),
        "vocabulary": ("--parameters", "97%", *_TEXTS),
        "weights": ("--method", "magnitude", "--sparsity", "50%"),
        "align": ("--teacher", "model", *_TEXTS, *_TRAIN),
        "contrast": ("--data", "pairs.jsonl", *_TRAIN),
        "finetune": ("--data", "labels.jsonl", *_TRAIN),
        "compress": ("--recipe", "recipe.yaml", *_TEXTS),
    }
    report = trundle("report", "small", "-o", "out/report.html", "-q")
    reported = trundle("depth", "model", "--keep", "2", "-o", "small", "-q")
    scores = ("--teacher", "../pico", *_TEXTS, "-o", "out/scores.json", "-q")
    targets = trundle("targets", "build", "model", *_TEXTS, *_OUT)
    again = trundle("export", "model", "-q", "--force")
    made = [
        Job(name="folder", run=plain_folder, prepare=old_folder),
        Job(name="index", run=fill_index, state=indexed, grows=True),
        Job(name="index-force", run=partial(fill_index, force=True), prepare=small, state=indexed),
        Job(name="targets", run=fill_targets, state=targeted, grows=True),
        Job(name="depth", run=depth, prepare=model),
        Job(name="depth-force", run=forced, prepare=with_model(depth)),
        *(Job(name=each, run=trundle(each, "model", *words[each], *_OUT), prepare=model) for each in words),
        Job(name="export", run=graph, state=exported, prepare=model, place="model"),
        Job(name="export-again", run=again, state=exported, prepare=with_model(graph, half), place="model"),
        Job(name="export-half", run=half, state=exported, prepare=with_model(graph), place="model"),
        Job(name="export-out", run=trundle("export", "model", *_OUT), prepare=model),
        Job(name="targets-build", run=targets, state=targeted, grows=True, prepare=model),
        Job(name="index-build", run=built, state=built_index, grows=True, prepare=with_model(graph)),
        Job(name="report", run=report, grows=True, prepare=beside(reported)),
        Job(name="evaluate", run=trundle("evaluate", "model", *scores), prepare=beside()),
        Job(name="serve-start", run=open_served, state=cached_graphs, prepare=model, place="cache"),
    ]
    return {job.name: job for job in made}


def open_served(root: Path) -> None:
    """What `trundle serve` writes when it starts: a graph in the cache."""
    from trundle.export.open import open_encoder

    open_encoder(str(root / "model"), threads=1).encode(["a text"])


def forked(run: Callable[[Path], None], root: Path, *, at: int = 0, error: int = 0) -> tuple[int, Path]:
    """Start a command in a forked process, armed with a fault; returns its id and the file of its output."""
    log = root.parent / f"{root.name}.log.{time.monotonic_ns()}"
    child = os.fork()
    if child:
        return child, log
    code = 99
    try:
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.environ["TRUNDLE_CACHE"] = str(root / "cache")
        signal.alarm(PATIENCE)
        library = ctypes.CDLL(None)
        library.faults_arm(os.fsencode(root), ctypes.c_long(at), error)
        run(root)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except TrundleError as problem:
        print(f"trundle: {problem}")
        code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        Path(f"{log}.calls").write_text(str(ctypes.CDLL(None).faults_count()))
        os._exit(code)


def finished(child: tuple[int, Path]) -> tuple[int, str]:
    """Wait for a process: its exit code (minus the signal if it was killed), and its output."""
    _, status = os.waitpid(child[0], 0)
    code = os.waitstatus_to_exitcode(status)
    output = child[1].read_text(errors="replace") if child[1].exists() else ""
    return code, output


def in_child(read: Callable[[Path], State], root: Path) -> State | str:
    """A state, read in a process of its own because it may load models; a text says what is wrong with it."""
    code, output = finished(forked(lambda place: print("STATE", sorted(read(place).items())), root))
    if code:
        return f"the state can't be read: {output.strip().splitlines()[-1:]}"
    line = next(line for line in output.splitlines() if line.startswith("STATE"))
    return dict(eval(line.removeprefix("STATE ")))  # printed above


@dataclass
class Count:
    """What was tried, and what went wrong."""

    tried: int = 0
    lost: int = 0

    def problem(self, what: str) -> None:
        """Report one state that is lost."""
        self.lost += 1
        print(f"LOST {what}", flush=True)


def clean(root: Path) -> None:
    for path in (root, *root.parent.glob(f"{root.name}.log.*")):
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True) if path.is_file() else None


@cache
def reference(job: Job, base: Path) -> tuple[int, State, State]:
    """How many calls a command makes, and the states before and after it."""
    root = base / "root"
    clean(root)
    root.mkdir()
    job.prepare(root)
    shutil.copytree(root, base / f"start-{job.name}", symlinks=True)
    before = in_child(job.state, root)
    child = forked(job.run, root)
    code, output = finished(child)
    assert code == 0, f"{job.name}: {output}"
    calls = int(Path(f"{child[1]}.calls").read_text())
    after_it = in_child(job.state, root)
    assert isinstance(before, dict), before
    assert isinstance(after_it, dict), after_it
    left = leftovers(root)
    assert not left, f"{job.name} leaves {left}"
    return calls, before, after_it


def try_point(job: Job, base: Path, at: int, error: int, states: tuple[State, State], count: Count) -> None:
    root, (before, new) = base / "root", states
    clean(root)
    shutil.copytree(base / f"start-{job.name}", root, symlinks=True)
    code, output = finished(forked(job.run, root, at=at, error=error))
    where = f"{job.name}, call {at}, {errno.errorcode.get(error, 'killed')}"
    count.tried += 1
    if "Traceback" in output or code == -signal.SIGALRM:
        count.problem(f"{where}: {output.strip().splitlines()[-1:]} {code}")
        return
    now = in_child(job.state, root)
    between = job.grows and isinstance(now, dict) and set(now) <= set(new)
    if isinstance(now, str) or not (now in (before, new) or between):
        odd = now if isinstance(now, str) else sorted(set(now.items()) ^ set(new.items()))[:4]
        count.problem(f"{where}: neither the old nor the new state: {odd} {output.strip()[-300:]}")
        return
    again, output = finished(forked(job.run, root))
    complete = now == new and now != before
    if again and not (complete and ("exist" in output)):
        count.problem(f"{where}: the same command fails afterwards ({again}): {output.strip()[-300:]}")
    elif in_child(job.state, root) != new:
        count.problem(f"{where}: the same command gives another result afterwards")
    elif left := [] if again else leftovers(root):
        count.problem(f"{where}: scratch is left: {left}")


def inject(chosen: Sequence[Job], base: Path, points: int, faults: Sequence[int], count: Count) -> None:
    for job in chosen:
        began, lost = time.monotonic(), count.lost
        try:
            calls, *states = reference(job, base)
        except AssertionError as problem:
            count.problem(f"{job.name} fails without any fault: {problem}")
            continue
        step = max(1, calls // points)
        tried = list(range(1 + random.Random(0).randrange(step), calls + 1, step))
        for error, at in itertools.product(faults, tried):
            try_point(job, base, at, error, (states[0], states[1]), count)
        seconds = time.monotonic() - began
        print(
            f"{job.name:<14} {calls:>6} calls, {len(tried) * len(faults):>4} points, "
            f"{count.lost - lost} lost, {seconds:.0f} s",
            flush=True,
        )


def together(chosen: Sequence[Job], base: Path, rounds: int, count: Count) -> None:
    """Run pairs of jobs that write to one place: each succeeds or explains, and the place is whole."""
    for one, other in itertools.combinations_with_replacement(chosen, 2):
        if one.place != other.place or (one.state is not other.state and one.name != other.name):
            continue
        wanted = [reference(job, base)[2] for job in (one, other)]
        codes = []
        for number in range(rounds):
            root = base / "root"
            clean(root)
            shutil.copytree(base / f"start-{other.name}", root, symlinks=True)
            if not (root / "model").exists() and (base / "pico").exists():
                pico_model(root)
            first = forked(one.run, root)
            time.sleep(0.05 * number * random.Random(number).random())
            ends = [finished(each) for each in (first, forked(other.run, root))]
            count.tried += 1
            where = f"{one.name} and {other.name}"
            for code, output in ends:
                if "Traceback" in output or code not in (0, 1, 2):
                    count.problem(f"{where}: exit code {code}: {output.strip()[-300:]}")
            now = in_child(one.state, root)
            united = wanted[0] | wanted[1]
            if isinstance(now, str) or (now not in (*wanted, united) and not set(united) <= set(now)):
                count.problem(
                    f"{where}: {now if isinstance(now, str) else sorted(set(now) ^ set(united))[:5]}"
                )
            elif left := [name for name in leftovers(root) if not name.endswith(".new")]:
                count.problem(f"{where}: scratch is left: {left}")
            elif one.grows and one.name == other.name and any(code for code, _ in ends):
                count.problem(f"{where}: one of the two failed: {[output[-200:] for _, output in ends]}")
            codes.append("".join(str(code) for code, _ in ends))
        print(f"{one.name} + {other.name}: exit codes {' '.join(codes)}", flush=True)


def with_library(folder: Path) -> None:
    """Start this program again with the library of faults loaded."""
    library = folder / "faults.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, HERE / "faults.c", "-ldl"], check=True)
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    os.environ.update(settings, LD_PRELOAD=str(library), FAULTS_IN=str(folder))
    os.execv(sys.executable, [sys.executable, *sys.argv])


def make_inputs(base: Path) -> None:
    """A pico model and texts, and everything imported that the commands import."""
    import logging

    import torch

    sys.path.insert(0, str(HERE.parent / "tests"))
    import pico  # type: ignore[import-not-found]
    import trundle.cli.app
    import trundle.export.exporting
    import trundle.pipeline.compress  # noqa: F401

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pico.model("bert", str(base / "backbone")).save_pretrained(str(base / "pico"))
    texts = pico.different_texts(300)
    (base / "texts.txt").write_text("\n".join(texts))
    rows = (f'{{"query": "{one}", "positive": "{two}"}}' for one, two in itertools.pairwise(texts))
    (base / "pairs.jsonl").write_text("\n".join(rows))
    rows = (f'{{"text": "{text}", "label": {number % 3}}}' for number, text in enumerate(texts))
    (base / "labels.jsonl").write_text("\n".join(rows))


def chosen_jobs(names: str | None) -> Iterator[Job]:
    known = jobs()
    yield from known.values() if names is None else (known[name] for name in names.split(","))


def main() -> None:
    """Read the arguments, and run what they ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=["kill", "fail", "together"])
    parser.add_argument("--jobs", help="names, separated by commas; default: all")
    parser.add_argument("--points", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if "FAULTS_IN" not in os.environ:
        with_library(Path(tempfile.mkdtemp(prefix="faults-")))
    base = Path(os.environ["FAULTS_IN"]).resolve()
    count = Count()
    try:
        import trundle.index.readers
        import trundle.teacher.labelling  # noqa: F401 (children need not import them again)

        chosen = list(chosen_jobs(given.jobs))
        if any(job.name not in ("folder", "index", "index-force", "targets") for job in chosen):
            make_inputs(base)
        for what in given.what:
            if what == "together":
                together(chosen, base, given.rounds, count)
            else:
                inject(chosen, base, given.points, [0] if what == "kill" else list(FAULTS.values()), count)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(f"{count.tried} tried, {count.lost} lost")
    sys.exit(1 if count.lost else 0)


if __name__ == "__main__":
    main()
