"""Creates, opens, locks and resumes a run's directory."""
