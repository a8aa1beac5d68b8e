"""Proofs and measurements that need a GPU, in one command of under nine minutes."""
