"""The door: whatever the user has becomes a SentenceTransformer.

A sentence-transformers folder is opened as it is. A bare encoder gets mean pooling. A decoder LLM gets
position-weighted mean pooling (or last-token pooling with an end token to read from), a pad token, and leaves its LM
head outside. A hub name is fetched first and then treated like a folder. Weights are read from safetensors only, and
code that comes with a model runs only when it is asked for.
"""

from __future__ import annotations

import json
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import PreTrainedModel

from trundle.errors import BadInput, BadModel
from trundle.model.anatomy import _BY_MODEL_TYPE, family_of
from trundle.model.nested import Nested, _read_nested, _selection_for, at_width, is_trained, untrained
from trundle.model.pooling import _ending_tokenizer
from trundle.model.token_map import _MAPPED_TYPE, MappedTransformer
from trundle.runtime.description import is_exported

_PoolingChoice = Literal["mean", "weightedmean", "lasttoken", "cls"]

_FETCHED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
)
_NOT_FETCHED = ["onnx/*", "openvino/*", "original/*"]


def load(
    name: str | Path,
    *,
    pooling: _PoolingChoice | None = None,
    trust_remote_code: bool = False,
    device: str | None = None,
    width: str | Fraction | None = None,
) -> SentenceTransformer:
    """Open a folder or hub name as a SentenceTransformer, or say in one sentence why it can't be opened.

    `pooling` is for models that come without one: mean for encoders and weightedmean for decoders by default. `width`
    opens a nested model at one of its sizes, such as "1/2".
    """
    folder = _folder(str(name), trust_remote_code)
    model = _load(folder, name, pooling, trust_remote_code, device)
    return model if width is None else _narrowed(model, folder, width)


def _load(
    folder: Path,
    name: str | Path,
    pooling: _PoolingChoice | None,
    trust_remote_code: bool,
    device: str | None,
) -> SentenceTransformer:
    config = _check_folder(folder, trust_remote_code)
    try:
        model = _open(folder, config, pooling, trust_remote_code, device)
    except BadModel:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise BadModel(
            f"{name} can't be opened as an embedding model ({reason}); check the folder or fetch it again"
        ) from error
    _check_complete(model, _backbone_place(folder))
    _keep_within_positions(model)
    return model


def is_embedder(name: str | Path) -> bool:
    """Whether a folder or hub name holds a model that was made to embed, and not a bare backbone."""
    return (_folder(str(name), trust_remote_code=False) / "modules.json").is_file()


def nested_in(name: str | Path) -> Nested | None:
    """The sizes inside the model of a folder or hub name, or None where it was never nested."""
    return _read_nested(_folder(str(name), trust_remote_code=False))


def _narrowed(model: SentenceTransformer, folder: Path, width: str | Fraction) -> SentenceTransformer:
    """The model at a width; one that was never trained is taken all the same, with a warning."""
    try:
        share = Fraction(width)
    except (ValueError, ZeroDivisionError) as error:
        raise BadInput(f"the width {width!r} is no share of the model's; give one such as '1/2'") from error
    nested = _read_nested(folder)
    trained = share == 1 or is_trained(nested, model, share)
    if not trained:
        warnings.warn(untrained(folder.name, share, nested), stacklevel=3)
    return at_width(model, share, _selection_for(nested, model), nested if trained else None)


def _open(
    folder: Path,
    config: dict[str, Any],
    pooling: _PoolingChoice | None,
    trust_remote_code: bool,
    device: str | None,
) -> SentenceTransformer:
    if not (folder / "modules.json").is_file():
        return _with_pooling(folder, config, pooling, trust_remote_code, device)
    settings: dict[str, Any] = {
        "device": device,
        "trust_remote_code": trust_remote_code,
        "local_files_only": True,
        "model_kwargs": {"use_safetensors": True},
    }
    if any(module.get("type") == _MAPPED_TYPE for module in _read_json(folder / "modules.json")):
        ours = {_MAPPED_TYPE: MappedTransformer}
        return SentenceTransformer._load_with_module_classes(str(folder), ours, **settings)
    return SentenceTransformer(str(folder), **settings)


def _keep_within_positions(model: SentenceTransformer) -> None:
    """Where positions are counted from behind the pad token's id there are fewer than the library's own limit allows."""
    backbone = getattr(model[0], "model", None) if len(model) else None
    if not isinstance(backbone, PreTrainedModel):
        return
    family = _BY_MODEL_TYPE.get(backbone.config.model_type)
    if family is None or not family.positions_after_pad:
        return
    embeddings: Any = backbone.embeddings
    positions = embeddings.position_embeddings.num_embeddings - embeddings.padding_idx - 1
    model.max_seq_length = min(model.max_seq_length or positions, positions)


