"""Training: fit.py runs five stages on the parts in the other files; a folder per subject."""
