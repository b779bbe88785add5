"""The HTTP server around the engine, with the interfaces of OpenAI, Ollama and Anthropic, in two processes.

    HTTP        server       starts everything; http, origins: connections and who may use them
                api          routes, authorisation and errors; endpoints/: a file for each interface
                schema       request bodies; bodies: reading them; openapi: their description; page.html
                submission   sequences from a request's options, and the queue; service: shared by the endpoints
                answers      sequences as OpenAI's objects and events; logprobs; responses, states: the saved ones
                remote       the engine's process, its queue, and the events of each request
    between     messages     between the two processes
    engine      worker       loads the model and generates; state_store: the content of the states
"""
