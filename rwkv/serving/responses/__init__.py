"""Implements OpenAI's Responses API. Each response is a conversation whose final state is saved.

request.py translates a request into a chat request. events.py turns the answer into items: thoughts, messages and tool calls.
store.py stores the response with the input items, the output items and the final state. A request with previous_response_id
continues from this state without a second prefill.
"""
