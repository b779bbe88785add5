"""What happens around training steps: one Lightning callback, or several of one purpose, in each file."""
