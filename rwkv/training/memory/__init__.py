"""The memory of a run: an estimate, the machine's free memory, and options with which a run takes less."""
