"""Conversations as text: chat templates and calls of tools. Training data, the server and the terminal chat share them."""
