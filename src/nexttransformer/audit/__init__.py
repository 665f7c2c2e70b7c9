"""The audit: reads a finished run's files, recomputes what they claim and says whether the run followed the rules."""
