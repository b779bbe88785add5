"""Trains models. fit.py carries out a training run in five stages and uses the other files and folders."""
