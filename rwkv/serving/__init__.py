"""The HTTP server around the engine, with OpenAI's interface, in two processes.

    HTTP        server       starts everything; http, origins: connections and who may use them
                api          the endpoints; schema: bodies of requests; openapi: their description; page.html
                answers      texts as OpenAI's objects and events; logprobs; responses, states: those that are kept
                remote       the engine as HTTP sees it: its process, a queue before it, the events of each request
    between     messages     what the two send each other
    engine      worker       loads the model and generates; kept_states: the content of the states
"""
