"""The errors that trundle raises.

    TrundleError                 the base of all of them
    ├── UserError                the caller can fix it; the command line exits with code 2
    │   ├── BadInput             a text, file, row or option that can't be used
    │   │   ├── EmptyTexts       texts of which the tokenizer leaves nothing
    │   │   └── OtherTexts       a store of vectors that was started with other texts
    │   ├── BadModel             a folder or name that is not a model trundle can load
    │   │   └── UnknownFamily    a model whose architecture has no row in the anatomy
    │   ├── BadRecipe            an invalid recipe
    │   ├── ImpossibleCut        a cut that the model does not allow
    │   └── MissingExtra         a feature whose optional packages are not installed
    └── WriteFailed              the result could not be written; earlier files are untouched (exit code 1)

A message is one sentence: what is wrong and, after a semicolon or colon, how to fix it.
"""

from __future__ import annotations

from collections.abc import Sequence

_COMPRESS_MODULES = (
    *("accelerate", "httpx2", "onnx", "onnxscript", "peft", "pyarrow", "scipy", "sentence_transformers"),
    *("sklearn", "torch", "transformers"),
)


class TrundleError(Exception):
    """The base of all errors that trundle raises."""


class UserError(TrundleError):
    """An error that the caller can fix."""


class BadInput(UserError):
    """A text, file, row or option that can't be used."""


class EmptyTexts(BadInput):
    """Texts of which the tokenizer leaves nothing; `places` are their positions among those given."""

    def __init__(self, places: Sequence[int], first: str) -> None:
        super().__init__(f"text {places[0] + 1} ({first[:60]!r}) has nothing to embed; leave it out")
        self.places = tuple(places)


class OtherTexts(BadInput):
    """A store of vectors that was started with other texts; trying again does not help."""


class BadModel(UserError):
    """A folder or name that is not a model trundle can load."""


class UnknownFamily(BadModel):
    """A model whose architecture has no row in the anatomy."""


class BadRecipe(UserError):
    """An invalid recipe."""


class ImpossibleCut(UserError):
    """A cut that the model does not allow."""


class MissingExtra(UserError):
    """A feature whose optional packages are not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs packages that are not installed: pip install 'trundle[{extra}]'")

    @classmethod
    def explain(cls, error: ModuleNotFoundError, feature: str) -> TrundleError:
        """Returns the error that names the extra that the missing module comes with."""
        module = (error.name or "").partition(".")[0]
        if module in _COMPRESS_MODULES:
            return cls(feature, "index" if module == "pyarrow" and " index" in feature else "compress")
        return TrundleError(f"{feature} failed because the package {module} is not installed; install it")


class WriteFailed(TrundleError):
    """The result could not be written; earlier files are untouched."""
