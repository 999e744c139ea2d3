"""The command line. Each subcommand imports what it needs when it runs: `paceline generate` never imports torch."""

from paceline.cli.entry import main

__all__ = ["main"]
