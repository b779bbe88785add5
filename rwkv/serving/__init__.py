"""The HTTP server around the engine, with OpenAI's interface. HTTP runs in this process, the engine in one of its own."""
