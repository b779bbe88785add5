"""An HTTP server with the APIs of OpenAI, Ollama and Anthropic, in two processes: one for HTTP and one for the engine.

    server       starts the engine and the HTTP server
    api          has the routes, and handles API keys and errors
    http/        handles connections, request bodies, error responses and checks of the origin
    endpoints/   has one file per API; service has the objects that all endpoints share
    schema       declares the request bodies; openapi generates /openapi.json from them
    submission   turns a request's options into sequences for the engine
    answers      turns generated sequences into OpenAI's objects and events; logprobs adds the log-probabilities
    responses/   implements OpenAI's Responses API, and stores responses
    states/      stores clients' saved states in memory and in files; sharing lets several servers use one folder
    engine/      has the engine's process (worker), and the code with which the HTTP process uses it (remote, queue)
    messages     declares the messages between the two processes
    metrics, log report what the server does; page.html is a web page for trying the server
"""
