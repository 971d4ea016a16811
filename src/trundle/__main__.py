"""`python -m trundle`."""

from trundle.cli.app import main

main()
