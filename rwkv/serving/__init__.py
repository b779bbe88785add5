"""The HTTP server around the engine, with the interfaces of OpenAI, Ollama and Anthropic, in two processes.

    HTTP        server       starts everything; http, origins: connections and who may use them
                api          routes, authorisation and errors; endpoints/: a file for each interface
                schema       bodies of requests; bodies: reading them; openapi: their description; page.html
                submission   sequences from a request's options, and the queue; service: what the endpoints share
                answers      texts as OpenAI's objects and events; logprobs; responses, states: those that are kept
                remote       the engine as HTTP sees it: its process, a queue before it, the events of each request
    between     messages     what the two send each other
    engine      worker       loads the model and generates; state_store: the content of the states
"""
