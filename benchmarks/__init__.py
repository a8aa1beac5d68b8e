"""Measurements that compare foretoken with other engines; not part of the package."""
