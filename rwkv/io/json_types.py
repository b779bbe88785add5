"""Defines types for parsed JSON and for state dicts, whose values are not typed further."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]              # the content of a JSON or YAML file, a manifest, or metadata
JsonMapping = Mapping[str, Any]          # the same content, but read-only
StateDict = dict[str, Any]               # the result of state_dict(), or a whole checkpoint
