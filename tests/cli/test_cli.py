"""The command line from start to end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

import pico
from trundle.methods import METHODS
from trundle.records import versions


@pytest.fixture
def texts(tmp_path: Path) -> str:
    file = tmp_path / "texts.txt"
    file.write_text(
        "\n".join(f"{text} {number}" for number in range(140) for text in pico.TEXTS), encoding="utf-8"
    )
    return str(file)


def test_importing_trundle_and_asking_for_help_load_no_torch() -> None:
    script = (
        "import sys, trundle\nassert 'torch' not in sys.modules\nsys.argv = ['trundle', '--help']\n"
        "from trundle.cli.app import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_method_help_lists_all_options(run: Callable[..., tuple[int, str, str]]) -> None:
    for name, step in METHODS.items():
        code, out, _ = run(name, "--help")
        assert code == 0
        for option in step.options.model_fields:
            assert f"--{option.replace('_', '-')}" in out
        for common in ("--data", "--output", "--seed", "--dry-run", "--json"):
            assert common in out


def test_inspect(run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path]) -> None:
    folder = pico_folders("qwen3")
    code, out, _ = run("inspect", str(folder))
    assert code == 0
    assert "Qwen3, 4 layers, 32 wide" in out
    assert "embeddings" in out
    assert "█" in out
    assert "2 of 4 layers" in out
    code, out, _ = run("inspect", str(folder), "--json")
    truth = sum(weight.numel() for weight in SentenceTransformer(str(folder), device="cpu").parameters())
    assert json.loads(out)["parameters"] == truth


def test_depth_alone(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    code, out, err = run("depth", str(pico_folders("gpt2")), "--keep", "1", "-o", str(tmp_path / "one"))
    assert code == 0
    assert "keep 1 of 4 layers" in err
    assert "Written to" in out
    student = tmp_path / "one"
    assert len(SentenceTransformer(str(student), device="cpu")[0].model.h) == 1
    student = student.rename(tmp_path / "one layer")
    whole = ("--keep", "1", "-o", str(tmp_path / "same"))
    code, out, err = run("depth", str(student), *whole)
    assert ("nothing to cut" in err, "not trained yet" in out) == (True, False)
    code, out, _ = run("depth", str(student), "--keep", "0", "-o", str(tmp_path / "none"))
    assert f"trundle align {tmp_path / 'none'} --teacher '{student}' --data" in out


def test_compress_by_recipe(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    model, out_folder = str(pico_folders("bert")), str(tmp_path / "small")
    words = [
        "compress",
        model,
        "--recipe",
        "half",
        "--data",
        texts,
        "--set",
        "depth.drop=75%",
        "--set",
        "align.texts=60",
    ]
    code, out, _ = run(*words, "-o", out_folder, "--json")
    assert code == 0
    content = json.loads(out)
    assert content["after"]["layers"] == 1
    assert content["fidelity"]["agreement_asymmetric"] > 0
    code, out, err = run(*words, "-o", out_folder)
    assert code == 2
    assert "already exists" in err
    code, out, err = run(*words, "-o", out_folder, "--force", "-q")
    assert code == 0
    assert "agreement@10" in out
    assert err == ""


def test_evaluate(
    run: Callable[..., tuple[int, str, str]],
    pico_folders: Callable[[str], Path],
    tasks_folder: Path,
    tmp_path: Path,
) -> None:
    one, two = str(pico_folders("bert")), str(pico_folders("mpnet"))
    results = tmp_path / "results.json"
    copy = tmp_path / "model"  # the same folder name as the others have
    shutil.copytree(two, copy)
    words = ["--tasks", "alike,find", "--root", str(tasks_folder), "--teacher", one, "-o", str(results)]
    code, out, _ = run("evaluate", one, two, str(copy), *words)
    assert code == 0
    heading, alike, find, *means = filter(None, out.splitlines())
    names = [Path(*Path(folder).parts[-2:]) for folder in (one, two, copy)]
    assert heading.count("share") == 4
    assert all(f"{name} " in heading for name in names)
    assert f"{names[1]} → {names[0]}" in heading
    assert alike.split()[:2] == ["alike", "spearman"]
    assert alike.count("same") == 2
    assert find.count("%") == 4
    assert [line.split("  ")[0] for line in means] == ["mean of 2 tasks", "mean of 1 with documents"]
    content = json.loads(results.read_text())
    assert {row["task"] for row in content["results"]} == {"alike", "find"}
    assert len(content["shares"]) == 8


def test_evaluate_without_labels(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], texts: str
) -> None:
    one, two = str(pico_folders("bert")), str(pico_folders("mpnet"))
    words = ["evaluate", two, "--teacher", one, "--data", texts, "--examples", "2"]
    code, out, _ = run(*words, "--dimensions", "8")
    assert code == 0
    assert "binary" in out
    assert "int8 calibrated on" in out
    assert "agreement@10, searching its index" in out
    assert "farthest from the teacher" in out
    code, out, _ = run(*words, "--json", "--inherit")
    [found] = json.loads(out)["fidelity"]
    [left] = json.loads(out)["inheritance"]
    assert [row["dimensions"] for row in left["rows"][::3]] == [32, 16, 8, 4, 2]
    assert left["rows"][0]["kept"] == {"teacher": 1, "asymmetric": 1, "student": 1}
    assert [len(found["farthest"]), len(found["closest"])] == [2, 2]
    assert found["farthest"][0]["distance"] > found["closest"][0]["distance"]


def test_every_model_is_loaded_before_any_work(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], tasks_folder: Path
) -> None:
    words = ["--tasks", "alike", "--root", str(tasks_folder), "--teacher", "no/such/teacher"]
    code, out, err = run("evaluate", str(pico_folders("bert")), "no/such/folder", *words[:-2])
    assert (code, out) == (2, "")
    assert err.startswith("trundle: there is no folder 'no/such/folder'")
    code, out, err = run("evaluate", str(pico_folders("bert")), *words)
    assert (code, out) == (2, "")
    assert err.startswith("trundle: there is no folder 'no/such/teacher'")


def test_pair(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    teacher, small = str(pico_folders("bert")), str(tmp_path / "small")
    align = ["align", str(pico_folders("mpnet")), "--teacher", teacher, "--data", texts, "--texts", "60"]
    code, out, _ = run(*align, "--steps", "0", "--pair", "-o", small)
    assert code == 0
    assert f"Written to {small}-pair" in out
    code, out, _ = run("pair", small, "--teacher", teacher, "-o", str(tmp_path / "both"), "--json")
    assert code == 0
    assert json.loads(out)["width"] == 32
    first, second = (
        SentenceTransformer(folder, device="cpu") for folder in (f"{small}-pair", str(tmp_path / "both"))
    )
    assert (first.encode_query(pico.TEXTS) == second.encode_query(pico.TEXTS)).all()
    code, _, _ = run(
        *align, "--steps", "0", "--pair", "-o", str(tmp_path / "again"), "--teacher", "v.parquet"
    )
    assert code == 2


def test_recipes_are_listed(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("recipes")
    assert code == 0
    assert "depth → align" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["depth", "MODEL", "--keep", "3"], "-o FOLDER"),
        (["depth", "MODEL", "--keep", "-2", "-o", "OUT"], "it can't keep -2"),
        (["depth", "MODEL", "--keep", "99", "-o", "OUT"], "it can't keep 99"),
        (["depth", "MODEL", "--drop", "most", "-o", "OUT"], "can't be 'most'; pass a share such as 30%"),
        (["depth", "MODEL", "--drop", "1/0", "-o", "OUT"], "can't be '1/0'; pass a share such as 30%"),
        (
            ["depth", "MODEL", "--order", "any", "-o", "OUT"],
            "can't be 'any'; pass 'auto', 'first' or 'spread'",
        ),
        (["align", "MODEL", "--minutes", "-3", "-o", "OUT", "--data", "EMPTY"], "-3.0; pass more than 0"),
        (
            ["align", "MODEL", "--batch-size", "0", "-o", "OUT", "--data", "EMPTY"],
            "can't be 0; pass 1 or more",
        ),
        (["depth", "MODEL", "--keep", "few", "-o", "OUT"], "--keep can't be 'few'; pass a whole number"),
        (["align", "MODEL", "-o", "OUT", "--data", "EMPTY"], "EMPTY"),
        (["compress", "MODEL", "--recipe", "nope", "-o", "OUT"], "no recipe 'nope'"),
        (["compress", "--budget", "1MB", "-o", "OUT"], "a model, or an index with --index"),
        (["compress", "MODEL", "--teacher", "M", "--budget", "1MB", "-o", "OUT"], "both name the teacher"),
        (["compress", "MODEL", "--index", "X", "--recipe", "half", "-o", "OUT"], "go with --budget"),
        (["compress", "--recipe", "half", "-o", "OUT"], "name the model to compress"),
        (["evaluate", "MODEL", "--tasks", "nope", "--root", "."], "nope"),
        (["nonsense"], "nonsense"),
        (["prune", "MODEL"], "depth (layers), vocabulary (tokens), width and weights"),
        (["quantize", "MODEL"], "trundle export MODEL --int8"),
        (["push", "MODEL"], "hf upload"),
        (["compress", "MODEL", "--budget", "2x", "--recipe", "half", "-o", "OUT"], "leave one of them out"),
        (["compress", "MODEL", "--budget", "12", "MB", "-o", "OUT"], "pass them with --data"),
        (["compress", "text-embedding-3-small", "-o", "OUT", "--data", "FEW"], "--teacher-model text-emb"),
        (["compress", "MODEL", "--recipe", "vocabulary", "--minutes", "0", "-o", "OUT"], "--minutes"),
        (["depth", "MODEL", "--keep", "2", "-o", "OUT", "--seed", "-1"], "--seed"),
        (["depth", "MODEL", "--keep", "2", "-o", "MODEL", "--force"], "is an input of this command"),
        (["evaluate", "MODEL", "--tasks", "nope", "-o", "."], "can't be written"),
        (["evaluate", "MODEL", "--data", "EMPTY::text=a", "-o", "EMPTY"], "is an input of this command"),
        (["evaluate", "MODEL"], "pass what to evaluate on"),
        (["evaluate", "MODEL", "--teacher", "http://localhost:1/v1", "--data", "EMPTY"], "--teacher-model"),
        (["evaluate", "MODEL", "--teacher", "v.parquet", "--data", "EMPTY"], "v.parquet"),
        (["evaluate", "MODEL", "--tasks", "sts", "--data", "x.txt"], "name it with --teacher"),
        (
            ["evaluate", "MODEL", "--teacher", "MODEL", "--data", "x.txt", "--dimensions", "few"],
            "whole numbers",
        ),
        (["pair", "MODEL", "--teacher", "v.parquet", "-o", "OUT"], "is not a model; pass the teacher"),
    ],
)
def test_invalid_input_gives_one_sentence_and_exits_2(
    words: list[str],
    says: str,
    run: Callable[..., tuple[int, str, str]],
    pico_folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "few.txt").write_text("a text\nanother one\nand a third\n")
    places = {
        "FEW": str(tmp_path / "few.txt"),
        "MODEL": str(pico_folders("bert")),
        "OUT": str(tmp_path / "out"),
        "EMPTY": str(tmp_path / "empty.txt"),
    }
    columns = {f"{name}::text=a": f"{place}::text=a" for name, place in places.items()}
    code, _, err = run(*[(places | columns).get(word, word) for word in words])
    assert code == 2
    assert says.replace("EMPTY", "empty.txt") in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


MISTAKES = {
    "compress MODEL --data FEW --budget 4x -o OUT": "are too few to learn from; pass at least 200",
    "compress no/such-model --data MANY -o OUT": "the model hub can't be reached",
    "compress EMPTY --data MANY -o OUT": "has neither modules.json nor config.json",
    "compress MODEL --budget 12quarts -o OUT --data MANY": "is not a budget",
    "compress MODEL -o MODEL --data MANY": "is an input of this command",
    "compress MODEL --data MANY --student no/such -o OUT": "the model hub can't be reached",
    "compress MODEL --data MANY --queries MANY -o OUT": "--queries goes with --index",
    "compress MODEL --index nowhere.parquet --data MANY -o OUT": "leave --data out",
    "compress --index nowhere.parquet --budget 9MB -o OUT": "there is no index 'nowhere.parquet'",
    "compress --index ftp://x --budget 9MB -o OUT": "ftp:// is not an index that trundle reads",
    "compress http://127.0.0.1:1/v1 --data MANY --budget 9MB -o OUT": "with --teacher-model",
    "compress MODEL --recipe leaf -o OUT": "align trains on texts",
    "align MODEL --data MANY -o OUT": "name it with --teacher",
    "distill MODEL --data MANY -o OUT": "name it with --teacher",
    "align MODEL --teacher no/such --data MANY -o OUT": "the model hub can't be reached",
    "align MODEL --teacher no.parquet -o OUT": "there is no file 'no.parquet'",
    "align MODEL --teacher MODEL --data MANY --augment nope -o OUT": "there is no augmentation 'nope'",
    "contrast MODEL -o OUT": "trains on labelled tuples; pass them with --data",
    "contrast MODEL --data MANY -o OUT": "has no column known as the query",
    "finetune MODEL --data MANY -o OUT": "has no column known as the label",
    "depth MODEL --keep 2 -o OUT --data missing.txt": "there is no file or folder 'missing.txt'",
    "depth MODEL -o OUT": "choose how many layers to keep",
    "depth MODEL --keep 2 --drop 1/2 -o OUT": "keep and drop exclude each other",
    "vocabulary MODEL --data MANY -o OUT": "choose how much to keep",
    "width MODEL --widths 2 --data MANY -o OUT": "widths are shares under 1",
    "weights MODEL --sparsity 50% -o OUT": "pass the domain data with --domain FILE",
    "weights MODEL --domain missing.jsonl --sparsity 50% -o OUT": "'missing.jsonl'; check the path",
    "inspect EMPTY": "has neither modules.json nor config.json",
    "inspect MODEL --layers --data MANY": "has no column known as the query",
    "evaluate MODEL --teacher MODEL --data MANY": "would be compared with itself",
    "evaluate MODEL --teacher EMPTY --data MANY": "has neither modules.json nor config.json",
    "evaluate MODEL --tasks sts --graph nope": "there are no graphs 'nope'",
    "bench no/such": "the model hub can't be reached",
    "report EMPTY": "has no trundle.json",
    "export no/such/model -o OUT": "there is no folder 'no/such/model'",
    "export MODEL --int4 --data FEW -o OUT": "1 different texts are too few; pass 40 or more",
    "export MODEL --int8 -o OUT": "pass them with --data",
    "export MODEL --to openvino --int4 --data MANY -o OUT": "there are no int4 graphs for openvino",
    "serve EMPTY": "has neither modules.json nor config.json",
    "pair MODEL --teacher no/such -o OUT": "the model hub can't be reached",
    "pair MODEL --teacher MODEL -o FULL": "already exists",
    "index build MODEL --data MANY -o qdrant://x/y": "can't be built; pass a folder",
    "index build MODEL --data MANY -o FULL": "holds other files",
    "targets build EMPTY --data MANY -o OUT": "has neither modules.json nor config.json",
    "targets build MODEL --data MANY -o FULL": "holds other files",
    "demo -o FULL": "already exists",
    "compres MODEL": "no such command 'compres'. Did you mean 'compress'; see trundle --help",
    "compress MODEL --budgt 4x": "no such option: --budgt",
    "compress MODEL MANY -o OUT": "extra argument(s) (MANY); pass texts with --data and see trundle compress",
    "compress MANY --data MODEL --budget 9MB -o OUT": "is a file; pass the model's folder",
    "compress CONFIG --data MANY -o OUT": "is a file; pass the model's folder",
    "compress MODEL --data MODEL -o OUT": "is a model, not texts",
    "compress MODEL --data MANY --student MANY -o OUT": "is a file; pass the model's folder",
    "compress https://huggingface.co/a/b --data MANY -o OUT": "pass a model folder or a hub name",
    "compress MODEL --data MANY --budget 12 -o OUT": "'12' is not a budget",
    "compress MODEL --data MANY --budget 50% -o OUT": "'50%' is not a budget",
    "compress MODEL --data MANY --budget 0.5x -o OUT": "larger than the model itself; pass 2x",
    "compress MODEL --data MANY --budget 10x,5x -o OUT": "both limit the bytes",
    "compress MODEL --data MANY --minutes 0 -o OUT": "invalid value for '--minutes'",
    "compress MODEL --data MANY --minutes 30m -o OUT": "invalid value for '--minutes'",
    "compress MODEL --data MANY --minutes inf -o OUT": "invalid value for '--minutes'",
    "compress MODEL --data MANY -o": "option '-o' requires an argument",
    "compress MODEL --data MANY -o .": "already exists",
    "compress MODEL --data MANY -o /": "an input of this command",
    "compress MODEL --data MANY -o MANY": "is a file; pass a folder to write to",
    "compress MODEL --data MANY -o FEW/small": "is a file, so no folder can be created in it",
    "compress MODEL --data MANY -o FULL --force": "is not a model folder",
    "compress MODEL --data ~/missing.txt -o OUT": "missing.txt'; check the path",
    "compress MODEL --data EMPTY -o OUT": "contains no data files",
    "compress MODEL --data NOTES -o OUT": "is not a kind of file trundle reads",
    "compress MODEL --data REVIEWS -o OUT": "no column known to hold texts (columns: id, review)",
    "compress MODEL --data MANY::body -o OUT": "write PATH or PATH::role=column",
    "compress MODEL --data MANY::text=body -o OUT": "has no column 'body'; name one it has: text",
    "compress MODEL --data NESTED -o OUT": "holds dict instead of text in column 'text'",
    "compress MODEL --data ARRAY -o OUT": "is not a JSON object",
    "compress MODEL --data ZIPPED -o OUT": "is damaged or not gzip",
    "compress MODEL --data LATIN -o OUT": "is not UTF-8 text (byte 0xf6)",
    "compress MODEL --data https://a.b/x.txt -o OUT": "is an address; download it",
    "compress MODEL --data MANY,FEW -o OUT": "there is no file or folder",
    "compress MODEL --recipe none.yaml --data MANY -o OUT": "none.yaml can't be read",
    "compress MODEL --recipe haf --data MANY -o OUT": "did you mean 'half'",
    "compress MODEL --recipe half --set minutes=3 --data MANY -o OUT": "--set takes method.option=value",
    "compress MODEL --recipe half --set align.minuts=3 --data MANY -o OUT": "did you mean 'minutes'",
    "compress MODEL --table x --data MANY -o OUT": "and --rows go with --index",
    "depth MODEL": "pass a folder for the result with -o FOLDER",
    "depth --keep 2 -o OUT": "missing argument 'model'; see trundle depth --help",
    "export MODEL --to tflite -o OUT": "'tflite' is not one of 'onnx', 'openvino'; see trundle export --help",
    "serve MODEL --port abc": "invalid value for '--port'",
    "index check MODEL": "missing option '--against'",
    "bench": "missing argument 'models'",
    "pair MODEL -o OUT": "missing option '--teacher'",
}


def filled(words: str, places: dict[str, str]) -> str:
    return re.sub(r"[A-Z]{3,}", lambda found: places.get(found[0], found[0]), words)


def test_mistakes_are_found_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("a text\n")
    (tmp_path / "many.txt").write_text("\n".join(f"text {number}" for number in range(300)))
    for name in ("model", "empty", "full"):
        (tmp_path / name).mkdir()
    for file in ("model/config.json", "model/modules.json", "full/notes.txt", "notes.md"):
        (tmp_path / file).write_text("{}")
    (tmp_path / "reviews.csv").write_text("id,review\n1,good\n")
    (tmp_path / "nested.jsonl").write_text('{"text": {"body": "a"}}\n')
    (tmp_path / "array.jsonl").write_text('["a"]\n')
    (tmp_path / "zipped.txt.gz").write_text("not zipped")
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdfe\n")
    places = {name.upper(): str(tmp_path / name) for name in ("model", "empty", "full", "out")}
    places |= {each.name.partition(".")[0].upper(): str(each) for each in tmp_path.glob("*.*")}
    places["CONFIG"] = str(tmp_path / "model" / "config.json")
    code = (
        "import contextlib, io, json, sys\nfrom trundle.cli.app import main\n"
        "for words in json.load(sys.stdin):\n"
        "    sys.argv, said, code = ['trundle', *words], io.StringIO(), 0\n"
        "    with contextlib.redirect_stderr(said):\n        try:\n            main()\n"
        "        except SystemExit as stop:\n            code = stop.code\n"
        "    print(json.dumps([code, said.getvalue()]))\n"
        "    assert not {'torch', 'transformers', 'sklearn'} & set(sys.modules), words\n"
    )
    given = json.dumps([[filled(word, places) for word in words.split()] for words in MISTAKES])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRUNDLE_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    for (words, expected), (exit_code, found) in zip(MISTAKES.items(), said, strict=True):
        assert exit_code == 2, words
        assert filled(expected, places) in found, words
        assert found.count("\n") == 1, words
    assert not (tmp_path / "out").exists()


def test_distill_is_another_name_of_align(run: Callable[..., tuple[int, str, str]]) -> None:
    (_, other, _), (_, own, _) = run("distill", "--help"), run("align", "--help")
    assert other.splitlines()[2:] == own.splitlines()[2:]


def test_minutes_are_those_of_the_recipes_training(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], texts: str
) -> None:
    words = ["compress", str(pico_folders("bert")), "--recipe", "leaf", "--minutes", "7", "--data", texts]
    code, out, _ = run(*words, "--dry-run")
    assert code == 0
    assert "Training: 7 minutes at most." in out


def test_version(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out.strip() == f"trundle {versions()['trundle']}"


def test_an_interrupt_gives_one_sentence_and_exits_130(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trundle.cli.console.model_folder", interrupted)
    code, out, err = run("inspect", "anything")
    assert (code, out) == (130, "")
    assert err == "trundle: interrupted; run the same command again to resume\n"


@pytest.mark.parametrize(("words", "extra"), [("index build", "index"), ("inspect", "compress")])
def test_a_missing_package_is_named_by_the_smallest_extra(
    words: str, extra: str, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(name="pyarrow")

    monkeypatch.setattr("trundle.cli.console._check_inputs", missing)
    code, _, err = run(*words.split(), "model", *(("--data", "a", "-o", "b") if " " in words else ()))
    assert (code, f"pip install 'trundle[{extra}]'" in err) == (2, True)


def test_internal_failures_exit_1(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("trundle.cli.console.model_folder", broken)
    code, _, err = run("inspect", "anything")
    assert code == 1
    assert "trundle itself failed (RuntimeError: a bug)" in err


def test_inspect_shows_vocabulary_sizes(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], texts: str
) -> None:
    folder = str(pico_folders("bert"))
    code, out, _ = run("inspect", folder, "--vocabulary", "--data", texts)
    assert code == 0
    assert "of your texts" in out
    assert "the least" in out
    code, out, _ = run("inspect", folder, "--vocabulary", "--data", texts, "--json")
    assert code == 0
    assert json.loads(out)["sizes"][0]["why"] == "all"
    code, _, err = run("inspect", folder, "--data", texts)
    assert code == 2
    assert "--vocabulary" in err


def test_a_mapped_folder_says_how_to_load_it(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    small = str(tmp_path / "small")
    given = ("--keep", "100", "--oov", "unk", "--data", texts, "-o", small)
    code, out, _ = run("vocabulary", str(pico_folders("bert")), *given)
    assert code == 0
    assert f'load it with SentenceTransformer("{small}", trust_remote_code=True)' in out
    assert (
        'SentenceTransformer("small", trust_remote_code=True)'
        in (tmp_path / "small" / "README.md").read_text()
    )
    assert SentenceTransformer(small, device="cpu", trust_remote_code=True).encode("a text").shape == (32,)


def test_a_dry_run_shows_files_and_time(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], texts: str
) -> None:
    asked = ("compress", str(pico_folders("bert")), "--recipe", "leaf", "--data", texts, "--dry-run", "-q")
    code, out, _ = run(*asked, "--set", "align.minutes=7")
    assert code == 0
    assert "MB in int8" in out
    assert "Training: 7 minutes at most." in out
    _, out, _ = run(*asked, "--set", "align.steps=5")
    assert "set minutes to limit it" in out
    _, out, _ = run(*asked, "--set", "align.steps=0")
    assert "Training" not in out
