"""Names the types of parsed JSON and of state dicts, without types for their keys and values."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]              # is the content of a JSON or YAML file, a manifest, or metadata
JsonMapping = Mapping[str, Any]          # is the same, but read-only
StateDict = dict[str, Any]               # is what state_dict() of a loader, optimiser, callback or checkpoint returns
