"""Folders whose zeros take one bit each: a pruned model is small on disk, and opens as the normal model it is.

A matrix with many zeros is stored as one bit a weight (is it there?) and the values that are. `load` puts the zeros back, and
so does plain sentence-transformers where trundle is installed (`trust_remote_code=True`, for the folder names a module of
ours). What is opened is a plain model again; saving it anywhere gives a plain folder.

What this is not: it makes no model faster, and no weight is rounded.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import Tensor

from trundle.errors import BadModel
from trundle.model.token_map import MAPPED_TYPE, MappedTransformer

NOTE_FILE = "packed.json"
SUFFIX = ".packed.safetensors"
BITS, KEPT = "#bits", "#kept"
SHAPES = "packed_shapes"
WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A bit for each value, true where it is not +0, and the values that are not."""
    flat = tensor.detach().cpu().contiguous().flatten()
    there = flat.view(WHOLE_NUMBERS[flat.element_size()]) != 0
    return torch.from_numpy(np.packbits(there.numpy())), flat[there]


def unpack(bits: Tensor, kept: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor as it was, to the bit."""
    whole = torch.zeros(shape, dtype=kept.dtype)
    there = np.unpackbits(bits.numpy(), count=whole.numel()).astype(bool)
    whole.view(-1)[torch.from_numpy(there)] = kept
    return whole


def pays(tensor: Tensor) -> bool:
    """Whether a tensor has zeros enough that bits cost less than they save."""
    zeros = int((tensor == 0).sum())
    return tensor.ndim == 2 and zeros * tensor.element_size() > tensor.numel() / 8


def has_much_to_pack(model: SentenceTransformer) -> bool:
    """Whether packing would make its folder smaller."""
    return any(pays(weight) for weight in model[0].state_dict().values())


def pack_folder(folder: Path) -> None:
    """Turn a saved model's folder into a packed one, in place; one without zeros to save stays as it is."""
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    place = folder / str(modules[0]["path"])
    packed = [file for file in sorted(place.glob("*.safetensors")) if _pack_file(file)]
    if not packed:
        return
    note = {"type": modules[0]["type"]}
    (folder / NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    modules[0]["type"] = PACKED_TYPE
    (folder / "modules.json").write_text(json.dumps(modules, indent=2), encoding="utf-8")


def _pack_file(file: Path) -> bool:
    stored, shapes = {}, {}
    with safe_open(str(file), framework="pt") as weights:
        metadata: dict[str, str] = dict(weights.metadata() or {})
        for name in weights.keys():  # noqa: SIM118
            tensor = weights.get_tensor(name)
            if pays(tensor):
                stored[name + BITS], stored[name + KEPT] = pack(tensor)
                shapes[name] = list(tensor.shape)
            else:
                stored[name] = tensor
    if not shapes:
        return False
    save_file(stored, str(_packed_name(file)), metadata=metadata | {SHAPES: json.dumps(shapes)})
    shutil.copymode(file, _packed_name(file))
    file.unlink()
    return True


def _packed_name(file: Path) -> Path:
    return file.with_name(file.name.removesuffix(".safetensors") + SUFFIX)


def is_packed(folder: Path) -> bool:
    """Whether a folder's zeros are stored as bits."""
    return (folder / NOTE_FILE).is_file()


@contextmanager
def unpacked(folder: Path) -> Iterator[Path]:
    """A plain copy of a packed folder, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="trundle-", ignore_cleanup_errors=True) as scratch:
        plain = Path(scratch) / folder.name
        shutil.copytree(folder, plain, ignore=shutil.ignore_patterns(f"*{SUFFIX}", NOTE_FILE))
        try:
            note = json.loads((folder / NOTE_FILE).read_text(encoding="utf-8"))
            modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
            modules[0]["type"] = note["type"]
            (plain / "modules.json").write_text(json.dumps(modules, indent=2), encoding="utf-8")
            place = str(modules[0]["path"])
            for file in sorted((folder / place).glob(f"*{SUFFIX}")):
                _unpack_file(file, plain / place)
        except (SafetensorError, ValueError, KeyError, OSError) as error:
            raise BadModel(f"{folder} is damaged ({error}); make or copy the folder again") from error
        yield plain


def _unpack_file(file: Path, into: Path) -> None:
    with safe_open(str(file), framework="pt") as weights:
        metadata: dict[str, str] = dict(weights.metadata() or {})
        shapes = json.loads(metadata.pop(SHAPES))
        names = set(weights.keys())
        stored = {name: weights.get_tensor(name) for name in names if not name.endswith((BITS, KEPT))}
        for name, shape in shapes.items():
            stored[name] = unpack(
                weights.get_tensor(name + BITS), weights.get_tensor(name + KEPT), tuple(shape)
            )
    save_file(stored, str(into / (file.name.removesuffix(SUFFIX) + ".safetensors")), metadata=metadata)


class PackedTransformer(Transformer):
    """What a packed folder calls its backbone, so that sentence-transformers asks us to open it."""

    @classmethod
    def load(  # type: ignore[override]
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **kwargs: Any,
    ) -> Transformer:
        """The plain transformer, with its zeros put back."""
        hub: dict[str, Any] = {
            "token": token,
            "cache_folder": cache_folder,
            "revision": revision,
            "local_files_only": local_files_only,
        }
        folder = cls.load_dir_path(model_name_or_path, subfolder="", **hub)
        if folder is None:
            raise BadModel(f"{model_name_or_path} can't be found; give the folder of the whole model")
        with unpacked(Path(folder)) as plain:
            modules = json.loads((plain / "modules.json").read_text(encoding="utf-8"))
            kind: type[Transformer] = MappedTransformer if modules[0]["type"] == MAPPED_TYPE else Transformer
            opened: Transformer = kind.load(str(plain), subfolder=subfolder, **hub, **kwargs)
            return opened


PACKED_TYPE = f"{PackedTransformer.__module__}.{PackedTransformer.__name__}"
"""How a packed folder's modules.json calls it."""
