"""The HTTP layer: connections, errors, request bodies, and checks of the origin."""
