"""Operators with pluggable implementations. Knows torch and the back ends; nothing of RWKV, Hydra, Lightning or W&B."""
