"""The reference target `tinycode` and its draft model, trained from scratch on Python source."""
