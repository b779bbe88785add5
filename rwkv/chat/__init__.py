"""Conversations as text: the templates, and calls of tools, that data, the server and the terminal chat share."""
