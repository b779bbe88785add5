"""Lightning callbacks: one file per purpose."""
