"""Every way trundle says no.

    TrundleError                 anything trundle raises on purpose
    ├── UserError                something to mend on the caller's side: the command line exits with 2
    │   ├── BadInput             a text, file, row or option that can't be used
    │   │   └── OtherTexts       a folder of vectors that other texts were begun in
    │   ├── BadModel             a folder or name that is not a model trundle can open
    │   │   └── UnknownFamily    a model whose architecture has no row in the anatomy
    │   ├── BadRecipe            a recipe that does not say what to do
    │   ├── ImpossibleCut        a cut the model can't take
    │   └── MissingExtra         a feature whose optional packages are not installed
    └── WriteFailed              the result could not be stored; what was there before is untouched (exits with 1)

A message is one sentence that names what is wrong and, after a semicolon or colon, what to do about it.
"""

from __future__ import annotations


class TrundleError(Exception):
    """Anything trundle raises on purpose."""


class UserError(TrundleError):
    """Something the caller can mend."""


class BadInput(UserError):
    """A text, file, row or option that can't be used."""


class OtherTexts(BadInput):
    """A folder of vectors that other texts were begun in: trying again is no use."""


class BadModel(UserError):
    """A folder or name that is not a model trundle can open."""


class UnknownFamily(BadModel):
    """A model whose architecture has no row in the anatomy."""


class BadRecipe(UserError):
    """A recipe that does not say what to do."""


class ImpossibleCut(UserError):
    """A cut the model can't take."""


class MissingExtra(UserError):
    """A feature whose optional packages are not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs packages that are not installed: pip install 'trundle[{extra}]'")


class WriteFailed(TrundleError):
    """The result could not be stored; what was there before is untouched."""
