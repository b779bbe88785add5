"""The HTTP layer, which handles connections, errors, request bodies and checks of the origin."""
