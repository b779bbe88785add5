"""The HTTP server around the engine, with the interfaces of OpenAI, Ollama and Anthropic, in two processes.

    server       starts everything; api: routes, authorisation and errors
    http/        HTTP itself: connections, errors, bodies, and who may connect
    endpoints/   a file for each interface; service: what they share; page.html; openapi: their description
    schema       request bodies
    submission   sequences from a request's options
    answers      sequences as OpenAI's objects and events; logprobs
    responses/   OpenAI's Responses: their store, the translation of a request, the events of an answer
    states/      clients' saved states, in memory and in files; sharing: several servers on one folder
    engine/      worker: the process that loads the model and generates; remote: its side in the HTTP process; queue
    messages     between the two processes; metrics and log of what happens
"""
