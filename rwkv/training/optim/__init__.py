"""Provides the optimisers, their parameter groups and schedule, and the loss scale of float16."""
