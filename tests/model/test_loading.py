"""Loading a model: what is accepted, what is rejected, and the errors."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

import pico
from trundle.errors import BadInput, BadModel, UnknownFamily
from trundle.export.exporting import export_model
from trundle.methods.depth.depth import _shares_by_rank
from trundle.model.anatomy import _BY_MODEL_TYPE, _family_of
from trundle.model.encode import embedder
from trundle.model.load import _check_weights_finite, load
from trundle.model.static import static_model, static_shape
from trundle.model.surgery import transformer_of
from trundle.runtime.description import Description, read_description


@pytest.fixture
def folder(pico_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pico_folders("bert"), tmp_path / "model"))


def test_a_sentence_transformers_folder_opens_as_it_is(folder: Path) -> None:
    theirs = SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_array_equal(load(folder).encode(pico.TEXTS), theirs.encode(pico.TEXTS))


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_a_bare_model_becomes_an_embedder(family: str, tmp_path: Path) -> None:
    model = load(pico.save_backbone(family, str(tmp_path)), device="cpu")
    wanted = "weightedmean" if family in pico.DECODERS else "mean"
    assert isinstance(model[1], Pooling)
    assert model[1].pooling_mode == wanted
    assert model.encode(pico.TEXTS).shape == (len(pico.TEXTS), 32)


def test_pooling_is_the_weighted_mean_it_says(tmp_path: Path) -> None:
    """w_i = i / Σi over real tokens, against transformers' own hidden states, alone and padded."""
    model = load(pico.save_backbone("llama", str(tmp_path)), device="cpu")
    vectors = model.encode(pico.TEXTS[:3])
    for text, vector in zip(pico.TEXTS[:3], vectors, strict=True):
        tokens = model.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = model[0].model(**tokens).last_hidden_state[0]
        weights = torch.arange(1, len(states) + 1, dtype=torch.float32)
        expected = (weights[:, None] * states).sum(0) / weights.sum()
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_vector_does_not_depend_on_the_batch(family: str, tmp_path: Path) -> None:
    """A tokenizer that pads in front moves the positions and weights of short texts."""
    folder = pico.save_backbone(family, str(tmp_path))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"padding_side": "left"}))
    model = load(folder, device="cpu")
    alone, among = model.encode("fox"), model.encode(["fox", "a text of many more words " * 3])[0]
    np.testing.assert_allclose(among, alone, atol=1e-5)


def test_a_chat_template_is_no_part_of_a_new_embedder(tmp_path: Path) -> None:
    """The library would encode every text as a message to an assistant, in the same words around each."""
    folder = pico.save_backbone("llama", str(tmp_path / "backbone"))
    wanted = load(folder, device="cpu").encode(pico.TEXTS)
    template = "{% for m in messages %}{{ m['role'] }} says {{ m['content'] }}{% endfor %}"
    (Path(folder) / "chat_template.jinja").write_text(template)
    model = load(folder, device="cpu")
    np.testing.assert_array_equal(model.encode(pico.TEXTS), wanted)
    model.save_pretrained(str(tmp_path / "saved"))
    for again in (SentenceTransformer(str(tmp_path / "saved"), device="cpu"), load(tmp_path / "saved")):
        np.testing.assert_allclose(again.encode(pico.TEXTS), wanted, atol=1e-6)


def test_last_token_pooling_on_request(tmp_path: Path) -> None:
    model = load(pico.save_backbone("qwen2", str(tmp_path)), pooling="lasttoken", device="cpu")
    tokens = model.tokenizer(pico.TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        expected = model[0].model(**tokens).last_hidden_state[0, -1]
    np.testing.assert_allclose(model.encode(pico.TEXTS[:2])[0], expected.numpy(), atol=1e-5)


def test_a_decoder_without_pad_token_gets_one(tmp_path: Path) -> None:
    pico.save_backbone("gpt2", str(tmp_path))
    settings = tmp_path / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    content.pop("pad_token")
    settings.write_text(json.dumps(content))
    model = load(tmp_path, device="cpu")
    assert model.tokenizer.pad_token == model.tokenizer.eos_token


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert", "mpnet"])
@pytest.mark.parametrize("pad", [0, 1])
def test_a_long_text_is_truncated_to_the_positions(family: str, pad: int, tmp_path: Path) -> None:
    """These families count positions after the pad token, so 64 of them are enough for 63 or 62 tokens."""
    folder = pico.save_backbone(family, str(tmp_path), pad_token_id=pad)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 512}))
    model = load(folder, device="cpu")
    assert model.max_seq_length == (62 if family == "mpnet" else 63 - pad)
    assert model.encode(["long " * 200]).shape == (1, 32)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="there is no folder"):
        load(tmp_path / "nothing")