def _check_complete(model: SentenceTransformer, place: Path | None) -> None:
    """Refuse a backbone whose config asks for more than the files hold: the library would make the rest up."""
    backbone = getattr(model[0], "model", None) if len(model) else None
    if place is None or not isinstance(backbone, PreTrainedModel):
        return
    stored: set[str] = set()
    for file in place.glob("*.safetensors"):
        with safe_open(str(file), framework="np") as weights:
            stored.update(weights.keys())
    endings = {
        ".".join(parts[start:]) for key in stored for parts in [key.split(".")] for start in range(len(parts))
    }
    for parameter, _ in backbone.named_parameters():
        old_name = parameter.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )
        if not parameter.startswith("pooler.") and not {parameter, old_name} & endings:
            raise BadModel(
                f"{place} holds no weights for {parameter}, which its config asks for; fetch the whole model"
            )


def _folder(name: str, trust_remote_code: bool) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise BadModel(f"{name} is a file; give the model's folder")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name.strip():
        raise BadModel(
            f"there is no folder {name!r}; give a model folder or a hub name such as all-MiniLM-L6-v2"
        )
    patterns = [*_FETCHED, "*.py"] if trust_remote_code else _FETCHED
    candidates = [name] if "/" in name else [f"sentence-transformers/{name}", name]
    for candidate in candidates:
        try:
            return Path(snapshot_download(candidate, allow_patterns=patterns, ignore_patterns=_NOT_FETCHED))
        except (RepositoryNotFoundError, HFValidationError):
            continue
        except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
            raise BadModel(
                f"{name!r} is not a folder here and the model hub can't be reached; "
                "give a local model folder, or connect to the network and run again"
            ) from error
    raise BadModel(f"{name!r} is neither a folder here nor a model on the hub; check the spelling")


def _check_folder(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Refuse what can't or shouldn't be opened, before anything heavy; return the backbone's config."""
    if is_exported(folder) and not any(folder.rglob("*.safetensors")):
        raise BadModel(
            f"{folder} holds graphs without torch weights, which can be run but not changed; give the model it was exported from"
        )
    if not (folder / "modules.json").is_file() and not (folder / "config.json").is_file():
        raise BadModel(
            f"{folder} is not a model folder: it has neither modules.json nor config.json; "
            "give the folder that model.save_pretrained() wrote"
        )
    for file in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(str(file), framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise BadModel(
                f"{file} is cut short or damaged ({error}); fetch or copy the model again"
            ) from error
    for pickle in (*folder.rglob("*.bin"), *folder.rglob("*.pt")):
        if not any(pickle.parent.glob("*.safetensors")) and not pickle.with_suffix(".xml").is_file():
            raise BadModel(
                f"{pickle.parent} has its weights only as pickle files, which can run code when opened; "
                "convert them to safetensors first"
            )
    place = _backbone_place(folder)
    if place is None:
        return {}
    config = _read_json(place / "config.json") if (place / "config.json").is_file() else {}
    if config and not any(place.glob("*.safetensors")):
        raise BadModel(f"{place} holds no weights (*.safetensors); fetch the whole model")
    if config and not any((place / name).is_file() for name in _TOKENIZER_FILES):
        raise BadModel(f"{place} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); fetch the whole model")
    if "auto_map" in config and config.get("model_type") not in _BY_MODEL_TYPE and not trust_remote_code:
        raise BadModel(
            f"{folder} brings its own code to run; read it, and say --trust-remote-code if you trust it"
        )
    return config


def _backbone_place(folder: Path) -> Path | None:
    """Where the transformer's config and weights are, or None where the first module is not a transformer."""
    modules = folder / "modules.json"
    if not modules.is_file():
        return folder
    first = (_read_json(modules) or [{}])[0]
    return folder / str(first.get("path", "")) if str(first.get("type", "")).endswith("Transformer") else None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadModel(f"{path} can't be read ({error}); fetch or copy the model again") from error


def _with_pooling(
    folder: Path,
    config: dict[str, Any],
    pooling: _PoolingChoice | None,
    trust_remote_code: bool,
    device: str | None,
) -> SentenceTransformer:
    """Give a bare encoder or a decoder LLM what it lacks to be an embedder."""
    model_type = str(config.get("model_type"))
    if pooling is None:
        pooling = "weightedmean" if family_of(model_type).causal else "mean"
    transformer = Transformer(
        str(folder),
        model_kwargs={
            "use_safetensors": True,
            "trust_remote_code": trust_remote_code,
            "local_files_only": True,
        },
    )
    tokenizer = transformer.tokenizer
    if tokenizer is None:
        raise BadModel(f"{folder} has no tokenizer; add its tokenizer.json")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise BadModel(f"{folder}'s tokenizer has no pad and no end token; set one in tokenizer_config.json")
    if pooling == "lasttoken":
        transformer.processor = _ending_tokenizer(tokenizer)
    width = transformer.get_embedding_dimension()
    return SentenceTransformer(modules=[transformer, Pooling(width, pooling_mode=pooling)], device=device)
