"""Training. fit.py runs a training run in five stages with the parts in the other files; each folder has one subject."""
