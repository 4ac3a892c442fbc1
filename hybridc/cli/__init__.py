"""The command line: one file per verb, imported when the verb is used."""

from hybridc.cli.main import main

__all__ = ["main"]
