"""Parts that several kinds of drafters share."""
