"""OpenAI's Responses API. Each response is a conversation whose final state is saved.

request.py translates a request into one for a chat completion. events.py turns the answer into items: thoughts, messages and
tool calls. store.py stores the response with its input items, output items and final state, so that a request with
previous_response_id continues from that state without a second prefill.
"""
