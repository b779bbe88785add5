"""The HTTP server, with the APIs of OpenAI, Ollama and Anthropic. It runs as two processes: HTTP and the engine.

    server       starts everything; api: routes, authorisation and errors
    http/        the HTTP layer: connections, errors, request bodies, and checks of the origin
    endpoints/   one file per API; service: what they share; page.html: a page for trying the server; openapi: /openapi.json
    schema       request bodies
    submission   turns a request's options into sequences for the engine
    answers      turns generated sequences into OpenAI's objects and events; logprobs: their log-probabilities
    responses/   OpenAI's Responses API: translates requests and answers, and stores responses
    states/      clients' saved states, in memory and in files; sharing: several servers that share a folder
    engine/      worker: the process that loads the model and generates; remote, queue: its counterpart in the HTTP process
    messages     what the two processes send to each other; metrics, log: what the server reports
"""
