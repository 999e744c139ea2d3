"""Paceline: disaggregated LLM serving. See ARCHITECTURE.md for the map, docs/life-of-a-request.md for the journey."""

from importlib.metadata import version

__version__ = version("paceline")
