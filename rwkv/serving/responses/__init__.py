"""OpenAI's Responses in their documented form. Each is a conversation whose final state is saved.

A request becomes one for a chat completion (request), and its answer becomes items (events): thoughts, a message, calls. A
response is stored (store) with its input and output items and its final state, which previous_response_id continues without a
second prefill.
"""