def test_a_hub_name_offline() -> None:
    with pytest.raises(BadModel, match="model hub can't be reached; pass a local model folder"):
        load("nobody/such-model")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(BadModel, match="is a file; pass the model's folder"):
        load(tmp_path / "model.bin")


def test_a_folder_that_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"neither modules.json nor config.json"):
        load(tmp_path)


@pytest.mark.parametrize("left", [0, 4, 100, -100])
def test_truncated_weights(folder: Path, left: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(BadModel, match="truncated or damaged"):
        load(folder)


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadModel, match="holds no weights"):
        load(folder)


def test_a_folder_of_graphs_alone(folder: Path, tmp_path: Path) -> None:
    export_model(str(folder), to="onnx", output=tmp_path / "graphs")
    with pytest.raises(BadModel, match="use it as it is, or pass the original"):
        load(tmp_path / "graphs")


def test_a_static_model_has_nothing_to_cut(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    static = static_model(model, _shares_by_rank(static_shape(model)[0]))
    with pytest.raises(BadModel, match=r"is static.*pass the model it was made from"):
        transformer_of(static)


def test_a_model_without_its_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(BadModel, match="has no tokenizer"):
        load(folder)


def test_a_config_larger_than_its_weights(folder: Path) -> None:
    """The library would start the missing layers anew and say nothing."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    with pytest.raises(BadModel, match=r"holds no weights for encoder\.layer\.4"):
        load(folder)


def test_weights_for_code_that_a_model_brings(folder: Path) -> None:
    """jina-embeddings-v2 says that it is a BERT, and has other layers."""
    weights = load_file(folder / "model.safetensors")
    left = {name: weight for name, weight in weights.items() if "intermediate" not in name}
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    edited(folder / "config.json", auto_map={"AutoModel": "own.py"})
    with pytest.raises(BadModel, match=r"no weights for .* then pass --trust-remote-code"):
        load(folder)


@pytest.mark.parametrize("family", ["nomic", "gte", "jina"])
def test_weights_with_the_names_of_the_hub(
    family: str, pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """The library writes these families as the hub has them; a missing matrix is still noticed."""
    folder = Path(shutil.copytree(pico_folders(family), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    fused = next(name for name in weights if "qkv" in name.lower())
    assert load(folder).encode("a").any()
    del weights[fused]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModel, match=f"holds no weights for {fused}"):
        load(folder)


def edited(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def other_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("query.weight"))
    save_file(weights | {name: torch.zeros(7, 3)}, folder / "model.safetensors", metadata={"format": "pt"})


def large_tokenizer(folder: Path, tokens: int) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"token {number}": number for number in range(len(vocabulary), tokens)}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def another_module(folder: Path, **changes: object) -> None:
    first, *others = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([first, *(each | changes for each in others)]))


def zip_bomb(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(64 << 20))


def large_dense_layer(folder: Path) -> None:
    another_module(folder, path="2_Dense", type="sentence_transformers.models.Dense")
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text('{"in_features": 1000000, "out_features": 1000000}')


def large_lstm(folder: Path) -> None:
    another_module(folder, path="2_LSTM", type="sentence_transformers.models.LSTM")
    (folder / "2_LSTM").mkdir()
    (folder / "2_LSTM" / "lstm_config.json").write_text('{"embedding_dimension": 32, "hidden_dim": 40000}')


def routed(folder: Path, name: str) -> None:
    (folder / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Router"}]')
    types = {name: "sentence_transformers.models.Transformer"}
    (folder / "router_config.json").write_text(json.dumps({"types": types, "structure": {"query": [name]}}))


def routed_layers(folder: Path) -> None:
    routed(folder, "query_0")
    (folder / "query_0").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(folder / name, folder / "query_0")
    edited(folder / "query_0" / "config.json", num_hidden_layers=10**6)


def unpooled(folder: Path) -> None:
    first, *_ = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([first]))


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "other shapes": (other_shapes, "other shapes than its config says"),
    "a large tokenizer": (lambda folder: large_tokenizer(folder, 2 * 10**5), "far too large for"),
    "more tokens than vectors": (lambda folder: large_tokenizer(folder, 2000), "the model has vectors for"),
    "a million layers": (lambda folder: edited(folder / "config.json", num_hidden_layers=10**6), "1,000,000"),
    "a billion tokens": (lambda folder: edited(folder / "config.json", vocab_size=10**9), "parameters"),
    "wide": (lambda folder: edited(folder / "config.json", intermediate_size=10**9), "parameters"),
    "positions": (lambda folder: edited(folder / "config.json", max_position_embeddings=10**9), "parameters"),
    "a path outside": (lambda folder: another_module(folder, path="../other"), "outside"),
    "an absolute path": (lambda folder: another_module(folder, path="/etc"), "outside"),
    "another library": (
        lambda folder: another_module(folder, type="antigravity.Module"),
        "not part of Sentence",
    ),
    "a zip bomb": (zip_bomb, "pickle files"),
    "a large dense layer": (large_dense_layer, "asks for 1,000,000 .in_features."),
    "a large LSTM": (large_lstm, "asks for 40,000 .hidden_dim."),
    "layers of an inner config": (
        lambda folder: edited(folder / "config.json", text_config={"num_hidden_layers": 10**6}),
        "1,000,000",
    ),
    "layers of a routed model": (routed_layers, "1,000,000"),
    "a route outside": (lambda folder: routed(folder, "../other"), "outside"),
    "nested modules": (lambda folder: (folder / "modules.json").write_text("[" * 10**5), "can't be read"),
    "no list of modules": (
        lambda folder: (folder / "modules.json").write_text("{}"),
        "not a list of modules",
    ),
    "no object of routes": (lambda folder: (folder / "router_config.json").write_text("[]"), "not a config"),
    "no pooling": (unpooled, "add a Pooling module"),
    "attention code": (
        lambda folder: edited(folder / "config.json", _attn_implementation="some/kernel"),
        "remove _attn_implementation",
    ),
    "no config": (lambda folder: (folder / "config.json").write_text("[1]"), "not a config"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_models_from_strangers(folder: Path, name: str) -> None:
    change, said = STRANGE[name]
    change(folder)
    with pytest.raises(BadModel, match=said) as raised:
        load(folder)
    assert "\n" not in str(raised.value)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer": "../tokenizer.json"}, "outside"),
        ({"tokenizer": "/etc/passwd"}, "outside"),
        ({"dimensions": 10**12}, "dimensions is 1000000000000"),
        ({"max_tokens": "all"}, "max_tokens is 'all'"),
        ({"prompts": {"query": 7}}, "a prompt is no text"),
        ({"graphs": [{"path": "a", "engine": "other", "precision": "float32"}]}, "unknown kind"),
    ],
)
def test_an_exported_folder_from_strangers(tmp_path: Path, change: dict[str, object], said: str) -> None:
    about = Description(dimensions=4, normalised=True, max_tokens=8, pad_id=0, parameters=1)
    (tmp_path / "encoder.json").write_text(json.dumps(json.loads(about.as_text()) | change))
    with pytest.raises(BadModel, match=said):
        read_description(tmp_path)


def test_pickled_weights_are_rejected(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(BadModel, match="pickle files"):
        load(folder)


def test_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(BadModel, match=r"config.json can't be read"):
        load(folder)


def test_code_that_comes_with_a_model_does_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoModel": "evil.Model", "AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(BadModel, match="brings its own code to run"):
        load(folder)


def test_code_of_a_later_module_does_not_run_by_an_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library asks on the terminal where nothing says whether to run code."""
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    later = {"path": "2_More", "type": "sentence_transformers.models.Transformer"}
    modules = json.loads((folder / "modules.json").read_text())
    shutil.copytree(folder, folder / "2_More")
    (folder / "modules.json").write_text(json.dumps([*modules, later]))
    edited(folder / "2_More" / "config.json", model_type="custom", auto_map={"AutoConfig": "evil.Config"})
    (folder / "2_More" / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(BadModel, match="custom code"):
        load(folder)
    assert not asked


def test_code_that_comes_with_a_bare_model_runs_on_request(tmp_path: Path) -> None:
    """The config, the tokenizer and the model each ask the library separately."""
    folder = Path(pico.save_backbone("bert", str(tmp_path / "model")))
    (folder / "own.py").write_text(
        "from transformers import BertConfig, BertModel, PreTrainedTokenizerFast\n"
        "class Config(BertConfig):\n    model_type = 'custom'\n"
        "class Model(BertModel):\n    config_class = Config\n"
        "class Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    own = {
        "config.json": {"AutoConfig": "own.Config", "AutoModel": "own.Model"},
        "tokenizer_config.json": {"AutoTokenizer": [None, "own.Tokenizer"]},
    }
    for name, classes in own.items():
        content = json.loads((folder / name).read_text()) | {"auto_map": classes}
        content |= {"model_type": "custom"} if name == "config.json" else {"tokenizer_class": "Tokenizer"}
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(BadModel, match="brings its own code to run"):
        load(folder, device="cpu")
    model = load(folder, device="cpu", trust_remote_code=True)
    parts = (model[0].model.config, model[0].model, model.tokenizer)
    assert [type(part).__name__ for part in parts] == ["Config", "Model", "Tokenizer"]
    assert model.encode("a text").shape == (32,)


def test_an_unknown_family_names_what_a_row_needs() -> None:
    with pytest.raises(UnknownFamily, match="can still teach"):
        _family_of("mamba")
    assert "bert" in _BY_MODEL_TYPE


def test_inputs_that_are_not_strings(pico_model: Callable[[str], SentenceTransformer]) -> None:
    encode = embedder(pico_model("bert")).text
    with pytest.raises(BadInput, match="text 2 has the type int"):
        encode(["fine", 7])  # type: ignore[list-item]
    with pytest.raises(BadInput, match="text 1 holds an unpaired surrogate"):
        encode(["broken \ud800 text"])
    assert encode([]).shape == (0, 32)


@pytest.mark.parametrize("text", ["", "   ", "nul \x00 inside", "x" * 1_000_000, "word " * 200_000])
def test_odd_texts_still_have_vectors(text: str, pico_model: Callable[[str], SentenceTransformer]) -> None:
    vectors = embedder(pico_model("bert")).text([text, "a plain text"])
    assert np.isfinite(vectors).all()


def test_a_text_with_nothing_to_pool_is_named(pico_model: Callable[[str], SentenceTransformer]) -> None:
    with pytest.raises(BadInput, match="has nothing to embed"):
        embedder(pico_model("llama")).text(["fine", ""])


def test_nan_weights_are_named(folder: Path) -> None:
    model = load(folder)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(BadModel, match="NaN or infinity for text 1"):
        embedder(model, name="broken").text(["a text"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_weight_with_nan_or_infinity_is_rejected_on_loading(folder: Path, value: float) -> None:
    model = load(folder)
    with torch.no_grad():
        model[0].model.embeddings.word_embeddings.weight[7, 3] = value  # a token that texts need not have
    model.save_pretrained(str(folder))
    with pytest.raises(BadModel, match=r"holds NaN or infinity in 0\..*word_embeddings.weight; download"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_large_weights_of_other_types_are_loaded(folder: Path, dtype: torch.dtype) -> None:
    model = load(folder).to(dtype)
    with torch.no_grad():
        model[0].model.embeddings.word_embeddings.weight[7, :2] = torch.tensor([6e4, -6e4])
        model[0].model.pooler.dense.weight[0, 0] = float("nan")  # which no vector is made of
    model.save_pretrained(str(folder))
    assert load(folder)[0].model.embeddings.word_embeddings.weight[7, 0] > 5e4


def test_weights_of_one_byte_are_not_checked(folder: Path) -> None:
    model = load(folder)
    weight = torch.zeros(2, dtype=torch.float8_e4m3fn)
    model[0].register_parameter("scaled", torch.nn.Parameter(weight, requires_grad=False))
    _check_weights_finite(model, folder)


def test_prompts_reach_their_role(pico_model: Callable[[str], SentenceTransformer]) -> None:
    plain = pico_model("bert")
    prompted = SentenceTransformer(
        modules=list(plain), prompts={"query": "queries are ", "document": ""}, device="cpu"
    )
    roles = embedder(prompted)
    np.testing.assert_allclose(roles.query(["short"]), plain.encode(["queries are short"]), atol=1e-6)
    np.testing.assert_allclose(roles.document(["short"]), plain.encode(["short"]), atol=1e-6)
