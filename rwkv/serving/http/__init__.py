"""HTTP itself: connections, errors, bodies, and who may connect."""
