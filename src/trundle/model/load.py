"""Load any model as a SentenceTransformer.

A sentence-transformers folder is loaded unchanged. A bare encoder gets mean pooling. A decoder LLM gets
position-weighted mean pooling (or last-token pooling with an end token) and a pad token, and loses its LM
head. A hub name is downloaded first. Weights are read from safetensors only, and code that comes with a model
runs only on request.
"""

from __future__ import annotations

import json
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import PreTrainedModel

from trundle.cache import model_folder
from trundle.errors import BadInput, BadModel
from trundle.model.anatomy import _BY_MODEL_TYPE, family_of
from trundle.model.heads import _ending_tokenizer
from trundle.model.nested import Nested, _default_selection, _read_nested, at_width, is_trained, untrained
from trundle.model.token_map import _MAPPED_TYPE, MappedTransformer
from trundle.runtime.description import is_exported

_PoolingChoice = Literal["mean", "weightedmean", "lasttoken", "cls"]

_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model"),
    *("sentencepiece.bpe.model", "spiece.model"),
)


def load(
    name: str | Path,
    *,
    pooling: _PoolingChoice | None = None,
    trust_remote_code: bool = False,
    device: str | None = None,
    width: str | Fraction | None = None,
) -> SentenceTransformer:
    """Load a folder or hub name as a SentenceTransformer.

    `pooling` is for models without one; the default is mean for encoders and weightedmean for decoders.
    `width` loads a nested model at one of its sizes, such as "1/2".
    """
    folder = model_folder(str(name), trust_remote_code=trust_remote_code)
    config = _check_folder(folder, trust_remote_code)
    try:
        if (folder / "modules.json").is_file():
            model = _load_embedder(folder, trust_remote_code, device)
        else:
            model = _with_pooling(folder, config, pooling, trust_remote_code, device)
    except BadModel:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise BadModel(f"{name} can't be loaded ({reason}); check the folder or download it again") from error
    backbone = getattr(model[0], "model", None) if len(model) else None
    if isinstance(backbone, PreTrainedModel):
        _check_complete(backbone, _backbone_folder(folder))
        _limit_to_positions(model, backbone)
    return model if width is None else _narrowed(model, folder, width)


def is_embedder(name: str | Path) -> bool:
    """Return whether a folder or hub name is an embedding model, not a bare backbone."""
    return (model_folder(str(name)) / "modules.json").is_file()


def nested_in(name: str | Path) -> Nested | None:
    """Return the sizes inside the model of a folder or hub name, or None if it is not nested."""
    return _read_nested(model_folder(str(name)))


def _narrowed(model: SentenceTransformer, folder: Path, width: str | Fraction) -> SentenceTransformer:
    try:
        share = Fraction(width)
    except (ValueError, ZeroDivisionError) as error:
        raise BadInput(f"the width {width!r} is not a share; pass one such as '1/2'") from error
    nested = _read_nested(folder)
    trained = share == 1 or is_trained(nested, model, share)
    if not trained:
        warnings.warn(untrained(folder.name, share, nested), stacklevel=3)
    how = _default_selection(model) if nested is None else nested.selection
    return at_width(model, share, how, nested if trained else None)


def _load_embedder(folder: Path, trust_remote_code: bool, device: str | None) -> SentenceTransformer:
    settings: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code}
    settings |= {"local_files_only": True, "model_kwargs": {"use_safetensors": True}}
    if any(module.get("type") == _MAPPED_TYPE for module in _read_json(folder / "modules.json")):
        classes = {_MAPPED_TYPE: MappedTransformer}
        return SentenceTransformer._load_with_module_classes(str(folder), classes, **settings)
    return SentenceTransformer(str(folder), **settings)


def _with_pooling(
    folder: Path,
    config: dict[str, Any],
    pooling: _PoolingChoice | None,
    trust_remote_code: bool,
    device: str | None,
) -> SentenceTransformer:
    if pooling is None:
        pooling = "weightedmean" if family_of(str(config.get("model_type"))).causal else "mean"
    settings = {"use_safetensors": True, "trust_remote_code": trust_remote_code, "local_files_only": True}
    transformer = Transformer(str(folder), model_kwargs=settings)
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


def _limit_to_positions(model: SentenceTransformer, backbone: PreTrainedModel) -> None:
    """If positions start after the pad token's id, there are fewer than the library's own limit allows."""
    family = _BY_MODEL_TYPE.get(backbone.config.model_type)
    if family is not None and family.positions_after_pad:
        embeddings: Any = backbone.embeddings
        positions = embeddings.position_embeddings.num_embeddings - embeddings.padding_idx - 1
        model.max_seq_length = min(model.max_seq_length or positions, positions)


def _check_complete(backbone: PreTrainedModel, folder: Path | None) -> None:
    """Reject files that lack weights the config asks for; the library would initialise them at random."""
    if folder is None:
        return
    endings: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="np") as weights:
            names = list(weights.keys())
        for parts in (name.split(".") for name in names):
            endings.update(".".join(parts[start:]) for start in range(len(parts)))
    for name, _ in backbone.named_parameters():
        old_name = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        if not name.startswith("pooler.") and not {name, old_name} & endings:
            raise BadModel(f"{folder} holds no weights for {name}; download the full model")


def _check_folder(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Reject what can't or should not be loaded, before anything heavy; return the backbone's config."""
    if is_exported(folder) and not any(folder.rglob("*.safetensors")):
        raise BadModel(f"{folder} holds graphs without torch weights; pass the model it was exported from")
    if not (folder / "modules.json").is_file() and not (folder / "config.json").is_file():
        raise BadModel(f"{folder} has neither modules.json nor config.json; pass a model folder")
    for file in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(str(file), framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise BadModel(f"{file} is truncated or damaged ({error}); download it again") from error
    for pickle in (*folder.rglob("*.bin"), *folder.rglob("*.pt")):
        if not any(pickle.parent.glob("*.safetensors")) and not pickle.with_suffix(".xml").is_file():
            raise BadModel(f"{pickle.parent} has only pickle files of weights; convert them to safetensors")
    inner = _backbone_folder(folder)
    if inner is None or not (inner / "config.json").is_file():
        return {}
    config: dict[str, Any] = _read_json(inner / "config.json")
    if config and not any(inner.glob("*.safetensors")):
        raise BadModel(f"{inner} holds no weights (*.safetensors); download the full model")
    if config and not any((inner / name).is_file() for name in _TOKENIZER_FILES):
        raise BadModel(f"{inner} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); download the full model")
    if "auto_map" in config and config.get("model_type") not in _BY_MODEL_TYPE and not trust_remote_code:
        raise BadModel(f"{folder} brings its own code to run; read it, then pass --trust-remote-code")
    return config


def _backbone_folder(folder: Path) -> Path | None:
    """The folder of the transformer's config, or None if the first module is not a transformer."""
    modules = folder / "modules.json"
    if not modules.is_file():
        return folder
    first = (_read_json(modules) or [{}])[0]
    return folder / str(first.get("path", "")) if str(first.get("type", "")).endswith("Transformer") else None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadModel(f"{path} can't be read ({error}); download or copy the model again") from error
