"""Turns conversations into text and back, with chat templates and tool calls, for training data, the server and the chat."""
