"""Checks that tell why a trained head does not draft well."""
