"""Training. fit.py carries out a training run in five stages; the other files and folders are the parts it uses."""
