"""Everything that only a GPU can tell, measured and proven by one command in under nine minutes."""
