"""Files and processes: whole writes, bounded reads, locks, journals, the user's cache directory, signals."""
