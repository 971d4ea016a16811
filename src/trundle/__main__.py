"""`python -m trundle`."""

from __future__ import annotations

from trundle.cli.app import main

main()
