"""Lightning callbacks, one file for each purpose."""
