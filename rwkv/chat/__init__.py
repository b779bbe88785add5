"""Conversations as text: chat templates and tool calls, for training data, the server and the terminal chat."""
